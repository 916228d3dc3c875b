"""The drop-ins for AutoModel's DeepSeek-V4 kernels, without a GPU: signatures, conventions, errors.

The kernels are replaced by a stand-in that computes the truth (tilelang_stand_in.py); those on a GPU are in
test_automodel_tilelang_gpu.py.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch

import slattn
from slattn import reference
from slattn.automodel import tilelang_sparse_mla_bwd as bwd_module
from slattn.automodel import tilelang_sparse_mla_fwd as fwd_module
from slattn.backends import tilelang
from slattn.problem import describe
from slattn.testing import relative_error
from tilelang_stand_in import LOG2E, install

EMPTY = inspect.Parameter.empty
TUNING = {"block_I": 64, "num_stages": 2, "threads": 256, "reference_rounding": False}
DTYPES = {"dtype": "bfloat16", "accum_dtype": "float32"}
SIGNATURES = {
    "sparse_mqa_fwd": {**dict.fromkeys(("heads", "dim", "topk"), EMPTY), "sm_scale": None, **TUNING},
    "sparse_mqa_fwd_interface": {
        **dict.fromkeys(("q", "kv", "attn_sink", "topk_idxs"), EMPTY),
        "sm_scale": None,
        **TUNING,
    },
    "preprocess": {**dict.fromkeys("BSHD", EMPTY), "block_ND": 32, "num_stages": 5, **DTYPES},
    "bwd": {
        **dict.fromkeys(("B", "S", "S_kv", "H", "D", "topk"), EMPTY),
        "sm_scale": None,
        "block_size": 32,
        "num_stages": 0,
        "threads": 128,
        "indices_dtype": "int32",
        **DTYPES,
    },
    "postprocess": {**dict.fromkeys(("B", "S_kv", "D"), EMPTY), "block_N": 64, "threads": 128, **DTYPES},
    "sparse_mqa_bwd_interface": {
        **dict.fromkeys(("q", "kv", "attn_sink", "o", "do", "topk_idxs", "lse"), EMPTY),
        "sm_scale": None,
        "return_dkv_accum_dtype": False,
    },
}
# S = 5, K = 6, N = 9: all six slots, holes, out of range, empty, a key named twice.
ROWS = [
    [0, 1, 2, 3, 4, 8],
    [-1, 7, -1, 8, -1, 5],
    [9, 40, 2**31 - 1, 3, -(2**31), 2],
    [-1] * 6,
    [5, 5, 5, 6, -1, -1],
]
SINKS = [0.0, 2.0, -math.inf, math.inf, 2.4e38, 1e9, -3e38, 30.0]


@pytest.fixture
def kernels(monkeypatch):
    """The stand-in, in place of the kernels' host side."""
    return install(monkeypatch)


def _inputs(dtype=torch.bfloat16, sinks=SINKS, dim=64, device="cpu"):
    """q, kv, attn_sink, topk_idxs of a call with B = 2, the second entry's rows reversed; and do."""
    rows = torch.tensor(ROWS, dtype=torch.int32)
    q, do = (torch.randn(2, len(ROWS), len(sinks), dim).bfloat16().to(dtype) for _ in range(2))
    kv = torch.randn(2, 9, dim).bfloat16().to(dtype)
    tensors = q, kv, torch.tensor(sinks), torch.stack([rows, rows.flip(0)]), do
    return tuple(tensor.to(device) for tensor in tensors)


def _truth(q, kv, attn_sink, topk_idxs, do=None, o=None, scale=None):
    """out, lse (base 2, with the sink), and with do also dq, dkv, d_attn_sink for the output o, in float64."""
    q, kv, attn_sink = q.detach().double(), kv.detach().double(), attn_sink.detach().double()
    problem = describe(q, kv, topk_idxs, scale=scale, attn_sink=attn_sink, d_v=q.shape[-1], deterministic=False)
    arguments = (problem, q, kv, topk_idxs, attn_sink, None)
    out, lse = reference.forward(*arguments)
    lse2 = torch.logaddexp(lse, attn_sink) * LOG2E
    if do is None:
        return out, lse2
    o = out if o is None else o.double()
    needs = {"needs": (True, True, True), "dkv_dtype": torch.float64}
    return out, lse2, *reference.backward(*arguments, o, lse, do.double(), None, **needs)


def _close(got, want, budget):
    """Within the budget, an overflow of float32 counting as infinite."""
    want = want.masked_fill(want > torch.finfo(torch.float32).max, math.inf)
    assert relative_error(got, want) < budget


# Names and signatures.


def _signature(name):
    module = fwd_module if "fwd" in name else bwd_module
    return inspect.signature(getattr(module, name)).parameters


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = _signature(name)
    assert {key: parameter.default for key, parameter in parameters.items()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())
    assert getattr(fwd_module if "fwd" in name else bwd_module, name).__doc__


def test_default_dtypes_are_tilelangs():
    T = pytest.importorskip("tilelang.language")  # noqa: N806
    for name in ("preprocess", "bwd", "postprocess"):
        for parameter in (p for p in _signature(name).values() if "dtype" in p.name):
            theirs = {"dtype": T.bfloat16, "accum_dtype": T.float32, "indices_dtype": T.int32}[parameter.name]
            assert parameter.default == theirs
            assert theirs == parameter.default
            assert str(parameter.default) == str(theirs)
    bwd_module.bwd(1, 1, 1, 1, 64, 1, indices_dtype=T.int64, dtype=T.bfloat16, accum_dtype=T.float32)
    with pytest.raises(ValueError, match="float16"):
        bwd_module.preprocess(1, 1, 1, 64, dtype=T.float16)


def test_they_import_and_show_signatures_without_any_kernel_library():
    code = (
        "import inspect, sys\n"
        "sys.modules.update(dict.fromkeys(('tilelang', 'tvm', 'flash_mla', 'sgl_kernel', 'cudnn')))\n"
        "from slattn.automodel import tilelang_sparse_mla_fwd as fwd, tilelang_sparse_mla_bwd as bwd\n"
        "for f in (fwd.sparse_mqa_fwd, fwd.sparse_mqa_fwd_interface, bwd.preprocess, bwd.bwd, bwd.postprocess,\n"
        "          bwd.sparse_mqa_bwd_interface):\n"
        "    print(f.__name__, *inspect.signature(f).parameters)\n"
        "fwd.sparse_mqa_fwd(64, 512, 640), bwd.bwd(1, 2, 3, 64, 512, 640)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.splitlines() == [" ".join((name, *parameters)) for name, parameters in SIGNATURES.items()]


# The forward.


@pytest.mark.parametrize("scale", [None, 0.25, 1])
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 2e-6), (torch.bfloat16, 2.35e-3)])
def test_forward(dtype, budget, scale, kernels):
    q, kv, sink, indices, _ = _inputs(dtype)
    out, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices, scale)
    want, want_lse = _truth(q, kv, sink, indices, scale=scale)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    _close(out, want, budget)
    _close(lse, want_lse, 5e-7)
    assert (lse[0, 3] == math.inf).all()
    assert (lse[..., 3] == math.inf).all()
    assert not out[0, 3].any()
    assert not out[:, :, 3:6].any()
    for head in (0, 1, 2, 5, 7):  # each alone, since the large sinks drown the others in a norm
        _close(lse[..., head], want_lse[..., head], 5e-7)


def test_one_hand_computed_row(kernels):
    """Logits 0 and 0 beside a sink of ln 2: the denominator is 4, so 2 in base 2, and out is a quarter of the sum."""
    q, kv = torch.zeros(1, 1, 1, 64).bfloat16(), torch.ones(1, 2, 64).bfloat16()
    indices = torch.tensor([[[0, 1, -1]]], dtype=torch.int32)
    out, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, torch.tensor([math.log(2.0)]), indices)
    assert lse.item() == pytest.approx(2.0, abs=1e-6)
    assert (out == 0.5).all()


@pytest.mark.parametrize("mask_dtype", [torch.int32, torch.bool, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_forward_kernel_with_a_mask(index_dtype, mask_dtype, kernels):
    q, kv, sink, indices, _ = _inputs()
    mask = torch.rand(indices.shape) < 0.6
    marks = mask if mask_dtype == torch.bool else mask.to(mask_dtype) * torch.randint(1, 9, mask.shape)
    kernel = fwd_module.sparse_mqa_fwd(8, 64, 6)
    plain = kernel(q, kv, sink, indices.to(index_dtype))
    masked = kernel(q, kv, sink, indices.to(index_dtype), marks)
    meant = kernel(q, kv, sink, indices.masked_fill(~mask, -1))
    clamped = kernel(q, kv, sink, indices.clamp(0, 8), (indices >= 0) & (indices < 9))  # the original's own call
    for tensor, want in zip((*masked, *clamped), (*meant, *plain), strict=True):
        assert torch.equal(tensor, want)
    assert not torch.equal(masked[0], plain[0])
    all_masked = kernel(q, kv, sink, indices, torch.zeros_like(indices))
    assert not all_masked[0].any()
    assert (all_masked[1] == math.inf).all()


def test_the_forward_kernel_serves_any_batch_sequence_and_key_count(kernels):
    kernel = fwd_module.sparse_mqa_fwd(8, 64, 6, 0.3)
    q, kv, sink, indices, _ = _inputs(torch.float32)
    for part in (slice(0, 2), slice(1, 2), slice(0, 0)):
        for rows, keys in ((5, 9), (2, 4), (0, 9), (5, 0)):
            arguments = q[part, :rows], kv[part, :keys], sink, indices[part, :rows]
            out, lse = kernel(*arguments)
            want, want_lse = _truth(*arguments, scale=0.3)
            _close(out, want, 2e-6)
            _close(lse, want_lse, 5e-7)


def test_tuning_is_handed_on_only_where_it_is_set(kernels):
    q, kv, sink, indices, _ = _inputs()
    for tuning, handed in (
        ({}, (False, None, None)),
        ({"block_I": 64, "num_stages": 2, "threads": 256}, (False, None, None)),
        ({"block_I": 32, "threads": 128, "reference_rounding": True}, (True, 32, 128)),
        ({"block_I": 128}, (False, 128, None)),
    ):
        fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices, **tuning)
        call = kernels.calls[-1]
        assert (call["reference_rounding"], call["block"], call["threads"]) == handed


# The backward.


def _backward(q, kv, sink, indices, do, **keywords):
    o, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices, keywords.get("sm_scale"))
    gradients = bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do, indices, lse, **keywords)
    return gradients, _truth(q, kv, sink, indices, do, o, keywords.get("sm_scale"))[2:]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("scale", [None, 0.25, 1])
def test_backward(scale, index_dtype, kernels):
    q, kv, sink, indices, do = _inputs()
    do[0, 3] = math.nan  # the empty row of each batch entry
    do[1, 1, :, ::2] = math.inf
    got, want = _backward(q, kv, sink, indices.to(index_dtype), do, sm_scale=scale, return_dkv_accum_dtype=True)
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32, torch.float32]
    for tensor, truth, budget in zip(got, want, (2.5e-3, 2e-6, 2e-6), strict=True):
        _close(tensor, truth, budget)
    assert not got[0][0, 3].any()
    assert not got[0][:, :, 3:6].any()
    assert not got[2][2:7].any()  # at both infinities; 0 too where the sink drowns the output, or counts for nothing
    rounded, _ = _backward(q, kv, sink, indices.to(index_dtype), do, sm_scale=scale)
    assert rounded[1].dtype == torch.bfloat16
    assert torch.equal(rounded[1], got[1].bfloat16())


def test_strided_tensors(kernels):
    q, kv, sink, indices, do = _inputs()
    o, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices)
    want = bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do, indices, lse)

    def strided(x):
        memory = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        memory[..., ::2] = x
        return memory[..., ::2]

    q, kv, sink, o, do, indices, lse = (strided(x) for x in (q, kv, sink, o, do, indices, lse))
    assert torch.equal(fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices)[0], o)
    assert torch.equal(fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices)[1], lse)
    got = bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do, indices, lse)
    got += bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do[:1, :1].expand_as(do), indices, lse)
    want += bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do[:1, :1].expand_as(do).clone(), indices, lse)
    for tensor, truth in zip(got, want, strict=True):
        assert torch.equal(tensor, truth)
        assert tensor.is_contiguous()


def test_inputs_that_need_gradients_give_results_that_do_not(kernels):
    """The drop-ins stand inside other people's autograd Functions, or are called with parameters as they are."""
    q, kv, sink, indices, do = _inputs()
    for tensor in (q, kv, sink):
        tensor.requires_grad_()
    o, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices)
    results = o, lse, *bwd_module.sparse_mqa_bwd_interface(q, kv, sink, o, do, indices, lse)
    assert not any(tensor.requires_grad for tensor in results)


def test_the_three_kernels_by_hand(kernels):
    """As the original's interface calls them: delta, then sums into what the caller made, then the rounding."""
    q, kv, sink, indices, do = _inputs()
    o, lse = fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices)
    (want_dq, want_dkv, want_dsink), _ = _backward(q, kv, sink, indices, do, return_dkv_accum_dtype=True)
    delta = bwd_module.preprocess(2, 5, 8, 64)(o, do)
    assert delta.shape == lse.shape
    _close(delta, (o.double() * do.double()).sum(-1), 1e-6)
    start, memory = torch.randn(2, 9, 64), torch.zeros(2 * 9 * 64 + 1)
    start_sink = torch.arange(8.0)
    clamped, mask = indices.clamp(0, 8), ((indices >= 0) & (indices < 9)).int()
    for dkv in (start.clone(), memory[1:].view(2, 9, 64).copy_(start)):  # the second begins at an odd address
        for slots in ((indices,), (clamped, mask), (clamped, mask.bool())):
            dkv.copy_(start)
            dsink = start_sink.clone()
            dq = bwd_module.bwd(2, 5, 9, 8, 64, 6)(q, kv, do, sink, *slots, lse, delta, dkv, dsink)
            assert torch.equal(dq, want_dq)
            _close(dkv - start, want_dkv, 1e-6)
            _close(dsink - start_sink, want_dsink, 1e-5)
            assert torch.equal(bwd_module.postprocess(2, 9, 64)(dkv), dkv.bfloat16())


def test_the_kernels_are_looked_up_when_they_are_called(kernels, monkeypatch):
    q, *_, do = _inputs()
    kernel = bwd_module.preprocess(2, 5, 8, 64)
    monkeypatch.setattr(tilelang, "delta_of", lambda out, grad_out: "seen")
    assert kernel(q, do) == "seen"


def test_no_queries_and_no_keys(kernels):
    q, kv, sink, indices, do = _inputs()
    for rows, keys in ((0, 9), (5, 0)):
        got, want = _backward(q[:, :rows], kv[:, :keys], sink, indices[:, :rows], do[:, :rows])
        for tensor, truth in zip(got, want, strict=True):
            _close(tensor, truth, 1e-9)


def test_cpu_tensors_are_refused_with_a_sentence():
    q, kv, sink, indices, do = _inputs()
    lse = torch.zeros(2, 5, 8)
    for call in (
        lambda: fwd_module.sparse_mqa_fwd_interface(q, kv, sink, indices),
        lambda: fwd_module.sparse_mqa_fwd(8, 64, 6)(q, kv, sink, indices),
        lambda: bwd_module.preprocess(2, 5, 8, 64)(q, do),
        lambda: bwd_module.bwd(2, 5, 9, 8, 64, 6)(q, kv, do, sink, indices, lse, lse, kv.float(), sink),
        lambda: bwd_module.sparse_mqa_bwd_interface(q, kv, sink, q, do, indices, lse),
    ):
        with pytest.raises(slattn.BackendRefusal, match="cannot run this call: the kernels need an NVIDIA GPU, and"):
            call()
    assert bwd_module.postprocess(2, 9, 64)(kv.float()).dtype == torch.bfloat16
