"""Code written for FlashMLA and for cuDNN's sparse attention, on slattn: signatures, conventions, FlashMLA's cases."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import slattn
from slattn.backends import vendor_runtimes
from slattn.frameworks import cudnn_dsa, flash_mla, vendor_results
from test_frameworks import install

LN2 = math.log(2.0)
# What FlashMLA's own test puts into slots that name nothing, and s_kv itself.
FILLERS = (-2147483648, -123456, -1, 114514, 1919810, 2147480000, 2147483647)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    """slattn's own backend looks for the libraries once; not at what a test puts in their place."""
    yield
    vendor_runtimes.flash_mla.cache_clear()
    vendor_runtimes.cudnn_dsa.cache_clear()


def inputs(
    queries: int = 62,
    keys: int = 153,
    slots: int = 256,
    heads: int = 4,
    dim: int = 576,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    q = torch.randn(queries, heads, dim).to(dtype)
    kv = torch.randn(keys, 1, dim).to(dtype)
    indices = torch.randint(0, keys, (queries, 1, slots), dtype=torch.int32)
    filled = torch.tensor([*FILLERS, keys], dtype=torch.int32)[torch.randint(0, 8, indices.shape)]
    indices = torch.where(torch.rand(indices.shape) < 0.3, filled, indices)
    return {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.05}


def dense(
    call: dict[str, Any], d_v: int = 512, attn_sink: Tensor | None = None, topk_length: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, max_logits and lse in float64, as FlashMLA defines them, from one gather of all keys."""
    q, kv, indices = call["q"].double(), call["kv"][:, 0].double(), call["indices"][:, 0].long()
    counts = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        counts &= torch.arange(indices.shape[1]) < topk_length[:, None]
    chosen = kv[indices.masked_fill(~counts, 0)]
    s = (torch.einsum("thd,tkd->thk", q, chosen) * call["sm_scale"]).masked_fill(~counts[:, None], -torch.inf)
    lse = s.logsumexp(-1)
    p = s.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("thk,tkd->thd", p, chosen[..., :d_v])
    if attn_sink is not None:
        share = torch.sigmoid(lse - attn_sink.double()).nan_to_num(0.0)
        out = out * share.masked_fill((lse == -torch.inf) | (attn_sink == torch.inf), 0.0)[..., None]
    return out, s.amax(-1), lse.masked_fill(lse == -torch.inf, torch.inf)


def assert_results(got: tuple[Tensor, Tensor, Tensor], want: tuple[Tensor, Tensor, Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_signatures() -> None:
    names = list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters)
    theirs = ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "indexer_topk"]
    assert names == [*theirs, "lse_base", "backend"]
    assert list(inspect.signature(cudnn_dsa.sparse_attention).parameters) == [
        *("q", "kv", "indices", "attn_sink", "softmax_scale", "topk_length", "trusted_compact_metadata")
    ]
    assert list(inspect.signature(cudnn_dsa.sparse_attention_backward_wrapper).parameters) == [
        *("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs", "softmax_scale", "topk_length", "dq", "dkv"),
        *("block_tile", "deterministic", "stream", "workspace", "q_cluster_mode"),
    ]


# (s_kv, K) of tests/test_flash_mla_sparse_prefill.py.
@pytest.mark.parametrize(
    ("keys", "slots"),
    [(128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256)],
)
@pytest.mark.parametrize("queries", [1, 13])
@pytest.mark.parametrize("dim", [512, 576])
def test_flash_mla_cases(queries: int, keys: int, slots: int, dim: int) -> None:
    call = inputs(queries, keys, slots, dim=dim)
    assert_results(flash_mla.flash_mla_sparse_fwd(**call), dense(call))


@pytest.mark.parametrize("sink", [-math.inf, math.inf, "mixed"])
def test_flash_mla_sinks_and_lengths(sink: Any) -> None:
    call = inputs(slots=114)
    sinks = torch.randn(4) if sink == "mixed" else torch.full((4,), sink)
    lengths = torch.randint(0, 150, (62,), dtype=torch.int32)  # above K too
    lengths[::9] = 0
    got = flash_mla.flash_mla_sparse_fwd(**call, attn_sink=sinks, topk_length=lengths)
    assert_results(got, dense(call, attn_sink=sinks, topk_length=lengths))
    assert not got[0][::9].any()
    assert (got[1][::9] == -math.inf).all()
    assert (got[2][::9] == math.inf).all()


def test_flash_mla_rows_without_a_key() -> None:
    """Every row, and whole blocks of rows otherwise: (s_kv 32, K 2048)."""
    call = inputs(4, 32, 2048)
    call["indices"][:, :, 64:] = -1
    assert_results(flash_mla.flash_mla_sparse_fwd(**call), dense(call))
    call["indices"][:] = 32
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(**call)
    assert not out.any()
    assert (largest == -math.inf).all()
    assert (lse == math.inf).all()


@pytest.mark.parametrize(("heads", "slots"), [(1, 1), (24, 65), (96, 2063)])
def test_flash_mla_sizes_that_it_does_not_take(heads: int, slots: int) -> None:
    call = inputs(3, 40, slots, heads)
    assert_results(flash_mla.flash_mla_sparse_fwd(**call), dense(call))


def test_flash_mla_inputs_with_gaps() -> None:
    call = inputs(8, 40, 32)
    want = flash_mla.flash_mla_sparse_fwd(**call)
    apart = {name: torch.stack((call[name], call[name]), 1)[:, 0] for name in ("q", "kv", "indices")}
    assert not apart["q"].is_contiguous()
    assert all(
        torch.equal(a, b) for a, b in zip(flash_mla.flash_mla_sparse_fwd(**{**call, **apart}), want, strict=True)
    )


def test_flash_mla_base_two() -> None:
    """FlashMLA before January 2026: base 2, and -inf in an empty row."""
    call = inputs(8, 40, 32)
    call["indices"][3] = -1
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(**call, lse_base="2")
    want = dense(call)
    assert (lse[3] == -math.inf).all()
    lse = torch.where(lse == -math.inf, math.inf, lse * LN2)
    assert_results((out, largest * LN2, lse), want)
    with pytest.raises(ValueError, match="lse_base must be 'e' or '2'; got '10'"):
        flash_mla.flash_mla_sparse_fwd(**call, lse_base="10")


def test_flash_mla_has_no_gradient_and_no_second_lse() -> None:
    call = inputs(8, 40, 32)
    call["q"].requires_grad_()
    assert not any(x.requires_grad for x in flash_mla.flash_mla_sparse_fwd(**call))
    with pytest.raises(ValueError, match="indexer_topk must be 0"):
        flash_mla.flash_mla_sparse_fwd(**call, indexer_topk=16)


def test_keys_that_nobody_names_are_not_read() -> None:
    call = inputs(8, 40, 32)
    call["kv"][0], call["kv"][-1] = math.nan, math.inf
    call["indices"][(call["indices"] == 0) | (call["indices"] == 39)] = -1
    assert all(not x.isnan().any() for x in flash_mla.flash_mla_sparse_fwd(**call))


def test_largest_logits_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs(13, 40, 32)
    monkeypatch.setattr(vendor_results, "GATHERED_BYTES", 4 * 32 * (576 * 4 + 16))
    assert_results(flash_mla.flash_mla_sparse_fwd(**call), dense(call))
    nothing = flash_mla.flash_mla_sparse_fwd(**{**call, "kv": call["kv"][:0]})
    assert (nothing[1] == -math.inf).all()


def test_it_is_the_package_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    there, find_spec = sys.modules, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if name in there else None)
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    call = inputs(8, 40, 32)
    with flash_mla.patch(lse_base="2") as patch:
        from flash_mla import flash_mla_sparse_fwd

        assert patch.replaced == ("sys.modules['flash_mla']",)
        assert find_spec("flash_mla") is not None  # as those ask who look for packages
        assert torch.equal(flash_mla_sparse_fwd(**call)[2], flash_mla.flash_mla_sparse_fwd(**call, lse_base="2")[2])
        assert vendor_runtimes.flash_mla().found is None  # slattn's own backend does not call itself
    assert "flash_mla" not in sys.modules


def test_it_replaces_the_package_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        raise AssertionError("FlashMLA's own function was called")

    module = install(monkeypatch, "flash_mla", flash_mla_sparse_fwd=flash_mla_sparse_fwd)
    user = install(monkeypatch, "someones_model", sparse=flash_mla_sparse_fwd)
    with flash_mla.patch() as patch:
        assert user.sparse(**inputs(8, 40, 32))[0].shape == (8, 4, 512)
        assert set(patch.replaced) == {"flash_mla:flash_mla_sparse_fwd", "someones_model:sparse"}
        assert vendor_runtimes.flash_mla().found is flash_mla_sparse_fwd
    assert module.flash_mla_sparse_fwd is user.sparse is flash_mla_sparse_fwd


def cudnn_inputs(heads: int = 12, slots: int = 33, dim: int = 576) -> dict[str, Any]:
    call = inputs(9, 40, slots, heads, dim)
    return {"q": call["q"], "kv": call["kv"][:, 0].contiguous(), "indices": call["indices"][:, 0].contiguous()}


@pytest.mark.parametrize("dim", [512, 576])
def test_cudnn_forward_and_autograd(dim: int) -> None:
    call = cudnn_inputs(dim=dim)
    call["indices"][4] = -1
    lengths = torch.randint(0, 40, (9,), dtype=torch.int32)
    sink = torch.randn(12, requires_grad=True)
    for name in ("q", "kv"):
        call[name].requires_grad_()
    result = cudnn_dsa.sparse_attention(**call, attn_sink=sink, topk_length=lengths)
    out, largest, lse = result
    assert (result["out"], result["max_logits"], result[2]) == (out, largest, lse)
    assert (out.requires_grad, largest.requires_grad, lse.requires_grad) == (True, False, False)
    want, natural = slattn.sparse_attention(**call, attn_sink=sink, topk_length=lengths, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, natural)
    assert torch.equal(largest == -math.inf, lse == math.inf)
    grad_out = torch.randn_like(out)
    ours = torch.autograd.grad(out, (call["q"], call["kv"], sink), grad_out, retain_graph=True)
    theirs = cudnn_dsa.sparse_attention_backward_wrapper(
        *(call["q"], call["kv"], out, grad_out, lse, sink, call["indices"]), topk_length=lengths
    )
    assert list(dict.keys(theirs)) == ["dq", "dkv", "d_sink"]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_cudnn_backward_into_the_callers_tensors_and_either_infinity() -> None:
    call = cudnn_inputs()
    call["indices"][4] = -1
    sink = torch.full((12,), -math.inf)
    out, _, lse = cudnn_dsa.sparse_attention(**call, attn_sink=sink)
    arguments = (call["q"], call["kv"], out, torch.randn_like(out))
    want = cudnn_dsa.sparse_attention_backward_wrapper(*arguments, lse, sink, call["indices"])
    dq, dkv = torch.empty_like(call["q"]), torch.empty_like(call["kv"])
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    got = cudnn_dsa.sparse_attention_backward_wrapper(
        *(*arguments, lse, sink, call["indices"], None, None, dq, dkv), deterministic=True
    )
    assert got["dq"] is dq
    assert got["dkv"] is dkv
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not dq[4].any()


def test_cudnn_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other functions stay, whoever captured it has the new ones, and slattn's own backend keeps the old."""
    real = types.SimpleNamespace(sparse_attention=1, sparse_attention_backward_wrapper=2, indexer_forward_wrapper=3)
    cudnn = install(monkeypatch, "cudnn", DSA=real)
    user = install(monkeypatch, "someones_model", dsa=real)
    vendor_runtimes.cudnn_dsa.cache_clear()
    with cudnn_dsa.patch() as patch:
        assert set(patch.replaced) == {"cudnn:DSA", "someones_model:dsa"}
        assert cudnn.DSA.sparse_attention is cudnn_dsa.sparse_attention
        assert user.dsa.sparse_attention_backward_wrapper is cudnn_dsa.sparse_attention_backward_wrapper
        assert cudnn.DSA.indexer_forward_wrapper == 3
        assert vendor_runtimes.cudnn_dsa().found is real
    assert cudnn.DSA is user.dsa is real
