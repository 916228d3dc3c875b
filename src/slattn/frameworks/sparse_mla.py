"""`SparseMLA` as GLM-5's code in slime, miles and NeMo AutoModel calls it: `SparseMLA.apply(...)`, LSE in base 2."""

from __future__ import annotations

import math

from torch import Tensor

import slattn
from slattn.problem import LOG2E


class SparseMLA:
    """Stands where an autograd Function of that name stood; only its `apply` is called."""

    backend = "auto"

    @classmethod
    def apply(
        cls, q: Tensor, kv: Tensor, indices: Tensor, scaling: float | None = None, d_v: int = 512
    ) -> tuple[Tensor, Tensor]:
        """Sparse latent attention of packed tokens; differentiable in q and kv, in any head count and any K.

        Args:
            q: `[T, H, D]`, the absorbed queries; D = 576 in GLM-5.
            kv: `[N, 1, D]`: a row is a key, its first `d_v` columns the value.
            indices: integer `[T, 1, K]`; what is outside `[0, N)` names nothing.
            scaling: of the logits; default `D ** -0.5`.
            d_v: columns of a row that are its value.

        Returns:
            (out, lse): `[T, H, d_v]` in q's dtype, 0 in a row that names nothing; float32 `[T, H]`, base 2, -inf in
            such a row. No gradient passes through lse: nobody here uses it.
        """
        out, lse = slattn.sparse_attention(q, kv, indices, scale=scaling, d_v=d_v, return_lse=True, backend=cls.backend)
        lse = lse.detach()
        return out, (lse * LOG2E).masked_fill(lse == math.inf, -math.inf)


def with_backend(backend: str) -> type[SparseMLA]:
    """A `SparseMLA` whose calls name that backend."""
    return type("SparseMLA", (SparseMLA,), {"backend": backend})
