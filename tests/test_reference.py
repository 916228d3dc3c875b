"""The oracle: hand-computed values, gradcheck, and a second, independent formulation."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from slattn import reference, sparse_attention
from slattn.testing import CASES, make_inputs, oracle, relative_error, run

INF = math.inf


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def by_hand(q: Tensor, kv: Tensor, indices: Tensor, grad: Tensor, grad_lse: Tensor | None = None, **options: object):
    """(out, lse, dq, dkv[, dsink]) of a call with scale 1."""
    leaves = [q.requires_grad_(), kv.requires_grad_()]
    if options.get("attn_sink") is not None:
        leaves.append(options["attn_sink"].requires_grad_())
    out, lse = sparse_attention(q, kv, indices, scale=1.0, return_lse=True, **options)
    grads = [grad, torch.zeros_like(lse) if grad_lse is None else grad_lse]
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, grads)


# One query (1, 0), keys (0, 1) and (ln 3, 2): logits 0 and ln 3, weights 1/4 and 3/4.
QUERY = [[[1.0, 0.0]]]
KEYS = [[0.0, 1.0], [math.log(3), 2.0]]


def test_two_keys_by_hand():
    out, lse, dq, dkv = by_hand(tensor(*QUERY), tensor(*KEYS), torch.tensor([[0, 1]]), tensor([[0.0, 1.0]]))
    torch.testing.assert_close(out, tensor([[0.75 * math.log(3), 1.75]]))
    torch.testing.assert_close(lse, tensor([math.log(4)]))
    ds = [0.25 * (1 - 1.75), 0.75 * (2 - 1.75)]  # p * (dp - delta)
    torch.testing.assert_close(dq, tensor([[ds[1] * math.log(3), ds[0] + 2 * ds[1]]]))
    torch.testing.assert_close(dkv, tensor([ds[0], 0.25], [ds[1], 0.75]))


def test_sink_of_ln_4_takes_half_by_hand():
    sink = tensor(math.log(4))
    out, lse, dq, dkv, dsink = by_hand(
        tensor(*QUERY), tensor(*KEYS), torch.tensor([[0, 1]]), tensor([[0.0, 1.0]]), attn_sink=sink
    )
    torch.testing.assert_close(out, tensor([[0.375 * math.log(3), 0.875]]))
    torch.testing.assert_close(lse, tensor([math.log(4)]))  # keys only
    ds = [0.125 * (1 - 0.875), 0.375 * (2 - 0.875)]
    torch.testing.assert_close(dq, tensor([[ds[1] * math.log(3), ds[0] + 2 * ds[1]]]))
    torch.testing.assert_close(dkv, tensor([ds[0], 0.125], [ds[1], 0.375]))
    torch.testing.assert_close(dsink, tensor(-0.5 * 0.875))


def test_duplicate_counts_twice_by_hand():
    """Logits 0, 0, ln 3: weights 1/5, 1/5, 3/5; both slots of key 0 add to its gradient."""
    out, lse, _, dkv = by_hand(tensor(*QUERY), tensor(*KEYS), torch.tensor([[0, 1, 0]]), tensor([[0.0, 1.0]]))
    torch.testing.assert_close(out, tensor([[0.6 * math.log(3), 1.6]]))
    torch.testing.assert_close(lse, tensor([math.log(5)]))
    torch.testing.assert_close(dkv, tensor([2 * 0.2 * (1 - 1.6), 0.4], [0.6 * (2 - 1.6), 0.6]))


def test_value_is_the_first_columns_by_hand():
    """d_v = 1: the second column takes part in the logits alone, and gets no P part of the gradient."""
    out, _, dq, dkv = by_hand(tensor(*QUERY), tensor(*KEYS), torch.tensor([[0, 1]]), tensor([[1.0]]), d_v=1)
    ln3 = math.log(3)
    torch.testing.assert_close(out, tensor([[0.75 * ln3]]))
    ds = [0.25 * (0 - 0.75 * ln3), 0.75 * (ln3 - 0.75 * ln3)]
    torch.testing.assert_close(dq, tensor([[ds[1] * ln3, ds[0] + 2 * ds[1]]]))
    torch.testing.assert_close(dkv, tensor([ds[0] + 0.25, 0.0], [ds[1] + 0.75, 0.0]))


def test_gradient_of_lse_by_hand():
    """d lse / d q is the mean of the keys under the weights without the sink, whatever the sink is."""
    for sink in (None, tensor(INF), tensor(1.0)):
        grads = by_hand(
            tensor(*QUERY), tensor(*KEYS), torch.tensor([[0, 1]]), tensor([[0.0, 0.0]]), tensor([1.0]), attn_sink=sink
        )
        torch.testing.assert_close(grads[2], tensor([[0.75 * math.log(3), 1.75]]))
        torch.testing.assert_close(grads[3], tensor([0.25, 0.0], [0.75, 0.0]))


@pytest.mark.parametrize("sink", [None, 0.0, INF, -INF, 2.4e38, -3e38])
def test_empty_row_is_nothing(sink: float | None):
    """Rows 0 and 2 name nothing, in three ways: their gradients may be NaN and must not be read."""
    q, kv = torch.randn(3, 1, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    indices = torch.tensor([[-1, 5], [3, -7], [2, 2]], dtype=torch.int32)
    grad = torch.full((3, 1, 4), math.nan, dtype=torch.float64)
    grad[1] = 1.0
    results = by_hand(
        q,
        kv,
        indices,
        grad,
        torch.where(grad.isnan(), INF, 0.0)[..., 0],
        attn_sink=None if sink is None else tensor(sink),
        topk_length=torch.tensor([2, 1, 0], dtype=torch.int32),
    )
    out, lse, dq, dkv = results[:4]
    assert not out[[0, 2]].any()
    assert lse[0, 0] == INF
    assert lse[2, 0] == INF
    assert not dq[[0, 2]].any()
    assert all(x.isfinite().all() for x in (out, dq, dkv, *results[4:]))
    assert not dkv[[0, 1, 2, 4]].any()
    gone = sink is not None and sink > 1e9
    torch.testing.assert_close(
        out[1, 0], torch.zeros(4, dtype=torch.float64) if gone else kv[3] / (1.0 + _weight(sink, q, kv))
    )


def _weight(sink: float | None, q: Tensor, kv: Tensor) -> float:
    """exp(sink - logit) of row 1, which names key 3 alone."""
    return 0.0 if sink is None else float(torch.exp(sink - (q[1, 0] * kv[3]).sum().detach()))


def test_infinite_sinks_have_no_gradient_and_touch_no_other_head():
    q, kv = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    indices, grad = torch.randint(6, (3, 5)), torch.randn(3, 4, 8, dtype=torch.float64)
    sink = tensor(0.3, INF, -INF, 2.4e38)
    out, lse, dq, _, dsink = by_hand(q, kv, indices, grad, attn_sink=sink)
    assert not out[:, [1, 3]].any()
    assert not dq[:, [1, 3]].any()
    assert not dsink[1:].any()
    assert dsink[0] != 0
    plain = by_hand(q, kv, indices, grad)
    torch.testing.assert_close(out[:, 2], plain[0][:, 2])
    torch.testing.assert_close(dq[:, 2], plain[2][:, 2])
    torch.testing.assert_close(lse, plain[1])


def test_gradcheck():
    """Every input, both outputs; holes, duplicates, lengths, an empty row, two batch entries, d_v < D."""
    q, kv = torch.randn(2, 3, 2, 5, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64)
    indices = torch.randint(-2, 9, (2, 3, 6))
    indices[0, 1] = -1
    indices[1, 2] = torch.tensor([4, 4, -1, 4, 0, 0])
    length = torch.tensor([[6, 9, 3], [4, 1, 6]], dtype=torch.int32)

    def call(q: Tensor, kv: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(
            q, kv, indices, attn_sink=sink, topk_length=length, d_v=3, scale=0.7, return_lse=True
        )
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, kv, sink)])


def dense(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None, d_v: int, scale: float) -> tuple[Tensor, Tensor]:
    """Second opinion: a full score matrix, how often each key is named as a count, and the sink as one more column."""
    times = torch.zeros(q.shape[0], kv.shape[0], dtype=q.dtype)
    for t, row in enumerate(indices.tolist()):
        for j in row:
            if 0 <= j < kv.shape[0]:
                times[t, j] += 1
    scores = torch.einsum("thd,nd->thn", q, kv) * scale + times.log()[:, None]
    lse = scores.logsumexp(-1)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None].expand(q.shape[0], -1, 1)], -1)
    return scores.softmax(-1)[..., : kv.shape[0]] @ kv[:, :d_v], lse


@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("duplicates", [True, False])
def test_against_dense_formulation(with_sink: bool, duplicates: bool):
    q, kv = torch.randn(9, 3, 24, dtype=torch.float64), torch.randn(40, 24, dtype=torch.float64)
    indices = torch.randint(40, (9, 17)) if duplicates else torch.rand(9, 40).argsort(-1)[:, :17]
    indices[torch.rand(9, 17) < 0.3] = -1
    indices[0, 0], indices[3, 1] = 39, 40
    sink = torch.randn(3, dtype=torch.float64) if with_sink else None
    leaves = [x.requires_grad_() for x in (q, kv, sink) if x is not None]
    grads = [torch.randn(9, 3, 16, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)]
    got = sparse_attention(q, kv, indices, attn_sink=sink, d_v=16, scale=0.3, return_lse=True)
    want = dense(q, kv, indices, sink, 16, 0.3)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads))


def test_chunks_do_not_change_results(monkeypatch: pytest.MonkeyPatch):
    case = next(case for case in CASES if case.name == "batch-3-lengths")
    inputs = make_inputs(case, "cpu", torch.float64)
    whole = oracle(inputs)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)  # one query at a time
    chunked = oracle(inputs)
    for name in ("out", "lse", "dq", "dkv", "dsink"):
        assert relative_error(getattr(chunked, name), getattr(whole, name)) < 1e-14, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype):
    q, kv = torch.randn(6, 4, 32).to(dtype), torch.randn(20, 32).to(dtype)
    indices, sink = torch.randint(-3, 20, (6, 9)), torch.randn(4)
    out, lse = sparse_attention(q, kv, indices, attn_sink=sink, return_lse=True)
    wide, wide_lse = sparse_attention(q.float(), kv.float(), indices, attn_sink=sink, return_lse=True)
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 5e-7), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_every_float_dtype_against_float64(dtype: torch.dtype, budget: float):
    case = next(case for case in CASES if case.name == "H8-D128-T16-N20-K16")
    inputs = make_inputs(case, "cpu", dtype)
    got, want = run(inputs, "reference"), oracle(inputs)
    for name in ("out", "lse", "dq", "dkv", "dsink"):
        assert relative_error(getattr(got, name), getattr(want, name)) < budget, name
    assert got.out.dtype == got.dq.dtype == got.dkv.dtype == dtype
    assert got.lse.dtype == got.dsink.dtype == torch.float32


MEMORY = """
import resource, torch, slattn
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.set_num_threads(1)
q, kv = torch.randn({queries}, 8, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
indices = torch.randint(1000, ({queries}, 1024), dtype=torch.int32)
few = slattn.sparse_attention(q[:8], kv, indices[:8])
torch.autograd.grad(few.sum(), [q, kv])
before = peak()
out = slattn.sparse_attention(q, kv, indices)
torch.autograd.grad(out, [q, kv], torch.ones_like(out))
print(peak() - before)
"""


def test_memory_does_not_hold_the_gathered_keys():
    """2048 queries of 1024 keys of 64 floats would be 512 MiB gathered; int64 rows and masks are 18 MiB."""
    script = MEMORY.format(queries=2048)
    extra = float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout)
    assert extra < 150, f"{extra:.0f} MiB"


def test_large_values_do_not_overflow_on_the_way():
    q, kv = torch.zeros(1, 2, 8), torch.full((4, 8), 3e38)
    sink = torch.tensor([0.0, torch.inf])
    out = sparse_attention(q, kv, torch.arange(4)[None], attn_sink=sink)
    torch.testing.assert_close(out[0, 0], torch.full((8,), 3e38 * 4 / 5))
    assert not out[0, 1].any()


@pytest.mark.parametrize("size", [2e2, 2e3, 5.8e3, 1e4])
@pytest.mark.parametrize("sink", [None, 0.0, 1e30])
def test_weights_sum_to_one_at_large_logits(size: float, sink: float | None):
    """In float32, at logits of 6e5 to 2e9, equal for two of three keys: lse's own rounding is no part of them."""
    q, kv = torch.full((1, 1, 16), size), torch.full((3, 16), size)
    kv[2] = -size
    out = sparse_attention(
        q, kv, torch.tensor([[0, 1, 2]]), scale=1.0, attn_sink=None if sink is None else torch.tensor([sink])
    )
    torch.testing.assert_close(out, torch.full_like(out, size if sink != 1e30 else 0.0))


def test_a_sink_far_above_leaves_what_float32_holds():
    """A weight of exp(-92), below float32's normal numbers, of a value of 3e38."""
    q, kv = torch.zeros(1, 1, 8), torch.full((1, 8), 3e38)
    out = sparse_attention(q, kv, torch.tensor([[0]]), attn_sink=torch.tensor([92.0]))
    torch.testing.assert_close(out, torch.full_like(out, 3e38 * math.exp(-92)), rtol=1e-4, atol=0)


def test_an_infinite_gradient_behind_an_infinite_sink_gives_zeros():
    q, kv, sink = (x.requires_grad_() for x in (torch.randn(3, 1, 8), torch.randn(4, 8), torch.tensor([torch.inf])))
    out = sparse_attention(q, kv, torch.arange(4).expand(3, 4), attn_sink=sink)
    for gradient in torch.autograd.grad(out, [q, kv, sink], torch.full_like(out, torch.inf)):
        assert not gradient.any()
