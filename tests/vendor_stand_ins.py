"""Stand-ins for FlashMLA and cuDNN's sparse attention, on any device: the truth, and hard to please.

Each computes what the real function computes, by slattn's reference, in that library's conventions, and asserts that
it is called as that library demands. What a library leaves undefined comes back as something harmful.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slattn import reference
from slattn.backends import vendor_runtimes
from slattn.problem import Problem


def forget() -> None:
    """Drop every answer and verdict about a library, so that none outlives a test."""
    for cached in (
        vendor_runtimes.flash_mla,
        vendor_runtimes.cudnn_dsa,
        vendor_runtimes._dialect,
        vendor_runtimes.takes_indexer_topk,
    ):
        cached.cache_clear()
    vendor_runtimes._verdicts.clear()


def problem_with(**changes: Any) -> Problem:
    """An ordinary problem on a GPU, with changes."""
    device = torch.device("cuda")
    return Problem(1, 4, 40, 64, 128, 512, 512, 512**-0.5, torch.bfloat16, device, False)._replace(**changes)


def problem_of(q: Tensor, keys: int, slots: int, scale: float) -> Problem:
    """The problem of one flat call: q [T, H, D]."""
    tokens, heads, head_dim = q.shape
    return Problem(1, tokens, keys, heads, slots, head_dim, 512, scale, q.dtype, q.device, False)


@dataclass(eq=False)
class FlashMla:
    """FlashMLA's `flash_mla_sparse_fwd`, in one of its dialects.

    `form` is its signature: "main" (and sglang-kernel) takes no indexer_topk, "nv_dev" takes it, "kwargs" takes
    anything. `base` is that of its lse: math.e or 2.
    """

    form: str = "main"
    base: float = math.e
    clears: bool = True  # out of an empty row is 0; otherwise 7
    leaks: bool = False  # reads the first key for a slot that names nothing
    slot_multiple: int = 128
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def function(self) -> Callable[..., Any]:
        """The function to hand to the code under test; the same object each time."""
        if not hasattr(self, "_function"):
            self._function = {"main": self._main, "nv_dev": self._nv_dev, "kwargs": self._kwargs}[self.form]()
        return self._function

    def _main(self) -> Callable[..., Any]:
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
            return self._run(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

        return flash_mla_sparse_fwd

    def _nv_dev(self) -> Callable[..., Any]:
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, indexer_topk=0):
            assert indexer_topk == 0
            return self._run(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

        return flash_mla_sparse_fwd

    def _kwargs(self) -> Callable[..., Any]:
        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, **kwargs):
            assert kwargs.pop("indexer_topk") == 0
            return self._run(q, kv, indices, sm_scale, **kwargs)

        return flash_mla_sparse_fwd

    def _run(self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
        tokens, heads, head_dim = q.shape
        keys, slots = kv.shape[0], indices.shape[-1]
        assert tokens > 0
        assert keys > 0
        assert heads in (64, 128)
        assert head_dim in (512, 576)
        assert d_v == 512
        assert tuple(kv.shape) == (keys, 1, head_dim)
        assert tuple(indices.shape) == (tokens, 1, slots)
        assert slots % self.slot_multiple == 0
        assert tuple(attn_sink.shape) == (heads,)
        assert tuple(topk_length.shape) == (tokens,)
        assert q.dtype == kv.dtype == torch.bfloat16
        assert attn_sink.dtype == torch.float32
        assert indices.dtype == topk_length.dtype == torch.int32
        for tensor in (q, kv, indices, attn_sink, topk_length):
            assert tensor.is_contiguous()
            assert tensor.device == q.device
        assert isinstance(sm_scale, float)
        assert not attn_sink.isposinf().any()
        rows = indices[:, 0]
        prefix = torch.arange(slots, device=q.device) < topk_length[:, None]
        assert bool(((topk_length >= 0) & (topk_length <= slots)).all())
        assert bool(((rows >= 0) & (rows < keys))[prefix].all())
        assert bool((rows[~prefix] == -1).all())
        self.calls.append({"q": q, "kv": kv, "indices": indices, "attn_sink": attn_sink, "topk_length": topk_length})
        arguments = (q[None], kv[None, :, 0], rows[None], attn_sink, topk_length[None])
        out, lse = (x[0] for x in reference.forward(problem_of(q, keys, slots, sm_scale), *arguments))
        empty = topk_length == 0
        if self.leaks:
            out = out + 0 * kv[0, 0, :512]
        if not self.clears:
            out = out.masked_fill(empty[:, None, None], 7.0)
        if self.base == 2:
            lse = (lse / math.log(2.0)).masked_fill(empty[:, None], -math.inf)
        return out, torch.full_like(lse, math.nan), lse


@dataclass(eq=False)
class CudnnDsa:
    """The namespace `cudnn.DSA`, of which the backward alone is there. It returns dkv in bf16, as the real one."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def sparse_attention_backward_wrapper(
        self, q, kv, out, dout, lse, attn_sink, topk_idxs, *, softmax_scale, topk_length
    ):
        tokens, heads, head_dim = q.shape
        keys, slots = kv.shape[0], topk_idxs.shape[-1]
        assert tokens > 0
        assert keys > 0
        assert heads in (64, 128)
        assert head_dim in (512, 576)
        assert tuple(kv.shape) == (keys, head_dim)
        assert tuple(topk_idxs.shape) == (tokens, slots)
        assert tuple(out.shape) == tuple(dout.shape) == (tokens, heads, 512)
        assert tuple(lse.shape) == (tokens, heads)
        assert tuple(attn_sink.shape) == (heads,)
        assert q.dtype == kv.dtype == out.dtype == dout.dtype == torch.bfloat16
        assert lse.dtype == attn_sink.dtype == torch.float32
        assert topk_idxs.dtype == topk_length.dtype == torch.int32
        for tensor in (q, kv, out, dout, lse, attn_sink, topk_idxs, topk_length):
            assert tensor.is_contiguous()
            assert tensor.device == q.device
        assert isinstance(softmax_scale, float)
        assert not attn_sink.isposinf().any()
        assert bool(((topk_length >= 1) & (topk_length <= slots)).all()), "an empty row hangs older releases"
        assert bool(((topk_idxs >= 0) & (topk_idxs < keys)).all()), "older releases read every slot"
        self.calls.append(
            {"q": q, "kv": kv, "out": out, "dout": dout, "lse": lse, "indices": topk_idxs, "topk_length": topk_length}
        )
        problem = problem_of(q, keys, slots, softmax_scale)
        arguments = (problem, q[None], kv[None], topk_idxs[None], attn_sink, topk_length[None])
        _check_lse(lse, reference.forward(*arguments)[1][0], q)
        dq, dkv, d_sink = reference.backward(
            *arguments,
            out[None],
            lse[None],
            dout[None],
            None,
            needs=(True, True, True),
            dkv_dtype=torch.bfloat16,
        )
        return {"dq": dq[0], "dkv": dkv[0], "d_sink": d_sink}


def _check_lse(lse: Tensor, truth: Tensor, q: Tensor) -> None:
    """lse is natural and over the keys alone; +inf only where the query is 0; padded heads are 0 throughout."""
    padding = (q == 0).all(-1)
    assert not lse.isneginf().any()
    assert not lse.isnan().any()
    live = ~padding & truth.isfinite()
    torch.testing.assert_close(lse[live], truth[live], rtol=1e-5, atol=1e-4)
    assert bool(((lse == 0) | lse.isposinf())[padding].all())
