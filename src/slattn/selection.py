"""Asking what a call would run: which backend, and which of its kernels."""

from __future__ import annotations

from torch import Tensor

from slattn import backends
from slattn.problem import describe


def select_kernels(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    scale: float | None = None,
    d_v: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> dict[str, str]:
    """What `sparse_attention` runs for these arguments, and its backward where every gradient is wanted.

    Returns:
        {"backend": its name}, and where that has several kernels, "forward" and "backward": what they are compiled for,
        as in `slattn.kernels.config`. Raises as `sparse_attention` does.
    """
    problem = describe(
        q,
        kv,
        indices,
        scale=scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        d_v=d_v,
        deterministic=deterministic,
    )
    name = backends.choose(problem, backends.backend_name(backend))
    module = backends.load(name)
    return {"backend": name, **(module.kernels(problem) if hasattr(module, "kernels") else {})}


def select_backend(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    scale: float | None = None,
    d_v: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> str:
    """The name of the backend that `sparse_attention` runs for these arguments. Raises as it does."""
    return select_kernels(
        q,
        kv,
        indices,
        attn_sink=attn_sink,
        topk_length=topk_length,
        scale=scale,
        d_v=d_v,
        deterministic=deterministic,
        backend=backend,
    )["backend"]
