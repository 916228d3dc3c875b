"""Megatron-LM's DSA (DeepSeek-V3.2, GLM-5): slattn under `experimental_attention_variant: dsa`.

    import slattn.frameworks.megatron
    slattn.frameworks.megatron.patch()

A megatron-core that has kernel backends (0.19) calls slattn where `dsa_kernel_backend: tilelang` called its TileLang
kernels: slattn.frameworks.megatron_hooks. An older one (0.16) has a function in plain torch alone, for keys and values
that are already expanded, of which slattn has no kernel: slattn.frameworks.megatron_absorb goes back to the latents.
"""

from __future__ import annotations

import importlib.util

from slattn.frameworks import megatron_absorb
from slattn.frameworks.handle import Patch

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
_QKV = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"


def patch() -> Patch:
    """Put slattn there, for models built before and after.

    Raises:
        ModuleNotFoundError, RuntimeError: megatron-core is not installed, or its names have moved.
    """
    done = Patch("megatron-core", "0.16.1 and 0.19.2")
    done.original(f"{_VARIANT}.dsa:DSAttention")
    if importlib.util.find_spec(f"{_VARIANT}.dsa_kernels") is None:
        done.replace(_QKV, megatron_absorb.with_latents(done.original(_QKV)))
        done.replace(f"{_VARIANT}.dsa:unfused_dsa_fn", megatron_absorb.absorbed_dsa)
        return done.apply()
    path = f"{_VARIANT}.dsa_kernels:_BACKEND_MODULE_NAME_BY_BACKEND"
    hooks = "slattn.frameworks.megatron_hooks"
    done.put(f"{path}['tilelang']", done.original(path), "tilelang", hooks, must_exist=True)
    return done.apply()
