"""The errors of the drop-in for AutoModel's cudnn_sparse_attention, each and in their order."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from slattn.automodel import cudnn_sparse_attention as module
from slattn.backends import vendor_runtimes

# Availability.


@pytest.mark.parametrize(("cudnn", "flash_mla"), [(False, False), (True, False), (False, True), (True, True)])
def test_available_only_with_both(cudnn, flash_mla, monkeypatch):
    monkeypatch.setitem(vars(module), "_HAS_CUDNN_DSA", cudnn)
    monkeypatch.setitem(vars(module), "_HAS_FLASH_MLA", flash_mla)
    assert module.is_cudnn_sparse_attention_available() is (cudnn and flash_mla)
    if cudnn and flash_mla:
        module._require_available()
    else:
        with pytest.raises(RuntimeError, match="requires both nvidia-cudnn-frontend"):
            module._require_available()


def test_what_is_missing_is_named_with_its_cure(monkeypatch):
    broken = types.ModuleType("broken")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(OSError(f"libcudnn.so.9: no {name}"))
    for name in ("cudnn", "flash_mla", "sgl_kernel", "sgl_kernel.flash_mla"):
        monkeypatch.setitem(sys.modules, name, broken if name == "cudnn" else None)
    vendor_runtimes.cudnn_dsa.cache_clear()
    vendor_runtimes.flash_mla.cache_clear()
    try:
        with pytest.raises(RuntimeError) as raised:
            module._require_available()
        assert not module.is_cudnn_sparse_attention_available()
        assert module._CUDNN_DSA is None
        assert module._FLASH_MLA_SPARSE_FWD is None
    finally:
        vendor_runtimes.cudnn_dsa.cache_clear()
        vendor_runtimes.flash_mla.cache_clear()
    for words in ("libcudnn.so.9: no DSA", "pip install nvidia-cudnn-frontend", "pip install sglang-kernel"):
        assert words in str(raised.value)
    with pytest.raises(AttributeError):
        module._no_such_name  # noqa: B018


def test_require_cuda_tensors(monkeypatch):
    with pytest.raises(RuntimeError, match="this requires CUDA tensors; got none"):
        module._require_cuda_tensors("this")
    with pytest.raises(RuntimeError, match="got cpu"):
        module._require_cuda_tensors("this", torch.zeros(1))
    first, second = (types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in range(2))
    with pytest.raises(ValueError, match="same CUDA device; got cuda:0 and cuda:1"):
        module._require_cuda_tensors("this", first, second)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(RuntimeError, match="SM90 or later; cuda:0 is SM86"):
        module._require_cuda_tensors("this", first)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert module._require_cuda_tensors("this", first, first) == (10, 3)


# Errors. Each row breaks one thing more than the row below it, so that the order shows.

BREAKS = [
    (TypeError, "must be bfloat16", lambda a: a.update(q=a["q"].half())),
    (TypeError, "must be bfloat16", lambda a: a.update(kv_latent=a["kv_latent"].float())),
    (TypeError, "must be int32", lambda a: a.update(topk_indices=a["topk_indices"].long())),
    (ValueError, "q must have shape", lambda a: a.update(q=a["q"][..., :256])),
    (ValueError, "kv_latent must have shape", lambda a: a.update(kv_latent=a["kv_latent"][:, 0])),
    (ValueError, "topk_indices must have shape", lambda a: a.update(topk_indices=a["topk_indices"][1:])),
    (ValueError, "sparse_width must be positive", lambda a: a.update(topk_indices=a["topk_indices"][..., :0])),
    (
        ValueError,
        "key_tokens must fit",
        lambda a: a.update(kv_latent=torch.empty(2**31 - 1, 1, 576, dtype=torch.bfloat16, device="meta")),
    ),
    (TypeError, "finite Python float; got Tensor", lambda a: a.update(softmax_scale=torch.tensor(1.0))),
    (TypeError, "finite Python float; got nan", lambda a: a.update(softmax_scale=math.nan)),
    (TypeError, "finite Python float; got inf", lambda a: a.update(softmax_scale=math.inf)),
    (ValueError, "must be positive; got 0", lambda a: a.update(softmax_scale=0)),
    (ValueError, "must be positive; got -1.0", lambda a: a.update(softmax_scale=-1.0)),
    (TypeError, "must be a bool; got int", lambda a: a.update(all_rows_nonempty=1)),
    (
        ValueError,
        "None when all_rows_nonempty",
        lambda a: a.update(all_rows_nonempty=True, valid_row_indices=torch.arange(2)),
    ),
    (ValueError, "topk_length must be a contiguous", lambda a: a.update(topk_length=torch.ones(9, dtype=torch.int64))),
    (
        ValueError,
        "topk_length must be a contiguous",
        lambda a: a.update(topk_length=torch.ones(18, dtype=torch.int32)[::2]),
    ),
    (
        ValueError,
        "topk_length must be a contiguous",
        lambda a: a.update(topk_length=torch.ones(9, dtype=torch.int32, device="meta")),
    ),
    (ValueError, "topk_length must have shape", lambda a: a.update(topk_length=torch.ones(8, dtype=torch.int32))),
    (ValueError, "requires precomputed topk_length", lambda a: a.update(valid_row_indices=torch.arange(2))),
    (
        ValueError,
        "valid_row_indices must be a contiguous",
        lambda a: a.update(_lengths(), valid_row_indices=torch.arange(2, dtype=torch.int32)),
    ),
    (
        ValueError,
        "valid_row_indices must be a contiguous",
        lambda a: a.update(_lengths(), valid_row_indices=torch.arange(4)[::2]),
    ),
    (
        ValueError,
        "valid_row_indices cannot be longer",
        lambda a: a.update(_lengths(), valid_row_indices=torch.arange(10)),
    ),
    (ValueError, "got H=24", lambda a: a.update(q=torch.zeros(9, 24, 576, dtype=torch.bfloat16))),
]


def _lengths():
    return {"topk_length": torch.ones(9, dtype=torch.int32)}


def _arguments():
    return {
        "q": torch.zeros(9, 8, 576, dtype=torch.bfloat16),
        "kv_latent": torch.zeros(40, 1, 576, dtype=torch.bfloat16),
        "topk_indices": torch.zeros(9, 1, 6, dtype=torch.int32),
        "softmax_scale": 0.125,
    }


@pytest.mark.parametrize("row", range(len(BREAKS)), ids=lambda row: f"{row}-{BREAKS[row][1]}")
def test_errors(row, monkeypatch):
    monkeypatch.setitem(vars(module), "_HAS_CUDNN_DSA", True)
    monkeypatch.setitem(vars(module), "_HAS_FLASH_MLA", True)
    monkeypatch.setattr(module, "_require_cuda_tensors", lambda operation, *tensors: (9, 0))
    kind, words, spoil = BREAKS[row]
    arguments = _arguments()
    spoil(arguments)
    with pytest.raises(kind, match=words):
        module.cudnn_sparse_attention(**arguments)


def test_errors_come_in_their_order(monkeypatch):
    bad = {
        "q": torch.zeros(9, 24, 256),
        "kv_latent": torch.zeros(4, 256),
        "topk_indices": torch.zeros(8, 1, 0),
        "softmax_scale": math.nan,
        "all_rows_nonempty": 1,
        "valid_row_indices": torch.arange(20, dtype=torch.int32),
    }
    good = {**_arguments(), "all_rows_nonempty": False, "valid_row_indices": None}
    steps = [
        (RuntimeError, "requires both", ()),
        (RuntimeError, "requires CUDA tensors", ()),
        (TypeError, "bfloat16", ("q", "kv_latent")),
        (TypeError, "int32", ("topk_indices",)),
        (TypeError, "finite", ("softmax_scale",)),
        (TypeError, "bool", ("all_rows_nonempty",)),
        (ValueError, "requires precomputed", ("valid_row_indices",)),
    ]
    arguments, missing = dict(bad), True
    monkeypatch.setitem(vars(module), "_HAS_FLASH_MLA", True)
    for kind, words, mended in steps:
        monkeypatch.setitem(vars(module), "_HAS_CUDNN_DSA", not missing)
        with pytest.raises(kind, match=words):
            module.cudnn_sparse_attention(**arguments)
        if words == "requires CUDA tensors":
            monkeypatch.setattr(module, "_require_cuda_tensors", lambda operation, *tensors: (9, 0))
        missing = False
        arguments.update({name: good[name] for name in mended})


@pytest.mark.parametrize(
    ("heads", "major", "padded"),
    [
        *((heads, 9, 64) for heads in (1, 2, 4, 8, 16, 32, 64)),
        *((heads, 9, heads) for heads in (128, 192, 256)),
        *((heads, 9, None) for heads in (0, 3, 24, 40, 96)),
        *((heads, 10, 64) for heads in (1, 2, 4, 8, 16, 32, 64)),
        *((heads, 10, heads) for heads in (128, 256)),
        *((heads, 10, None) for heads in (0, 3, 40, 48, 96, 192)),
    ],
)
def test_padded_head_count(heads, major, padded):
    if padded is not None:
        assert module._padded_head_count(heads, major) == padded
        return
    with pytest.raises(ValueError, match=f"got H={heads}"):
        module._padded_head_count(heads, major)
