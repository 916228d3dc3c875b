"""slime: slattn under GLM-5, and the backward of its SGLang path mended.

    import slattn.frameworks.slime
    slattn.frameworks.slime.patch()

With MEGATRON_USE_SGLANG_SPARSE_MLA=1 slime runs the FlashMLA of SGLang's kernel package forward, so that training has
the rollout's bits, and hands its LSE to a backward that takes base 2. Where that FlashMLA is one of January 2026 or
later its LSE is natural, and the backward's probabilities are too large by 2 ** (0.44 LSE), without an error. Here the
forward stays SGLang's, its base is asked, and the backward is slattn's.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

import slattn
from slattn.frameworks.handle import Patch
from slattn.frameworks.sparse_mla import with_backend

_GLM5 = "slime_plugins.models.glm5.glm5"


def patch(*, backend: str = "auto") -> Patch:
    """Put slattn there; `backend` is `slattn.sparse_attention`'s.

    Raises:
        ModuleNotFoundError, RuntimeError: slime is not importable, or its names have moved.
    """
    done = Patch("slime", "its main branch of August 2026")
    done.replace(f"{_GLM5}:SparseMLA", with_backend(backend))
    done.replace(f"{_GLM5}:SGLangSparseMLA", _mended(done.original(f"{_GLM5}:SGLangSparseMLA"), backend))
    return done.apply()


def _mended(original: Any, backend: str) -> Any:
    """The Function `original` with its forward, and slattn's backward on what that saves: q, kv, indices, out, lse."""

    class SGLangSparseMLA(original):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
            q, kv, indices, out, lse = ctx.saved_tensors
            if grad_output is None:
                return None, None, None, None, None
            natural = lse * nats_of_lse(q.device)
            dq, dkv, _ = slattn.sparse_attention_backward(
                *(q, kv, indices, out, natural.masked_fill(natural == -math.inf, math.inf), grad_output),
                scale=ctx.scaling,
                d_v=out.shape[-1],
                needs=(ctx.needs_input_grad[0], ctx.needs_input_grad[1], False),
                backend=backend,
            )
            return dq, dkv, None, None, None

    return SGLangSparseMLA


@functools.cache
def nats_of_lse(device: torch.device) -> float:
    """One unit of the LSE of SGLang's FlashMLA in natural logarithm: 512 keys of zeros give ln 512 or log2 512."""
    slots = 512  # a width that every build takes
    q = torch.zeros(1, 128, 576, dtype=torch.bfloat16, device=device)
    indices = torch.zeros(1, 1, slots, dtype=torch.int32, device=device)
    sparse_fwd = importlib.import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
    lse = float(sparse_fwd(q=q, kv=q[:, :1], indices=indices, sm_scale=1.0, d_v=512)[2][0, 0])
    for nats in (1.0, math.log(2.0)):
        if abs(lse * nats - math.log(slots)) < 1e-2:
            return nats
    raise RuntimeError(f"SGLang's FlashMLA says that the LSE of {slots} keys of zeros is {lse}: neither ln nor log2")
