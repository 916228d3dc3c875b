"""The errors of the drop-ins for AutoModel's DeepSeek-V4 kernels: each names the argument that is wrong."""

from __future__ import annotations

import math

import pytest
import torch

import slattn
from slattn.automodel import tilelang_sparse_mla_bwd as bwd_module
from slattn.automodel import tilelang_sparse_mla_fwd as fwd_module
from tilelang_stand_in import install


@pytest.fixture
def kernels(monkeypatch):
    return install(monkeypatch)


def _arguments():
    """A good call of the backward's interface: B = 2, S = 3, N = 9, H = 4, D = 64, K = 5."""
    q = torch.zeros(2, 3, 4, 64, dtype=torch.bfloat16)
    return {
        "q": q,
        "kv": torch.zeros(2, 9, 64, dtype=torch.bfloat16),
        "attn_sink": torch.zeros(4),
        "o": q.clone(),
        "do": q.clone(),
        "topk_idxs": torch.zeros(2, 3, 5, dtype=torch.int32),
        "lse": torch.zeros(2, 3, 4),
    }


# What is wrong, how the argument is spoilt, the kind of error, and words of it.
SHARED = [
    ("q", lambda x: x[0], ValueError, r"q must be \[batch, sequence, heads, head_dim\]"),
    ("q", lambda x: x.int(), TypeError, "q must be torch.bfloat16"),
    ("q", lambda x: None, TypeError, "q must be a torch.Tensor; got NoneType"),
    ("q", lambda x: x[:, :, :0], ValueError, "q must have 1 to 256 heads"),
    ("q", lambda x: x[..., :0], ValueError, "kv must be"),
    ("kv", lambda x: x[0], ValueError, "kv must be"),
    ("kv", lambda x: x[:1], ValueError, "kv must be"),
    ("kv", lambda x: x[..., :32], ValueError, "kv must be"),
    ("kv", lambda x: x.float(), TypeError, "kv must be torch.bfloat16"),
    ("kv", lambda x: x.half(), TypeError, "kv must"),
    ("kv", lambda x: [x], TypeError, "kv must be a torch.Tensor; got list"),
    ("attn_sink", lambda x: x[1:], ValueError, "attn_sink must be"),
    ("attn_sink", lambda x: x.half(), TypeError, "attn_sink must be torch.float32"),
    ("attn_sink", lambda x: None, TypeError, "attn_sink must be a torch.Tensor; got NoneType"),
    ("attn_sink", lambda x: x.to("meta"), ValueError, "attn_sink must be on q's device"),
    ("topk_idxs", lambda x: x[:, 1:], ValueError, "topk_idxs must be"),
    ("topk_idxs", lambda x: x[:1], ValueError, "topk_idxs must be"),
    ("topk_idxs", lambda x: x[..., None], ValueError, "topk_idxs must be"),
    ("topk_idxs", lambda x: x[..., :0], ValueError, "topk_idxs must have at least one slot"),
    ("topk_idxs", lambda x: x.float(), TypeError, "topk_idxs must be torch.int32 or torch.int64"),
    ("topk_idxs", lambda x: None, TypeError, "topk_idxs must be a torch.Tensor; got NoneType"),
    ("topk_idxs", lambda x: x.to("meta"), ValueError, "topk_idxs must be on q's device"),
    ("sm_scale", lambda x: torch.tensor(1.0), TypeError, "sm_scale must be a Python number"),
    ("sm_scale", lambda x: True, TypeError, "sm_scale must be a Python number"),
    ("sm_scale", lambda x: math.nan, ValueError, "sm_scale must be finite"),
]
BACKWARD = [
    *((name, lambda x: x.float(), TypeError, f"{name} must be torch.bfloat16") for name in ("o", "do")),
    *((name, lambda x: x[:, 1:], ValueError, rf"{name} must have shape \[2, 3, 4, 64\]") for name in ("o", "do")),
    *((name, lambda x: None, TypeError, f"{name} must be a torch.Tensor") for name in ("o", "do", "lse")),
    ("do", lambda x: x.to("meta"), ValueError, "do must be on cpu"),
    ("lse", lambda x: x.double(), TypeError, "lse must be torch.float32"),
    ("lse", lambda x: x[..., None], ValueError, r"lse must have shape \[2, 3, 4\]"),
    ("lse", lambda x: x.to("meta"), ValueError, "lse must be on cpu"),
]


@pytest.mark.parametrize(("name", "spoil", "kind", "words"), SHARED)
def test_forward_interface(name, spoil, kind, words, kernels):
    arguments = {key: value for key, value in _arguments().items() if key not in ("o", "do", "lse")}
    fwd_module.sparse_mqa_fwd_interface(**arguments)
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(kind, match=f"^{words}"):
        fwd_module.sparse_mqa_fwd_interface(**arguments)


@pytest.mark.parametrize(("name", "spoil", "kind", "words"), [*SHARED, *BACKWARD])
def test_backward_interface(name, spoil, kind, words, kernels):
    arguments = _arguments()
    bwd_module.sparse_mqa_bwd_interface(**arguments)
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(kind, match=f"^{words}"):
        bwd_module.sparse_mqa_bwd_interface(**arguments)


@pytest.mark.parametrize("sizes", [(5, 64, 5), (4, 128, 5), (4, 64, 6)])
def test_a_forward_kernel_for_other_sizes(sizes, kernels):
    arguments = _arguments()
    kernel = fwd_module.sparse_mqa_fwd(*sizes)
    words = f"for {sizes[0]} heads, D = {sizes[1]} and {sizes[2]} slots"
    with pytest.raises(ValueError, match=words):
        kernel(*(arguments[name] for name in ("q", "kv", "attn_sink", "topk_idxs")))


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"num_stages": 1}, "num_stages must be 2: .*; got 1"),
        ({"num_stages": 3}, "num_stages must be 2: .*; got 3"),
        ({"block_I": 48}, "block_I must be one of .*; got 48"),
        ({"block_I": 0}, "block_I must be one of .*; got 0"),
        ({"block_I": 256}, "block_I must be one of .*; got 256"),
        ({"threads": 64}, "threads must be one of .*; got 64"),
        ({"threads": 512}, "threads must be one of .*; got 512"),
    ],
)
def test_forward_tuning_that_no_kernel_has(tuning, words, kernels):
    arguments = {key: value for key, value in _arguments().items() if key not in ("o", "do", "lse")}
    with pytest.raises(ValueError, match=words):
        fwd_module.sparse_mqa_fwd(4, 64, 5, **tuning)
    with pytest.raises(ValueError, match=words):
        fwd_module.sparse_mqa_fwd_interface(**arguments, **tuning)


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"block_size": 16}, "block_size must be 32 or 64: .*; got 16"),
        ({"block_size": 128}, "block_size must be 32 or 64: .*; got 128"),
        ({"num_stages": 1}, "num_stages must be 0: .*; got 1"),
        ({"threads": 256}, "threads must be 128: .*; got 256"),
        ({"indices_dtype": "int16"}, "indices_dtype must be int32 or int64; got int16"),
        ({"dtype": "float16"}, "bfloat16 and accumulate in float32; got float16 and float32"),
        ({"accum_dtype": "bfloat16"}, "got bfloat16 and bfloat16"),
    ],
)
def test_backward_tuning_that_no_kernel_has(tuning, words):
    bwd_module.bwd(2, 3, 9, 4, 64, 5, block_size=64)
    with pytest.raises(ValueError, match=words):
        bwd_module.bwd(2, 3, 9, 4, 64, 5, **tuning)
    if "float" in words:
        for builder in (bwd_module.preprocess, bwd_module.postprocess):
            with pytest.raises(ValueError, match=words):
                builder(2, 3, 4, **({"D": 64} if builder is bwd_module.preprocess else {}), **tuning)


@pytest.mark.parametrize(
    ("mask", "kind", "words"),
    [
        (torch.ones(2, 3, 4), ValueError, r"valid_mask must have topk_idxs's shape and device, \[2, 3, 5\]"),
        (torch.ones(3, 5), ValueError, "valid_mask must have topk_idxs's shape"),
        (torch.ones(2, 3, 5, device="meta"), ValueError, "got .* on meta"),
        ([[1]], TypeError, "valid_mask must be a torch.Tensor; got list"),
    ],
)
def test_masks(mask, kind, words, kernels):
    arguments = _arguments()
    q, kv, sink, do, indices, lse = (arguments[x] for x in ("q", "kv", "attn_sink", "do", "topk_idxs", "lse"))
    with pytest.raises(kind, match=words):
        fwd_module.sparse_mqa_fwd(4, 64, 5)(q, kv, sink, indices, mask)
    sums = torch.zeros(2, 9, 64), torch.zeros(4)
    with pytest.raises(kind, match=words):
        bwd_module.bwd(2, 3, 9, 4, 64, 5)(q, kv, do, sink, indices, mask, lse, lse, *sums)
    assert not sums[0].any()


def _kernel_arguments():
    arguments = {key: value for key, value in _arguments().items() if key != "o"}
    names = ("q", "kv", "do", "attn_sink", "topk_idxs", "lse")
    return {
        **{name: arguments[name] for name in names},
        "delta": torch.zeros(2, 3, 4),
        "dkv": torch.zeros(2, 9, 64),
        "d_attn_sink": torch.zeros(4),
    }


@pytest.mark.parametrize(
    ("name", "spoil", "kind", "words"),
    [
        ("topk_idxs", lambda x: x.long(), TypeError, "topk_idxs must be torch.int32; got torch.int64"),
        ("kv", lambda x: x[:, 1:], ValueError, r"kv must have shape \[2, 9, 64\]; got \[2, 8, 64\]"),
        ("delta", lambda x: x.bfloat16(), TypeError, "delta must be torch.float32"),
        ("delta", lambda x: x[1:], ValueError, r"delta must have shape \[2, 3, 4\]"),
        ("dkv", lambda x: x.bfloat16(), TypeError, "dkv must be torch.float32"),
        ("dkv", lambda x: x[1:], ValueError, r"dkv must have shape \[2, 9, 64\]"),
        ("dkv", lambda x: x.mT.contiguous().mT, ValueError, "dkv and d_attn_sink .* must be contiguous"),
        ("d_attn_sink", lambda x: x[1:], ValueError, r"d_attn_sink must have shape \[4\]"),
        ("d_attn_sink", lambda x: torch.zeros(8)[::2], ValueError, "must be contiguous"),
        ("d_attn_sink", lambda x: x.double(), TypeError, "d_attn_sink must be torch.float32"),
        ("attn_sink", lambda x: x[1:], ValueError, "attn_sink must be"),
    ],
)
def test_the_backward_kernel(name, spoil, kind, words, kernels):
    arguments = _kernel_arguments()
    kernel = bwd_module.bwd(2, 3, 9, 4, 64, 5)
    kernel(*arguments.values())
    arguments[name] = spoil(arguments[name])
    with pytest.raises(kind, match=words):
        kernel(*arguments.values())


@pytest.mark.parametrize("sizes", [(1, 3, 9, 4, 64, 5), (2, 4, 9, 4, 64, 5), (2, 3, 8, 4, 64, 5), (2, 3, 9, 4, 64, 4)])
def test_a_backward_kernel_for_other_sizes(sizes, kernels):
    with pytest.raises(ValueError, match="must have shape"):
        bwd_module.bwd(*sizes)(*_kernel_arguments().values())


@pytest.mark.parametrize("count", [0, 8, 11])
def test_a_wrong_count_of_arguments(count, kernels):
    with pytest.raises(TypeError, match=f"got {count} arguments"):
        bwd_module.bwd(2, 3, 9, 4, 64, 5)(*[torch.zeros(1)] * count)


def test_preprocess_and_postprocess(kernels):
    o = torch.zeros(2, 3, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"do must have shape \[2, 3, 4, 64\]"):
        bwd_module.preprocess(2, 3, 4, 64)(o, o[1:])
    with pytest.raises(TypeError, match=r"o must be torch\.bfloat16"):
        bwd_module.preprocess(2, 3, 4, 64)(o.float(), o)
    with pytest.raises(TypeError, match=r"dkv must be torch\.float32"):
        bwd_module.postprocess(2, 3, 64)(o[:, :, 0])
    with pytest.raises(ValueError, match=r"dkv must have shape \[2, 9, 64\]"):
        bwd_module.postprocess(2, 9, 64)(torch.zeros(2, 8, 64))


def test_a_refusal_is_quoted(kernels):
    kernels.reason = "there is a reason"
    arguments = _arguments()
    for call in (
        lambda: bwd_module.sparse_mqa_bwd_interface(**arguments),
        lambda: bwd_module.preprocess(2, 3, 4, 64)(arguments["o"], arguments["do"]),
        lambda: fwd_module.sparse_mqa_fwd_interface(*(arguments[x] for x in ("q", "kv", "attn_sink", "topk_idxs"))),
    ):
        with pytest.raises(slattn.BackendRefusal, match=r"^the TileLang kernels cannot run this call: there is a"):
            call()
