"""xtuner: slattn for every `sparse_mla_backend` of its DSA attention (DeepSeek-V3.2, GLM-5).

    import slattn.frameworks.xtuner
    slattn.frameworks.xtuner.patch()

Before the model is built: each layer asks for its function then.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

import slattn
from slattn.frameworks.handle import Patch


class SparseMLAOutputs(NamedTuple):
    """What xtuner unpacks by name."""

    raw_output: Tensor  # [S, H, value_dim]
    softmax_lse: Tensor  # [S, H] float32, natural


def patch(*, backend: str = "auto") -> Patch:
    """Make `get_sparse_mla` return slattn's function; `backend` is `slattn.sparse_attention`'s.

    Raises:
        ModuleNotFoundError, RuntimeError: xtuner is not importable, or its names have moved.
    """

    def get_sparse_mla(name: str) -> Any:
        return functools.partial(sparse_mla, backend=backend)

    done = Patch("xtuner", "its main branch of August 2026")
    done.replace("xtuner.v1.module.attention.dsa_mla:get_sparse_mla", get_sparse_mla)
    return done.apply()


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scaling: float | None,
    value_dim: int | None = None,
    *,
    backend: str = "auto",
) -> SparseMLAOutputs:
    """Sparse latent attention in xtuner's arguments; differentiable, through softmax_lse too.

    Args:
        q: `[S, H, D]`.
        kv: `[N, 1, D]`.
        indices: int32 or int64 `[S, 1, K]`, any K, holes anywhere; what is outside `[0, N)` names nothing.
        scaling: of the logits; None means `D ** -0.5`.
        value_dim: columns of a row that are its value; None means 512 of 576, otherwise all.

    Returns:
        raw_output `[S, H, value_dim]`, 0 in an empty row; softmax_lse `[S, H]`, natural, +inf in an empty row.
    """
    out, lse = slattn.sparse_attention(q, kv, indices, scale=scaling, d_v=value_dim, return_lse=True, backend=backend)
    return SparseMLAOutputs(out, lse)
