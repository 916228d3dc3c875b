"""The Hopper forward's own promises: whatever stands around a row, its bits stay, and holes are not there."""

import math

import pytest
import torch

from slattn import sparse_attention
from slattn.backends import tilelang
from slattn.problem import describe
from slattn.testing import CASE_BUDGETS, relative_error

pytestmark = pytest.mark.gpu


def call(tokens, keys, heads, head_dim, slots, holes, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(tokens, heads, head_dim, generator=g, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys, head_dim, generator=g, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(keys, (tokens, slots), generator=g, device="cuda", dtype=torch.int32)
    indices[torch.rand(tokens, slots, generator=g, device="cuda") < holes] = -1
    lengths = torch.randint(slots + 1, (tokens,), generator=g, device="cuda", dtype=torch.int32)
    return q, kv, indices, torch.randn(heads, generator=g, device="cuda"), lengths


def run(q, kv, indices, sink, lengths, backend="tilelang"):
    return sparse_attention(q, kv, indices, attn_sink=sink, topk_length=lengths, return_lse=True, backend=backend)


def same(got, want):
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize(
    ("heads", "slots", "holes"), [(64, 640, 0.0), (20, 70, 0.9), (96, 131, 0.5), (128, 1000, 0.97)]
)
def test_rows_again_by_themselves_and_in_another_order_have_the_same_bits(head_dim, heads, slots, holes):
    """Blocks go through buffers in turn over all rows of a multiprocessor; neither their number before a row nor the
    multiprocessor may be seen in it.
    """
    tensors = call(300, 900, heads, head_dim, slots, holes)
    q, kv, indices, sink, lengths = tensors
    got = run(*tensors)
    want = run(q.double(), kv.double(), indices, sink.double(), lengths, backend="reference")
    assert relative_error(got[0], want[0]) <= CASE_BUDGETS["out"]
    assert relative_error(got[1], want[1]) <= CASE_BUDGETS["lse"]
    assert all(same(run(*tensors), got) for _ in range(8))
    order = torch.randperm(300, device="cuda")
    for rows in (order, order[:150], order[:1], order[1:2]):
        assert same(run(q[rows], kv, indices[rows], sink, lengths[rows]), [whole[rows] for whole in got])


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("count", [1, 7])
def test_how_many_multiprocessors_share_the_rows_is_not_seen(head_dim, count, monkeypatch):
    """All rows in one stream: as many as a multiprocessor has in a call of tens of thousands."""
    tensors = call(200, 900, 64, head_dim, 200, 0.5)
    got = run(*tensors)
    monkeypatch.setattr(tilelang, "_multiprocessors", lambda device: count)
    assert same(run(*tensors), got)


@pytest.mark.parametrize("head_dim", [512, 576])
def test_reference_rounding_keeps_them_too(head_dim):
    """The drop-in that asks for it has D = 512 only; the kernel has both."""
    q, kv, indices, sink, _ = call(300, 900, 64, head_dim, 640, 0.5)

    def rounded(rows):
        tensors = q[None, rows], kv[None], indices[None, rows]
        problem = describe(*tensors, attn_sink=sink, d_v=512)
        out, lse = tilelang.forward(problem, *tensors, sink, None, reference_rounding=True)
        return out[0], lse[0]

    got = rounded(slice(None))
    want = run(q.double(), kv.double(), indices, sink.double(), None, backend="reference")
    assert relative_error(got[0], want[0]) <= CASE_BUDGETS["out"]
    assert relative_error(got[1], want[1]) <= CASE_BUDGETS["lse"]
    assert same(rounded(slice(None)), got)
    for rows in (torch.randperm(300, device="cuda"), [17]):
        assert same(rounded(rows), [whole[rows] for whole in got])


@pytest.mark.parametrize("head_dim", [512, 576])
def test_maxima_that_grow_with_each_block(head_dim):
    """Keys in the order of their scores, so that each block asks for its factor on what is there."""
    q, kv, _, sink, _ = call(40, 640, 64, head_dim, 1, 0.0)
    q = (q + q.mean(1, keepdim=True) * 24).bfloat16()  # heads alike
    order = (q.float().mean(1) @ kv.float().T).argsort(dim=-1).int()
    for indices in (order, order.flip(-1).contiguous()):
        got = run(q, kv, indices, sink, None)
        want = run(q.double(), kv.double(), indices, sink.double(), None, backend="reference")
        assert relative_error(got[0], want[0]) <= CASE_BUDGETS["out"]
        assert relative_error(got[1], want[1]) <= CASE_BUDGETS["lse"]


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [17, 128])
def test_empty_rows_among_others(head_dim, heads):
    """Runs of them, at both ends too, by holes and by lengths; the others' bits are those of a call without any."""
    q, kv, indices, sink, lengths = call(500, 900, heads, head_dim, 131, 0.0)
    lengths.clamp_(min=1)
    empty = torch.rand(500, device="cuda") < 0.7
    empty[[0, 1, -1]] = True
    indices[empty & (torch.arange(500, device="cuda") % 2 == 0)] = -1
    lengths[empty & (torch.arange(500, device="cuda") % 2 == 1)] = 0
    out, lse = run(q, kv, indices, sink, lengths)
    assert not out[empty].any()
    assert (lse[empty] == math.inf).all()
    full = ~empty
    assert same(run(q[full], kv, indices[full], sink, lengths[full]), (out[full], lse[full]))
    out, lse = run(q, kv, torch.full_like(indices, -1), sink, None)
    assert not out.any()
    assert (lse == math.inf).all()


@pytest.mark.parametrize("head_dim", [512, 576])
def test_holes_are_as_if_they_were_not_there(head_dim):
    q, kv, indices, sink, _ = call(200, 900, 64, head_dim, 640, 0.5)
    order = (indices < 0).byte().argsort(dim=-1, stable=True)
    lengths = (indices >= 0).sum(-1, dtype=torch.int32)
    assert same(run(q, kv, indices, sink, None), run(q, kv, indices.gather(-1, order), sink, lengths))
