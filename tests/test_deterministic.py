"""Deterministic mode of the kernels: how queries are taken at once and slots sorted by key, and that the bits stay."""

from __future__ import annotations

import pytest
import torch

from slattn import testing
from slattn.backends import tilelang


def test_slots_stand_in_their_order_under_each_key():
    torch.manual_seed(0)
    keys, groups, room = 7, 3, 64
    rows = torch.randint(-1, keys, (5, room), dtype=torch.int32)
    order, starts = tilelang._by_key(rows, keys, groups)
    assert order.dtype == starts.dtype == torch.int32
    assert len(starts) == keys + 1
    for key in range(keys):
        slots = [(t, s) for t in range(5) for s in range(room) if rows[t, s] == key]
        wanted = [t * groups * room + s for t, s in slots]
        assert order[starts[key] : starts[key + 1]].tolist() == wanted


@pytest.mark.parametrize("keys", [2**15 - 1, 2**15, 2**20])
def test_many_keys_sort_alike(keys):
    rows = torch.full((2, 64), -1, dtype=torch.int32)
    rows[0, :3] = torch.tensor([keys - 1, 0, keys - 1])
    rows[1, 5] = keys - 1
    order, starts = tilelang._by_key(rows, keys, 1)
    assert order[starts[keys - 1] : starts[keys]].tolist() == [0, 2, 69]
    assert order[starts[0] : starts[1]].tolist() == [1]


@pytest.mark.parametrize(
    ("groups", "room", "head_dim"), [(1, 640, 512), (2, 2048, 576), (4, 8192, 576), (2, 2**20, 576)]
)
def test_queries_at_once_fit(groups, room, head_dim):
    queries = tilelang._queries_at_once(groups, room, head_dim, 132)
    assert queries >= 1
    taken = queries * groups * room * (2 * head_dim + head_dim // 64)
    assert taken <= max(tilelang.PARTIAL_BYTES, groups * room * (2 * head_dim + head_dim // 64))
    if queries * groups >= 132:
        assert queries * groups > 132 * (queries * groups // 132) - groups  # whole rounds, but for a query's groups


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [16, 64, 96])
@pytest.mark.parametrize("grad_lse", [False, True])
def test_the_bits_do_not_depend_on_the_queries_at_once(monkeypatch, heads, head_dim, grad_lse):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("deterministic gradients are Hopper's")
    case = testing.Case(
        "deterministic",
        heads=heads,
        head_dim=head_dim,
        queries=150,
        indices="holes",
        lengths="random",
        grad_lse=grad_lse,
    )
    inputs = testing.make_inputs(case, "cuda")
    runs = []
    for size in (2 * 1024**3, 2_000_000, 20_000_000):
        monkeypatch.setattr(tilelang, "PARTIAL_BYTES", size)
        runs.append(testing.run(inputs, "tilelang", deterministic=True))
    for other in runs[1:]:
        for name in ("dq", "dkv", "dsink"):
            first, second = getattr(runs[0], name), getattr(other, name)
            assert (first is None and second is None) or torch.equal(first, second), name
