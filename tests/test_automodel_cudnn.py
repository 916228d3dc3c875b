"""The drop-in for AutoModel's cudnn_sparse_attention: its signatures, its errors in their order, what it hands on."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import types

import pytest
import torch

import slattn
from slattn import reference
from slattn.automodel import cudnn_sparse_attention as module
from slattn.backends import flashmla_cudnn, vendor_runtimes
from slattn.testing import CASE_BUDGETS, relative_error
from vendor_stand_ins import CudnnDsa, FlashMla, problem_of

SIGNATURES = {
    "cudnn_sparse_attention": "q, kv_latent, topk_indices, softmax_scale, topk_length=None, all_rows_nonempty=False, "
    "valid_row_indices=None",
    "is_cudnn_sparse_attention_available": "",
    "_CudnnSparseAttention.forward": "ctx, q, kv_latent, topk_indices, softmax_scale, padded_heads, topk_length, "
    "all_rows_nonempty, valid_row_indices",
    "_CudnnSparseAttention.backward": "ctx, grad_output",
    "_compact_and_sort_indices": "indices, key_count",
    "_pad_attention_heads": "q, attn_sink, padded_heads",
    "_padded_head_count": "num_heads, major",
    "_require_available": "",
    "_require_cuda_tensors": "operation, *tensors",
}
SCALE = 0.125
# T = 9: a full row, holes, out of range, empty, duplicates, one key, unsorted, the last key, empty.
ROWS = [
    [0, 1, 2, 3, 4, 5],
    [-1, 7, -1, 8, -1, 9],
    [10, 40, 2**31 - 1, 11, -(2**31), 12],
    [-1] * 6,
    [5, 5, 5, 6, -1, -1],
    [3, -1, -1, -1, -1, -1],
    [9, 1, 8, 2, 7, 3],
    [39, 0, 39, -1, -1, 39],
    [40, -5, 99, -1, -1, -1],
]


@pytest.fixture
def stand_ins(monkeypatch):
    """Put stand-ins in place of the runtimes, as a user's test suite does; CPU tensors pass.

    In the module's dictionary, so that afterwards the names are the module's `__getattr__`'s again.
    """

    def install(flash_mla=None, **dialect):
        flash_mla, dsa = flash_mla or FlashMla(slot_multiple=512, **dialect), CudnnDsa()
        monkeypatch.setitem(vars(module), "_HAS_CUDNN_DSA", True)
        monkeypatch.setitem(vars(module), "_HAS_FLASH_MLA", True)
        monkeypatch.setitem(vars(module), "_CUDNN_DSA", dsa)
        monkeypatch.setitem(vars(module), "_FLASH_MLA_SPARSE_FWD", getattr(flash_mla, "function", flash_mla))
        monkeypatch.setattr(module, "_require_cuda_tensors", lambda operation, *tensors: (9, 0))
        return flash_mla, dsa

    return install


def _inputs(heads=8, head_dim=576, rows=ROWS, keys=40):
    indices = torch.tensor(rows, dtype=torch.int32)[:, None]
    q = torch.randn(len(rows), heads, head_dim).mul(0.5).bfloat16().requires_grad_()
    kv = torch.randn(keys, 1, head_dim).bfloat16().requires_grad_()
    return q, kv, indices, torch.randn(len(rows), heads, 512).bfloat16()


def _truth(q, kv, indices, grad_out, topk_length=None):
    """out, dq and dkv of the float64 reference."""
    problem = problem_of(q.double(), kv.shape[0], indices.shape[-1], SCALE)
    lengths = None if topk_length is None else topk_length[None]
    arguments = (problem, q.detach().double()[None], kv.detach().double()[None, :, 0], indices[None, :, 0], None)
    out, lse = reference.forward(*arguments, lengths)
    dq, dkv, _ = reference.backward(
        *arguments,
        lengths,
        out,
        lse,
        grad_out.double()[None],
        None,
        needs=(True, True, False),
        dkv_dtype=torch.float64,
    )
    return out[0], dq[0], dkv[0][:, None]


def _run(q, kv, indices, grad_out, **keywords):
    out = module.cudnn_sparse_attention(q, kv, indices, SCALE, **keywords)
    return out, *torch.autograd.grad(out, [q, kv], grad_out)


def _agree(got, want):
    """Within bf16's rounding; dp - delta cancels where few keys hold the weight, and delta comes from a bf16 out."""
    for name, tensor, truth, budget in zip(("out", "dq", "dkv"), got, want, (2e-3, 4.5e-3, 3e-3), strict=True):
        assert relative_error(tensor, truth) < budget, name


# Names, signatures, constants.


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    target = module
    for part in name.split("."):
        target = getattr(target, part)
    parameters = inspect.signature(target).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == SIGNATURES[name]
    assert target.__doc__


def test_constants():
    assert module._FLASH_MLA_TOPK_ALIGNMENT == 512
    assert module._SUPPORTED_ATTENTION_HEAD_DIMS == (512, 576)
    assert module._VALUE_HEAD_DIM == 512
    assert module.__all__ == ["cudnn_sparse_attention", "is_cudnn_sparse_attention_available"]
    assert issubclass(module._CudnnSparseAttention, torch.autograd.Function)


def test_importing_it_imports_no_runtime():
    code = (
        "import sys; from slattn.automodel.cudnn_sparse_attention import cudnn_sparse_attention; "
        "assert not {'cudnn', 'flash_mla', 'sgl_kernel', 'tilelang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The helpers.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compact_and_sort_indices(dtype):
    indices = torch.tensor([[-1, 9, 3, 10, 3], [-1] * 5, [4, 3, 2, 1, 0], [10, 11, 2**31 - 1, -9, 0]], dtype=dtype)
    compact, lengths = module._compact_and_sort_indices(indices, 10)
    assert compact.tolist() == [[3, 3, 9, -1, -1], [-1] * 5, [0, 1, 2, 3, 4], [0, -1, -1, -1, -1]]
    assert lengths.tolist() == [3, 0, 5, 1]
    assert compact.dtype == lengths.dtype == torch.int32
    assert compact.is_contiguous()
    assert lengths.is_contiguous()


def test_pad_attention_heads():
    q, sink = torch.ones(2, 3, 4), torch.tensor([1.0, 2.0, math.inf])
    same_q, same_sink = module._pad_attention_heads(q, sink, 3)
    assert same_q is q
    assert same_sink is sink
    padded_q, padded_sink = module._pad_attention_heads(q, sink, 5)
    assert torch.equal(padded_q[:, :3], q)
    assert padded_q.shape == (2, 5, 4)
    assert not padded_q[:, 3:].any()
    assert padded_sink.tolist() == [1.0, 2.0, math.inf, -math.inf, -math.inf]


# Results.


@pytest.mark.parametrize("dialect", [{}, {"form": "nv_dev"}, {"form": "kwargs"}, {"base": 2.0, "clears": False}])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 576), (64, 512), (192, 576)])
def test_forward_and_backward(heads, head_dim, dialect, stand_ins):
    flash_mla, dsa = stand_ins(**dialect)
    q, kv, indices, grad_out = _inputs(heads, head_dim)
    got = _run(q, kv, indices, grad_out)
    _agree(got, _truth(q, kv, indices, grad_out))
    out, dq, dkv = got
    assert out.dtype == dq.dtype == dkv.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert dkv.shape == kv.shape
    assert not out[[3, 8]].any()
    assert not dq[[3, 8]].any()
    assert flash_mla.calls[-1]["indices"].shape[-1] == 512
    assert dsa.calls[-1]["indices"].shape[-1] == 512


@pytest.mark.parametrize("width", [1, 512, 513, 2063])
def test_width(width, stand_ins):
    flash_mla, _ = stand_ins()
    rows = torch.randint(-2, 45, (3, width)).tolist()
    q, kv, indices, grad_out = _inputs(rows=rows)
    got, want = _run(q, kv, indices, grad_out), _truth(q, kv, indices, grad_out)
    if width > 1:
        _agree(got, want)
    else:  # one key: dq is nothing but the rounding of out
        assert relative_error(got[0], want[0]) < 2e-3
        assert relative_error(got[2], want[2]) < 3e-3
        assert got[1].norm() < 1e-2 * grad_out.norm()
    assert flash_mla.calls[-1]["indices"].shape[-1] == math.ceil(width / 512) * 512


def test_sparse_rows_are_compacted_and_sorted_only_without_lengths(stand_ins, monkeypatch):
    stand_ins()
    asked = []
    real = module._compact_and_sort_indices
    monkeypatch.setattr(
        module, "_compact_and_sort_indices", lambda indices, keys: asked.append(keys) or real(indices, keys)
    )
    q, kv, indices, grad_out = _inputs()
    _run(q, kv, indices, grad_out)
    _run(q, kv, indices, grad_out, topk_length=torch.full((9,), 6, dtype=torch.int32))
    assert asked == [40]


@pytest.mark.parametrize("lengths", [[6] * 9, [0] * 9, [99, -1, 2**31 - 1, -(2**31), 2, 1, 3, 4, 5]])
def test_a_length_masks_the_same_in_forward_and_backward(lengths, stand_ins):
    stand_ins(clears=False)
    q, kv, indices, grad_out = _inputs()
    topk_length = torch.tensor(lengths, dtype=torch.int32)
    got = _run(q, kv, indices, grad_out, topk_length=topk_length)
    _agree(got, _truth(q, kv, indices, grad_out, topk_length))


@pytest.mark.parametrize("hint", [None, "rows", "no rows"])
def test_rows_without_keys_change_nothing_elsewhere(hint, stand_ins):
    _, dsa = stand_ins(clears=False)
    rows = [[0, 1, 2], [-1] * 3, [4, 5, -1], [-1] * 3, [6, -1, -1]]
    if hint == "no rows":
        rows = [[-1] * 3] * 5
    q, kv, indices, grad_out = _inputs(heads=64, rows=rows)
    full = (indices[:, 0] >= 0).any(-1)
    with torch.no_grad():
        q[~full] = math.nan
        kv[[3, 39]] = math.inf  # nobody names them
        kv[0] = math.nan if hint == "no rows" else kv[0]
    grad_out[~full] = math.nan
    lengths = (indices[:, 0] >= 0).sum(-1, dtype=torch.int32)
    keywords = {"topk_length": lengths}
    if hint is not None:
        keywords["valid_row_indices"] = full.nonzero().flatten()
    out, dq, dkv = _run(q, kv, indices, grad_out, **keywords)
    assert not out[~full].any()
    assert not dq[~full].any()
    if hint == "rows":
        assert dsa.calls[-1]["q"].shape[0] == 3
    if hint == "no rows":
        assert not dkv.any()
        assert not dsa.calls
        return
    kept = q.detach()[full].requires_grad_()
    wanted = _run(kept, kv, indices[full], grad_out[full], topk_length=lengths[full], all_rows_nonempty=True)
    for got, want in zip((out[full], dq[full], dkv), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("queries", "keys"), [(0, 40), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(queries, keys, stand_ins):
    flash_mla, dsa = stand_ins()
    q, kv, indices, grad_out = _inputs(rows=ROWS[:1] * 3, keys=keys)
    q, indices, grad_out = q.detach()[:queries].requires_grad_(), indices[:queries], grad_out[:queries]
    out, dq, dkv = _run(q, kv, indices, grad_out)
    assert out.shape == (queries, 8, 512)
    assert dq.shape == q.shape
    assert dkv.shape == kv.shape
    for tensor in (out, dq, dkv):
        assert not tensor.any()
    assert not flash_mla.calls
    assert not dsa.calls


def test_layouts(stand_ins):
    stand_ins()
    _, kv, indices, _ = _inputs()
    wide = torch.randn(9, 8, 600).bfloat16()
    strided = wide[..., :576].requires_grad_()
    out = module.cudnn_sparse_attention(strided, kv, indices.expand(9, 1, 6), SCALE)
    dq, dkv = torch.autograd.grad(out.sum(), [strided, kv])
    ones = torch.ones(9, 8, 512, dtype=torch.bfloat16)
    plain = strided.detach().contiguous().requires_grad_()
    for got, want in zip((out, dq, dkv), _run(plain, kv, indices, ones), strict=True):
        assert torch.equal(got, want)


def test_eight_gradients_the_last_six_none(stand_ins):
    stand_ins()
    q, kv, indices, grad_out = _inputs()
    out = module._CudnnSparseAttention.apply(q, kv, indices, SCALE, 64, None, False, None)
    context = types.SimpleNamespace(**vars(out.grad_fn), saved_tensors=out.grad_fn.saved_tensors)
    gradients = module._CudnnSparseAttention.backward(context, grad_out)
    assert len(gradients) == 8
    assert all(gradient is None for gradient in gradients[2:])


def test_replaced_attributes_are_seen(stand_ins, monkeypatch):
    """What users' test suites replace is looked up when it is called."""
    stand_ins()
    seen = []

    class Function:
        @staticmethod
        def apply(*arguments):
            seen.extend(arguments)
            return "result"

    monkeypatch.setattr(module, "_CudnnSparseAttention", Function)
    monkeypatch.setattr(module, "_padded_head_count", lambda heads, major: 1000 * heads + major)
    q, kv, indices, _ = _inputs()
    assert module.cudnn_sparse_attention(q, kv, indices, 2) == "result"
    assert seen[0].shape == q.shape
    assert seen[3] == 2.0
    assert isinstance(seen[3], float)
    assert seen[4:] == [8009, None, False, None]


def test_a_stand_in_that_knows_one_call_alone(stand_ins):
    """As AutoModel's own suite has it: constants out, every argument of that one call asserted."""
    called = []

    def flash_mla(q, kv, indices, scale, *, d_v, attn_sink, topk_length, indexer_topk):
        assert q.shape == (2, 64, 576)
        assert not q[:, 8:].any()
        assert kv.shape == (2, 1, 576)
        assert indices.shape == (2, 1, 512)
        assert (scale, d_v, indexer_topk) == (SCALE, 512, 0)
        assert attn_sink.isneginf().all()
        assert topk_length.tolist() == [1, 2]
        called.append("forward")
        out = torch.arange(64.0).bfloat16().view(1, 64, 1).expand(2, 64, 512).contiguous()
        return out, torch.zeros(2, 64), torch.ones(2, 64)

    class Dsa:
        def sparse_attention_backward_wrapper(
            self, q, kv, out, d_out, lse, attn_sink, indices, *, softmax_scale, topk_length
        ):
            assert kv.shape == (2, 576)
            assert out[:, 8:].count_nonzero() == d_out[:, 8:].count_nonzero() == lse[:, 8:].count_nonzero() == 0
            assert (lse[:, :8] == 1).all()
            assert indices[0, :3].tolist() == [0, 0, 0]
            assert indices[1, :3].tolist() == [0, 1, 0]
            assert topk_length.tolist() == [1, 2]
            called.append("backward")
            return {"dq": torch.full_like(q, 3), "dkv": torch.full_like(kv, 5)}

    stand_ins(flash_mla=flash_mla)
    module._CUDNN_DSA = Dsa()
    q, kv, indices, _ = _inputs(rows=[[0, -1, -1], [0, 1, -1]], keys=2)
    out = module.cudnn_sparse_attention(q, kv, indices, softmax_scale=SCALE)
    assert torch.equal(out, torch.arange(8.0).bfloat16().view(1, 8, 1).expand(2, 8, 512))
    dq, dkv = torch.autograd.grad(out.sum(), [q, kv])
    assert (dq == 3).all()
    assert (dkv == 5).all()
    assert called == ["forward", "backward"]


# The libraries themselves.


@pytest.fixture
def libraries():
    if not module.is_cudnn_sparse_attention_available():
        pytest.skip(vendor_runtimes.cudnn_dsa().missing or vendor_runtimes.flash_mla().missing)
    problem = problem_of(torch.zeros(1, 64, 576, dtype=torch.bfloat16, device="cuda"), 1, 512, SCALE)
    reason = flashmla_cudnn.refusal(problem)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["nothing", "lengths", "lengths and rows"])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 576), (64, 576), (64, 512), (192, 576)])
def test_on_the_gpu(heads, head_dim, given, libraries):
    rows = torch.randint(-100, 300, (62, 200))
    rows[[0, 30, 61]] = -1
    q, kv, indices, grad_out = _inputs(heads, head_dim, rows=rows.tolist(), keys=290)
    keywords = {}
    if given != "nothing":
        compact, lengths = module._compact_and_sort_indices(indices[:, 0], 290)
        indices, keywords = compact[:, None], {"topk_length": lengths.cuda()}
    if given == "lengths and rows":
        keywords["valid_row_indices"] = lengths.nonzero().flatten().cuda()
    want = _truth(q, kv, indices, grad_out)
    q, kv = q.detach().cuda().requires_grad_(), kv.detach().cuda().requires_grad_()
    got = _run(q, kv, indices.cuda(), grad_out.cuda(), **keywords)
    slack = 1.0 if heads <= 128 else 1.25  # two groups of heads, each rounded before the sum
    for name, tensor, truth in zip(("out", "dq", "dkv"), got, want, strict=True):
        assert relative_error(tensor.cpu(), truth) < slack * CASE_BUDGETS[name], name
    for tensor in got[:2]:
        assert not tensor[[0, 30, 61]].any()


@pytest.mark.gpu
def test_deterministic_mode_is_refused_on_sm90(libraries):
    if torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("cuDNN has a deterministic backward from SM100 on")
    q, kv, indices, grad_out = _inputs(64)
    q, kv = q.detach().cuda().requires_grad_(), kv.detach().cuda().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(slattn.BackendRefusal, match="float32 atomics"):
            _run(q, kv, indices.cuda(), grad_out.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
