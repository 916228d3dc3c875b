"""DSA for a megatron-core without kernel backends (0.16): from expanded keys and values back to the latents.

`MLASelfAttention.get_query_key_value_tensors` makes the latents, expands them and returns both; only the expanded ones
go on to `unfused_dsa_fn`. So the key takes its latents along, as an attribute: the pair can then never be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import slattn

_LATENTS = "_slattn_latents"


def with_latents(get_query_key_value_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose key also holds (its attention module, the latents `[skv, b, r]`)."""

    @functools.wraps(get_query_key_value_tensors)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, q_compressed, kv_compressed = get_query_key_value_tensors(self, *args, **kwargs)
        if self.config.experimental_attention_variant == "dsa":
            setattr(key, _LATENTS, (self, kv_compressed))
        return query, key, value, q_compressed, kv_compressed

    return method


def absorbed_dsa(query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, softmax_scale: float) -> Tensor:
    """Causal sparse attention, `unfused_dsa_fn`'s arguments and result.

    Args:
        query, key: `[sq, b, np, nope + rope]`, as `with_latents` left them.
        value: `[sq, b, np, v]`; its latents are used in its place.
        topk_indices: integer `[b, sq, K]`; in early rows they name future keys, which are dropped.
        softmax_scale: of the logits.

    Returns:
        `[sq, b, np * v]`.

    Raises:
        RuntimeError: latents that cannot be had, with the reason.
    """
    if not hasattr(key, _LATENTS):
        raise RuntimeError("slattn needs the latents of these keys, and they are not as MLASelfAttention made them")
    attention, kv_compressed = getattr(key, _LATENTS)
    config, up = attention.config, attention.linear_kv_up_proj
    if config.tensor_model_parallel_size > 1:
        raise RuntimeError("slattn absorbs megatron-core 0.16's DSA without tensor parallelism; 0.19 absorbs it itself")
    if config.gradient_accumulation_fusion:
        raise RuntimeError("slattn uses linear_kv_up_proj's weight, whose gradient gradient_accumulation_fusion loses")
    sq, batch, heads, _ = query.shape
    nope, rank = config.qk_head_dim, config.kv_lora_rank
    w = up.weight.view(heads, nope + config.v_head_dim, rank)
    latents = _normalised(up, kv_compressed)
    kv = torch.cat((latents, key[:, :, 0, nope:]), dim=-1).transpose(0, 1)  # [b, skv, r + rope]
    q_latent = torch.einsum("sbhd,hdr->bshr", query[..., :nope], w[:, :nope])
    q = torch.cat((q_latent, query[..., nope:].transpose(0, 1)), dim=-1)
    position = torch.arange(sq, device=query.device)[:, None]
    indices = torch.where(topk_indices <= position, topk_indices, -1)
    out = slattn.sparse_attention(q, kv, indices, scale=softmax_scale, d_v=rank)
    return torch.einsum("bshr,hvr->sbhv", out, w[:, nope:]).reshape(sq, batch, -1)


def _normalised(up: Any, latents: Tensor) -> Tensor:
    """The latents as the projection sees them: Transformer Engine's may hold a norm, which comes first."""
    gain = getattr(up, "layer_norm_weight", None)
    if gain is None:
        return latents
    if up.normalization != "RMSNorm":
        raise RuntimeError(f"slattn absorbs a linear_kv_up_proj with an RMSNorm or none; got {up.normalization}")
    gain = gain + 1 if up.zero_centered_gamma else gain
    return torch.nn.functional.rms_norm(latents.float(), gain.shape, gain.float(), up.eps).to(latents.dtype)
