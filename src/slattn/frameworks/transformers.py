"""Hugging Face transformers: slattn as an attention implementation of DeepSeek-V4, DeepSeek-V3.2 and GLM-MoE-DSA.

    import slattn.frameworks.transformers
    slattn.frameworks.transformers.patch(model)     # a model that is there; undo() gives it its own attention back
    slattn.frameworks.transformers.patch()          # then from_pretrained(..., attn_implementation="slattn")

The DSA models expand their latents before they call an attention implementation: here they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slattn.frameworks.handle import Patch
from slattn.frameworks.transformers_attention import attention

NAME = "slattn"
_MODELS = ("deepseek_v4", "deepseek_v32", "glm_moe_dsa")
_DSA = (
    "transformers.models.deepseek_v32.modeling_deepseek_v32:DeepseekV32Attention.expand_kv",
    "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaAttention.expand_kv",
)


def patch(model: Any = None) -> Patch:
    """Register "slattn", and switch `model` to it where one is given.

    Raises:
        TypeError: another model than those.
        ModuleNotFoundError, RuntimeError: transformers is not installed, or its names have moved.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if model is not None and kind not in _MODELS:
        raise TypeError(f"model must be a transformers model of {', '.join(_MODELS)}; got {type(model).__name__}")
    done = Patch("transformers", "5.18 and 5.24")
    for registry, function in (
        ("transformers.modeling_utils:AttentionInterface._global_mapping", attention),
        ("transformers.masking_utils:AttentionMaskInterface._global_mapping", None),
    ):
        functions = done.original(registry)
        done.put(f"{registry}[{NAME!r}]", functions, NAME, function or functions["eager"])
    for path in _DSA:
        done.replace(path, _latent(done.original(path)))
    if model is not None:
        before, switch = model.config._attn_implementation, model.set_attn_implementation
        done.switch(f"{type(model).__name__}.config._attn_implementation", lambda: switch(NAME), lambda: switch(before))
    return done.apply()


def _latent(expand_kv: Any) -> Any:
    def latent_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[B, 1, T, r + rope]` in place of the expanded ones; the value is their first r columns."""
        if self.config._attn_implementation != NAME:
            return expand_kv(self, kv_nope, k_rot)
        return torch.cat((kv_nope, k_rot), dim=-1), kv_nope

    return latent_kv
