"""miles: slattn under DeepSeek-V4 (`--spec miles_plugins.models.deepseek_v4...`) and GLM-5.

    import slattn.frameworks.miles
    slattn.frameworks.miles.patch()         # or patch("glm5"), where only that plugin imports

Before or after the models are built; its indexers stay.
"""

from __future__ import annotations

from torch import Tensor

from slattn.frameworks.handle import Patch
from slattn.frameworks.sparse_mla import with_backend
from slattn.frameworks.sparse_mqa import sparse_attn_tilelang

MODELS = ("deepseek_v4", "glm5")


def patch(*models: str, backend: str = "auto") -> Patch:
    """Put slattn under the models named, all of `MODELS` by default; `backend` is `slattn.sparse_attention`'s.

    Raises:
        ValueError: a model of another name.
        ModuleNotFoundError, RuntimeError: miles is not importable, or its names have moved.
    """
    models = models or MODELS
    if not set(models) <= set(MODELS):
        raise ValueError(f"models must be among {MODELS}; got {models}")

    def in_place_safe(
        q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, sm_scale: float | None = None
    ) -> Tensor:
        # miles rotates the last 64 columns of what it gets in place: the backward keeps the other copy.
        return sparse_attn_tilelang(q, kv, attn_sink, topk_idxs, sm_scale, backend=backend).clone()

    done = Patch("miles", "its main branch of August 2026")
    if "deepseek_v4" in models:
        done.replace("miles_plugins.models.deepseek_v4.deepseek_v4:sparse_attn_tilelang", in_place_safe)
    if "glm5" in models:
        done.replace("miles_plugins.models.glm5.glm5:SparseMLA", with_backend(backend))
    return done.apply()
