"""NVIDIA NeMo AutoModel: slattn under `model.backend.attn: tilelang` and `cudnn`, the YAML files as they are.

    import slattn.frameworks.nemo_automodel
    slattn.frameworks.nemo_automodel.patch()

DeepSeek-V4 and V4.1 (both call `dsv4_sparse_attention`), GLM-5's SparseMLA, and `cudnn_sparse_attention` wherever it
was imported. The indexers and everything else stay AutoModel's.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import slattn
from slattn.frameworks.handle import Patch
from slattn.frameworks.sparse_mla import with_backend
from slattn.frameworks.sparse_mqa import sparse_attn_tilelang

_MODELS = "nemo_automodel.components.models"
_V4 = f"{_MODELS}.deepseek_v4.optimized_kernels"
_GLM = f"{_MODELS}.glm_moe_dsa.optimized_kernels"
_CUDNN = f"{_MODELS}.common.cudnn_sparse_attention"


def patch(*, backend: str = "auto") -> Patch:
    """Put slattn there, for models built before and after; `backend` is `slattn.sparse_attention`'s.

    Raises:
        ModuleNotFoundError, RuntimeError: AutoModel is not installed, or its names have moved.
    """
    done = Patch("nemo-automodel", "0.7.0")
    whole = functools.partial(sparse_attn_tilelang, backend=backend)
    done.replace(f"{_V4}:_miles_sparse_attn_tilelang", whole)
    done.replace(f"{_V4}:_miles_sparse_attn_tilelang_head_chunked", functools.partial(_all_heads_at_once, whole))
    done.replace(f"{_V4}:_HAS_MILES_SPARSE_ATTN", True)
    done.replace(f"{_V4}:_HAS_MILES_SPARSE_ATTN_CHUNKED", True)
    done.replace(f"{_GLM}:_slime_sparse_mla", with_backend(backend))
    done.replace(f"{_GLM}:_HAS_SLIME_SPARSE_MLA", True)
    for name, new in (
        ("cudnn_sparse_attention", functools.partial(cudnn_sparse_attention, backend=backend)),
        ("is_cudnn_sparse_attention_available", _available),
    ):
        done.replace_captured("nemo_automodel", done.original(f"{_CUDNN}:{name}"), new)
    return done.apply()


def _all_heads_at_once(
    whole: Any,
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    max_heads_per_kernel: int,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """The head-chunked entry: each group of `max_heads_per_kernel` heads would gather the keys again."""
    return whole(q, kv, attn_sink, topk_idxs, *rest, **named)


def cudnn_sparse_attention(
    q: Tensor,
    kv_latent: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    all_rows_nonempty: bool = False,
    valid_row_indices: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Sparse latent attention of packed tokens, in AutoModel's arguments, by any backend.

    Args:
        q: `[T, H, D]`, any head count, D at least 512.
        kv_latent: `[N, 1, D]`, the value its first 512 columns.
        topk_indices: integer `[T, 1, K]`, any K; what is outside `[0, N)` names nothing.
        softmax_scale: of the logits.
        topk_length: int32 `[T]`: how many first slots of a row count.
        all_rows_nonempty, valid_row_indices: hints that save others work on empty rows; not needed here.

    Returns:
        `[T, H, 512]` in q's dtype; 0 in an empty row.
    """
    out = slattn.sparse_attention(
        q, kv_latent, topk_indices, scale=softmax_scale, topk_length=topk_length, d_v=512, backend=backend
    )
    assert isinstance(out, Tensor)
    return out


def _available() -> bool:
    """What AutoModel asks before it calls: slattn needs neither FlashMLA nor cuDNN."""
    return True
