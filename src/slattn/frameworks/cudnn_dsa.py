"""The cuDNN frontend's `DSA.sparse_attention` and `sparse_attention_backward_wrapper`, with their signatures.

    from slattn.frameworks.cudnn_dsa import sparse_attention, sparse_attention_backward_wrapper
    slattn.frameworks.cudnn_dsa.patch()             # for code that calls `cudnn.DSA`

Any head count and any K, on Hopper too, where cuDNN's own forward wants compute capability 10.0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import slattn
from slattn.backends import vendor_runtimes
from slattn.frameworks.handle import Patch
from slattn.frameworks.vendor_results import Result, max_logits


def patch() -> Patch:
    """Put the two functions into `cudnn.DSA`, for whoever imported it; its others stay.

    Raises:
        ModuleNotFoundError, RuntimeError: nvidia-cudnn-frontend is not installed, or its names have moved.
    """
    vendor_runtimes.cudnn_dsa()  # slattn's own backend keeps the real one
    done = Patch("nvidia-cudnn-frontend", "1.32.0")
    real = done.original("cudnn:DSA")
    names = {name: staticmethod(globals()[name]) for name in ("sparse_attention", "sparse_attention_backward_wrapper")}
    stand_in = type("DSA", (), {**names, "__getattr__": lambda self, name: getattr(real, name)})()
    done.replace("cudnn:DSA", stand_in)
    done.replace_captured("", real, stand_in)
    return done.apply()


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    trusted_compact_metadata: bool = False,
) -> Result:
    """Forward and, through autograd, backward; q `[S_q, H, D]`, kv `[S_kv, D]`, indices `[S_q, K]`, attn_sink `[H]`.

    Returns:
        out `[S_q, H, d_v]`, max_logits and lse float32 `[S_q, H]`, natural, keys only; -inf and +inf in an empty row.
        Only out is differentiable. `trusted_compact_metadata` promises what is not needed here.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = slattn.sparse_attention(
        q, kv, indices, scale=scale, attn_sink=attn_sink, topk_length=topk_length, return_lse=True
    )
    return Result(out=out, max_logits=max_logits(q, kv, indices, scale, topk_length), lse=lse.detach())


def sparse_attention_backward_wrapper(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    dq: Tensor | None = None,
    dkv: Tensor | None = None,
    block_tile: int = 64,
    deterministic: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    q_cluster_mode: str = "off",
) -> Result:
    """{dq, dkv, d_sink}: q's and kv's shapes, written into `dq` and `dkv` where given, and attn_sink's.

    lse is natural and keys only, as the forward gives it, -inf or +inf in an empty row. block_tile, workspace and
    q_cluster_mode tune cuDNN and change nothing here; `stream` must be torch's current one, or None.
    """
    if stream is not None and int(stream) != torch.cuda.current_stream(q.device).cuda_stream:
        raise ValueError("stream must be None or torch's current stream, on which slattn runs")
    gradients: Any = slattn.sparse_attention_backward(
        *(q, kv, topk_idxs, out, lse.masked_fill(lse == -math.inf, math.inf), dout),
        scale=softmax_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        d_v=out.shape[-1],
        deterministic=deterministic or None,
    )
    new_dq, new_dkv, d_sink = gradients
    return Result(
        dq=new_dq if dq is None else dq.copy_(new_dq), dkv=new_dkv if dkv is None else dkv.copy_(new_dkv), d_sink=d_sink
    )
