"""FlashMLA's `flash_mla_sparse_fwd`, with its signature and conventions, for any head count and any K.

    from slattn.frameworks.flash_mla import flash_mla_sparse_fwd
    slattn.frameworks.flash_mla.patch()     # for code that says `from flash_mla import flash_mla_sparse_fwd`

Before such code is imported or after; `patch(lse_base="2")` for code written for FlashMLA before January 2026.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import math
import sys
import types

import torch
from torch import Tensor

import slattn
from slattn.backends import vendor_runtimes
from slattn.frameworks.handle import Patch
from slattn.frameworks.vendor_results import max_logits
from slattn.problem import LOG2E


def patch(*, lse_base: str = "e", backend: str = "auto") -> Patch:
    """Stand in for the package `flash_mla`: replace its function, or be the package where it is not installed.

    Raises:
        RuntimeError: a `flash_mla` without that function.
    """
    vendor_runtimes.flash_mla()  # slattn's own backend keeps the real one, or keeps to there being none
    new = functools.partial(flash_mla_sparse_fwd, lse_base=lse_base, backend=backend)
    done = Patch("flash_mla", "main since January 2026")
    if "flash_mla" in sys.modules or importlib.util.find_spec("flash_mla"):
        done.replace_captured("", done.original("flash_mla:flash_mla_sparse_fwd"), new)
    else:
        module = types.ModuleType("flash_mla", "slattn's stand-in for FlashMLA")
        module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)  # for who asks whether there is one
        module.__dict__["flash_mla_sparse_fwd"] = new
        done.put("sys.modules['flash_mla']", sys.modules, "flash_mla", module)
    return done.apply()


@torch.no_grad()
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    *,
    lse_base: str = "e",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse prefill, forward alone, as FlashMLA's: nothing here carries a gradient.

    Args:
        q: `[s_q, h_q, D]`.
        kv: `[s_kv, 1, D]`.
        indices: int32 `[s_q, 1, K]`; what is outside `[0, s_kv)` names nothing.
        sm_scale: of the logits.
        d_v: columns of a row that are its value.
        attn_sink: float32 `[h_q]` or None; it scales out and leaves lse as it is.
        topk_length: int32 `[s_q]` or None; clamped to `[0, K]`.
        indexer_topk: 0; the nv_dev branch's second LSE is not here.
        lse_base: "e", or "2" for FlashMLA before January 2026: lse and max_logits in base 2, -inf in an empty row.

    Returns:
        (out, max_logits, lse): `[s_q, h_q, d_v]` in q's dtype, float32 `[s_q, h_q]` twice. An empty row has out 0,
        max_logits -inf, lse +inf.
    """
    if lse_base not in ("e", "2"):
        raise ValueError(f"lse_base must be 'e' or '2'; got {lse_base!r}")
    if indexer_topk:
        raise ValueError(f"indexer_topk must be 0: a second LSE over part of the slots is not here; got {indexer_topk}")
    out, lse = slattn.sparse_attention(
        *(q, kv, indices),
        scale=sm_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        d_v=d_v,
        return_lse=True,
        backend=backend,
    )
    largest = max_logits(q, kv.reshape(-1, kv.shape[-1]), indices.squeeze(1), sm_scale, topk_length)
    if lse_base == "2":
        return out, largest * LOG2E, (lse * LOG2E).masked_fill(lse == math.inf, -math.inf)
    return out, largest, lse
