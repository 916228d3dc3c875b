"""The Hopper forward's own promises: whatever stands around a row, its bits stay; rows cost what their keys cost."""

import pytest
import torch

from slattn import sparse_attention
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


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize(
    ("heads", "slots", "holes"), [(64, 640, 0.0), (33, 70, 0.9), (96, 131, 0.5), (128, 1000, 0.97)]
)
def test_rows_by_themselves_and_in_another_order_have_the_same_bits(head_dim, heads, slots, holes):
    """Blocks alternate between the two scorers over all rows of a multiprocessor; neither their number before a row
    nor the multiprocessor may be seen in it.
    """
    tensors = call(300, 900, heads, head_dim, slots, holes)
    q, kv, indices, sink, lengths = tensors
    got = run(*tensors)
    want = run(q.double(), kv.double(), indices, sink.double(), lengths, backend="reference")
    assert relative_error(got[0], want[0]) <= CASE_BUDGETS["out"]
    assert relative_error(got[1], want[1]) <= CASE_BUDGETS["lse"]
    order = torch.randperm(300, device="cuda")
    for rows in (order, order[:150], order[:1], order[1:2]):
        parts = run(q[rows], kv, indices[rows], sink, lengths[rows])
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(parts, got, strict=True))


def test_holes_are_as_if_they_were_not_there():
    q, kv, indices, sink, _ = call(200, 900, 64, 512, 640, 0.5)
    order = (indices < 0).byte().argsort(dim=-1, stable=True)
    lengths = (indices >= 0).sum(-1, dtype=torch.int32)
    got, want = run(q, kv, indices, sink, None), run(q, kv, indices.gather(-1, order), sink, lengths)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
