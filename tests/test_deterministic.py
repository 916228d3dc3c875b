"""Deterministic mode of the kernels: when it is chosen, how queries are taken at once and slots sorted by key, and that
the bits stay.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import slattn
from slattn import selection, testing
from slattn.backends import tilelang
from slattn.problem import describe


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(tilelang, "_machine_refusal", lambda device: None)
    monkeypatch.setattr(tilelang, "_arch", lambda device: 90)


def on_a_gpu(head_dim, deterministic):
    q = torch.empty(2, 16, head_dim, dtype=torch.bfloat16)
    d_v = 512 if head_dim == 576 else None
    call = describe(
        q, q.new_empty(5, head_dim), torch.empty(2, 4, dtype=torch.int32), d_v=d_v, deterministic=deterministic
    )
    return dataclasses.replace(call, device=torch.device("cuda", 0))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("head_dim", [512, 576])
def test_which_kernels_run_can_be_asked(head_dim):
    usual, same_bits = (tilelang.kernels(on_a_gpu(head_dim, deterministic)) for deterministic in (False, True))
    assert usual["forward"] == same_bits["forward"]
    assert usual["backward"].startswith("BackwardConfig(arch=90, head_tile=16")
    assert same_bits["backward"].startswith("HopperBackwardConfig")
    assert "partials=True" in same_bits["backward"]
    assert tilelang.refusal(on_a_gpu(head_dim, True)) is None


@pytest.mark.usefixtures("_hopper")
def test_they_are_told_with_the_backends_name(monkeypatch):
    monkeypatch.setattr(selection, "describe", lambda *tensors, **settings: on_a_gpu(512, False))
    told = slattn.select_kernels(None, None, None, backend="tilelang")
    assert told == {"backend": "tilelang", **tilelang.kernels(on_a_gpu(512, False))}
    assert slattn.select_backend(None, None, None, backend="tilelang") == "tilelang"


def test_a_backend_without_a_choice_names_itself():
    q, kv, indices = torch.zeros(2, 16, 64), torch.zeros(5, 64), torch.zeros(2, 4, dtype=torch.int32)
    assert slattn.select_kernels(q, kv, indices) == {"backend": "reference"}


@pytest.mark.usefixtures("_hopper")
def test_below_512_it_is_refused():
    assert tilelang.refusal(on_a_gpu(256, False)) is None
    reason = tilelang.refusal(on_a_gpu(256, True))
    assert reason is not None
    assert "D = 512 and 576 on compute capability 9.0" in reason
    assert reason.endswith("differs from run to run")


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
