"""The indexer's target and its loss: against formulas written out, by hand-computed values, and their edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import slattn
from slattn.testing import CASES, Inputs, counting_slots, make_inputs


def brute_force(inputs: Inputs, lse: Tensor, sink: Tensor | None) -> Tensor:
    """[rows, K], slot by slot from the contract's formula, in float64."""
    counts = counting_slots(inputs).flatten(0, -2)
    rows, slots = counts.shape
    kv = inputs.kv if inputs.kv.dim() == 3 else inputs.kv[None]
    per_entry = max(rows // kv.shape[0], 1)
    q, index = inputs.q.flatten(0, -3).double(), inputs.indices.flatten(0, -2)
    lse_all = lse.flatten(0, -2).double()
    if sink is not None:
        lse_all = torch.logaddexp(lse_all, sink.double())
    scale = inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    probs = torch.zeros(rows, slots, dtype=torch.float64)
    for t in range(rows):
        for k in range(slots):
            if counts[t, k]:
                key = kv[t // per_entry, index[t, k]].double()
                probs[t, k] = (scale * (q[t] @ key) - lse_all[t]).exp().sum()
    return probs


NAMES = (
    "indices-holes",
    "indices-fillers",
    "length-mixed",
    "batch-3-lengths",
    "sink-mixed-576",
    "keys-1",
    "keys-0",
    "queries-0",
    "scale-half",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_sink", [False, True])
def test_slot_probs(name: str, with_sink: bool) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = make_inputs(case, "cpu", torch.float32)
    sink = inputs.attn_sink.float() if with_sink and inputs.attn_sink is not None else None
    arguments = {"scale": inputs.scale, "topk_length": inputs.topk_length}
    _, lse = slattn.sparse_attention(inputs.q, inputs.kv, inputs.indices, return_lse=True, **arguments)
    got = slattn.attention_slot_probs(inputs.q, inputs.kv, inputs.indices, lse, attn_sink=sink, **arguments)
    assert got.shape == inputs.indices.shape
    assert got.dtype == torch.float32
    want = brute_force(inputs, lse, sink)
    torch.testing.assert_close(got.flatten(0, -2).double(), want, rtol=1e-4, atol=1e-6)
    assert not got[~counting_slots(inputs)].any()


def test_without_a_sink_each_head_gives_one() -> None:
    q, kv, indices = torch.randn(5, 3, 16), torch.randn(9, 16), torch.randint(9, (5, 7))
    indices[2] = -1
    _, lse = slattn.sparse_attention(q, kv, indices, return_lse=True)
    sums = slattn.attention_slot_probs(q, kv, indices, lse).sum(-1)
    torch.testing.assert_close(sums, torch.tensor([3.0, 3.0, 0.0, 3.0, 3.0]))


def test_slot_probs_carry_no_gradient_and_add_up_over_shards_of_heads() -> None:
    q, kv, indices = torch.randn(5, 4, 16, requires_grad=True), torch.randn(9, 16), torch.randint(9, (5, 7))
    _, lse = slattn.sparse_attention(q, kv, indices, return_lse=True)
    whole = slattn.attention_slot_probs(q, kv, indices, lse)
    parts = [slattn.attention_slot_probs(q[:, h], kv, indices, lse[:, h]) for h in (slice(0, 2), slice(2, 4))]
    assert not whole.requires_grad
    torch.testing.assert_close(whole, sum(parts))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lse": None}, TypeError, "lse must be a torch.Tensor; got NoneType"),
        ({"lse": torch.zeros(5, 4, dtype=torch.float64)}, TypeError, "got torch.float64"),
        ({"lse": torch.zeros(5, 3)}, ValueError, r"lse must be \[.., H\] = \[5, 4\]"),
        ({"indices": torch.zeros(4, 7, dtype=torch.int32)}, ValueError, "indices must be"),
    ],
)
def test_slot_probs_refuse_what_does_not_fit(change: dict, error: type, words: str) -> None:
    arguments = {"indices": torch.zeros(5, 7, dtype=torch.int32), "lse": torch.zeros(5, 4)} | change
    with pytest.raises(error, match=words):
        slattn.attention_slot_probs(torch.randn(5, 4, 16), torch.randn(9, 16), **arguments)


def test_slot_probs_as_an_operator() -> None:
    """torch.library's own checks, and traced whole."""
    q, kv, indices = torch.randn(5, 4, 16, requires_grad=True), torch.randn(9, 16), torch.randint(9, (5, 7))
    sink, length = torch.randn(4), torch.full((5,), 6, dtype=torch.int32)
    _, lse = slattn.sparse_attention(q, kv, indices, topk_length=length, return_lse=True)
    arguments = (q.detach(), kv, indices, lse.detach(), sink, length)
    torch.library.opcheck(torch.ops.slattn.slot_probs.default, (*arguments, 0.25, "reference"))
    traced = torch.compile(slattn.attention_slot_probs, backend="aot_eager", fullgraph=True)
    options = {"attn_sink": sink, "topk_length": length}
    got = traced(q, kv, indices, lse, **options)
    assert not got.requires_grad
    torch.testing.assert_close(got, slattn.attention_slot_probs(q, kv, indices, lse, **options))


def test_a_backend_without_slot_probs_refuses() -> None:
    q, kv, indices = torch.randn(5, 4, 16), torch.randn(9, 16), torch.randint(9, (5, 7))
    for backend, words in (("flashmla_cudnn", "it has no slot_probs"), ("tilelang", "the kernels need an NVIDIA GPU")):
        with pytest.raises(slattn.BackendRefusal, match=f"backend '{backend}' cannot run this call: {words}"):
            slattn.attention_slot_probs(q, kv, indices, torch.zeros(5, 4), backend=backend)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        slattn.attention_slot_probs(q, kv, indices, torch.zeros(5, 4), backend="cuda")


def test_loss_by_hand() -> None:
    scores = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    probs = torch.tensor([[6.0, 2.0], [0.5, 0.5]])  # normalised: 3/4, 1/4 and 1/2, 1/2
    first = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    second = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    rows = slattn.indexer_loss(scores, probs, reduction="none")
    torch.testing.assert_close(rows, torch.tensor([first, second]))
    torch.testing.assert_close(slattn.indexer_loss(scores, probs), rows.mean())
    torch.testing.assert_close(slattn.indexer_loss(scores, probs, reduction="sum"), rows.sum())


def test_the_loss_is_zero_where_the_scores_are_the_logarithm_of_the_target() -> None:
    probs = torch.rand(4, 9, dtype=torch.float64) + 0.1
    scores = (probs.log() + torch.randn(4, 1, dtype=torch.float64)).requires_grad_()
    loss = slattn.indexer_loss(scores, probs)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert scores.grad.abs().max() < 1e-12


def test_gradient_of_the_loss() -> None:
    probs = torch.rand(4, 6, dtype=torch.float64)
    probs[2] = 0.0
    valid = torch.rand(4, 6) < 0.8
    valid[:, 0] = True
    scores = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: slattn.indexer_loss(x, probs, valid=valid), scores)


def test_empty_rows_and_slots_that_do_not_count_are_worth_nothing() -> None:
    scores = torch.randn(3, 4, requires_grad=True)
    probs = torch.rand(3, 4)
    probs[1] = 0.0
    masked = torch.cat([scores, torch.full((3, 2), -torch.inf)], -1)
    masked = torch.where(torch.arange(3)[:, None] == 1, -torch.inf, masked)  # the empty row's scores are all -inf
    padded = torch.cat([probs, torch.zeros(3, 2)], -1)
    loss = slattn.indexer_loss(masked, padded)
    torch.testing.assert_close(loss, slattn.indexer_loss(scores[[0, 2]], probs[[0, 2]]))
    valid = torch.tensor([True] * 4 + [False] * 2).expand(3, 6)
    noisy = torch.cat([scores, torch.full((3, 2), torch.nan)], -1)
    probs_behind = torch.cat([probs, torch.ones(3, 2)], -1)
    torch.testing.assert_close(loss, slattn.indexer_loss(noisy, probs_behind, valid=valid))
    (grad,) = torch.autograd.grad(loss, scores)
    assert not grad[1].any()
    assert grad.isfinite().all()
    assert slattn.indexer_loss(scores, torch.zeros(3, 4)) == 0.0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scores": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "scores must be a float tensor; got torch.int32"),
        ({"probs": None}, TypeError, "probs must be a float tensor; got NoneType"),
        ({"probs": torch.zeros(2, 4)}, ValueError, r"probs must have scores's shape and device, \[2, 3\] on cpu; got"),
        ({"probs": torch.zeros(2, 3, device="meta")}, ValueError, r"got \[2, 3\] on meta"),
        ({"tp_group": "tp"}, RuntimeError, "torch.distributed is not initialised"),
        ({"valid": torch.ones(2, 3)}, TypeError, "valid must be a bool tensor"),
        ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'; got 'average'"),
    ],
)
def test_loss_refuses_what_does_not_fit(change: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        slattn.indexer_loss(**({"scores": torch.zeros(2, 3), "probs": torch.zeros(2, 3)} | change))
