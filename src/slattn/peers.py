"""The other implementations that `slattn bench` measures beside this library's, called the way their users call them.

A peer is imported when it is asked for and never by anything but the bench and its tests. What a call takes that the
peer's own other half would hand it (out, a log-sum-exp in its convention) is made before the clock starts; what the
peer does inside its public call is counted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from slattn.ops import sparse_attention
from slattn.testing import Inputs

Call = Callable[[], object]


class Unsuitable(ValueError):
    """The peer does not take inputs like these; the message says what it takes."""


@dataclass(frozen=True)
class Peer:
    """A peer: `missing()` says why it cannot be imported here (None: it can), the makers return a call to time.

    A maker is None where the peer has no such half. It raises `Unsuitable` for inputs that the peer does not take.
    """

    name: str
    missing: Callable[[], str | None]
    make_forward: Callable[[Inputs], Call] | None
    make_backward: Callable[[Inputs], Call] | None


def _missing(load: Callable[[], Any]) -> Callable[[], str | None]:
    def probe() -> str | None:
        try:
            load()
        except Exception as error:  # a compiled extension on the wrong machine raises more than ImportError
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return None

    return probe


def _scale(inputs: Inputs) -> float:
    return float(inputs.q.shape[-1] ** -0.5) if inputs.scale is None else inputs.scale


def _sink(inputs: Inputs) -> Tensor:
    """The sink, or one of -inf, which is none, for a peer that must have one."""
    if inputs.attn_sink is not None:
        return inputs.attn_sink.float()
    return inputs.q.new_full((inputs.q.shape[1],), -torch.inf, dtype=torch.float32)


@functools.cache
def _flashmla() -> Any:
    """FlashMLA's sparse prefill, from its own package or from sglang-kernel's copy."""
    try:
        return importlib.import_module("flash_mla").flash_mla_sparse_fwd
    except Exception as own:
        try:
            return importlib.import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
        except Exception as copy:
            raise ImportError(f"flash_mla: {own}; sgl_kernel.flash_mla: {copy}".replace("\n", " ")) from copy


def _flashmla_forward(inputs: Inputs) -> Call:
    heads, slots = inputs.q.shape[1], inputs.indices.shape[-1]
    if heads not in (64, 128) or slots % 128:
        raise Unsuitable(f"takes 64 or 128 heads and a multiple of 128 slots; got {heads} and {slots}")
    forward, scale, sink = _flashmla(), _scale(inputs), _sink(inputs)
    kv, indices = inputs.kv[:, None], inputs.indices[:, None]
    return lambda: forward(inputs.q, kv, indices, scale, d_v=512, attn_sink=sink, topk_length=inputs.topk_length)


@functools.cache
def _cudnn_backward_wrapper() -> Any:
    return importlib.import_module("cudnn").DSA.sparse_attention_backward_wrapper


def _cudnn_backward(inputs: Inputs) -> Call:
    wrapper, scale, sink = _cudnn_backward_wrapper(), _scale(inputs), _sink(inputs)
    with torch.no_grad():
        out, lse = sparse_attention(
            inputs.q,
            inputs.kv,
            inputs.indices,
            scale=inputs.scale,
            attn_sink=inputs.attn_sink,
            topk_length=inputs.topk_length,
            return_lse=True,
        )
    return lambda: wrapper(inputs.q, inputs.kv, out, inputs.grad_out, lse, sink, inputs.indices, softmax_scale=scale)


_V4 = "nemo_automodel.components.models.deepseek_v4.kernels"
_GLM = "nemo_automodel.components.models.glm_moe_dsa.kernels"


def _automodel(package: str, module: str) -> Any:
    """A kernel module of NeMo AutoModel without the rest of AutoModel.

    Its parent packages import transformers, datasets and much else that the kernels do not use, so parents that are
    not loaded yet are registered as bare modules that only know their folder.
    """
    root = _automodel_root()
    for name in ("nemo_automodel", "nemo_automodel.shared", *_parents(package)):
        if name not in sys.modules:
            bare = types.ModuleType(name)
            bare.__path__ = ["/".join([root, *name.split(".")[1:]])]
            sys.modules[name] = bare
    importlib.import_module("tilelang")
    return importlib.import_module(f"{package}.{module}")


@functools.cache
def _automodel_root() -> str:
    """Its folder, found without importing it; asked once, because a bare module has no spec to ask for again."""
    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("nemo_automodel is not installed")
    return spec.submodule_search_locations[0]


def _parents(package: str) -> list[str]:
    parts = package.split(".")
    return [".".join(parts[: end + 1]) for end in range(1, len(parts))]


def _automodel_half(inputs: Inputs, half: str) -> Any:
    """The module for these inputs: DeepSeek-V4's kernels at every D but 576, GLM's there."""
    head_dim = inputs.q.shape[-1]
    if head_dim == 576:
        return _automodel(_GLM, f"tilelang_sparse_mla_{half}")
    if head_dim & (head_dim - 1):
        raise Unsuitable(f"takes a head dimension of 576 or a power of two; got {head_dim}")
    return _automodel(_V4, f"tilelang_sparse_mla_{half}")


def _automodel_forward(inputs: Inputs) -> Call:
    """All heads in one launch. At D = 576 there is no sink to give."""
    module, scale = _automodel_half(inputs, "fwd"), _scale(inputs)
    if inputs.topk_length is not None:
        raise Unsuitable("takes no topk_length")
    if inputs.q.shape[-1] == 576:
        kv, indices = inputs.kv[:, None].contiguous(), inputs.indices[:, None].contiguous()
        return lambda: module.sparse_mla_fwd_interface(inputs.q, kv, indices, sm_scale=scale)
    q, kv, indices, sink = inputs.q[None], inputs.kv[None], inputs.indices[None], _sink(inputs)
    return lambda: module.sparse_mqa_fwd_interface(q, kv, sink, indices, sm_scale=scale)


def _automodel_backward(inputs: Inputs) -> Call:
    module, scale = _automodel_half(inputs, "bwd"), _scale(inputs)
    out, lse = cast("tuple[Tensor, Tensor]", _automodel_forward(inputs)())
    if inputs.q.shape[-1] == 576:
        kv, indices = inputs.kv[:, None].contiguous(), inputs.indices[:, None].contiguous()
        return lambda: module.sparse_mla_bwd(inputs.q, kv, out, inputs.grad_out, indices, lse, sm_scale=scale)
    q, kv, indices, sink = inputs.q[None], inputs.kv[None], inputs.indices[None], _sink(inputs)
    grad_out = inputs.grad_out[None]
    return lambda: module.sparse_mqa_bwd_interface(q, kv, sink, out, grad_out, indices, lse, sm_scale=scale)


PEERS = (
    Peer("FlashMLA", _missing(_flashmla), _flashmla_forward, None),
    Peer("cuDNN", _missing(_cudnn_backward_wrapper), None, _cudnn_backward),
    Peer(
        "AutoModel TileLang",
        _missing(lambda: _automodel(_V4, "tilelang_sparse_mla_fwd")),
        _automodel_forward,
        _automodel_backward,
    ),
)
