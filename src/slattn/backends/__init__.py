"""Backend names, their modules, loaded on demand, and the choice between them.

A backend is a module with three functions, all on the batched form of a call (see `slattn.ops`):

    refusal(problem) -> str | None      why it cannot run this problem here, in a sentence; None if it can
    forward(problem, q, kv, indices, attn_sink, topk_length) -> (out, lse)
    backward(problem, q, kv, indices, attn_sink, topk_length, out, lse, grad_out, grad_lse, *,
             needs, dkv_dtype) -> (dq, dkv, dsink), None where `needs` says so

and, where it has them, slot_probs(problem, q, kv, indices, attn_sink, topk_length, lse) -> probs, and
kernels(problem) -> {"forward": ..., "backward": ...}, which of its kernels it would run. Where it says
ANY_LAYOUT = True, forward is called in the caller's layout, contiguous, and its results are handed out as they are: the
views between the layouts are a third of a short call's time on the host.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from slattn.problem import Problem

MODULES = {
    "tilelang": "slattn.backends.tilelang",
    "flashmla_cudnn": "slattn.backends.flashmla_cudnn",
    "reference": "slattn.reference",
}


class BackendRefusal(RuntimeError):
    """The backend that the caller named cannot run this problem; the message says why."""


@functools.cache
def load(name: str) -> Any:
    """The module of a backend, by one of the names in MODULES; raises ValueError where it is none."""
    return importlib.import_module(MODULES[backend_name(name)])


def backend_name(backend: str) -> str:
    """A backend's name or "auto", as it came; raises TypeError or ValueError where it is neither."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str; got {type(backend).__name__}")
    if backend != "auto" and backend not in MODULES:
        names = ", ".join(map(repr, MODULES))
        raise ValueError(f"backend must be 'auto' or one of {names}; got {backend!r}")
    return backend


def choose(problem: Problem, backend: str, function: str | None = None) -> str:
    """The name of the backend that runs `problem`: the named one, or for "auto" the first that does not refuse.

    `function`: one that not every backend has; those without it refuse.

    Raises:
        ValueError: a name that is no backend's.
        BackendRefusal: the named backend cannot run this problem.
    """
    if backend != "auto":
        reason = _refusal(load(backend), problem, function)
        if reason is not None:
            raise BackendRefusal(f"backend {backend!r} cannot run this call: {reason}")
        return backend
    if problem.device.type in ("cpu", "meta"):
        return "reference"
    reasons = []
    for name in MODULES:
        reason = _refusal(load(name), problem, function)
        if reason is None:
            break
        reasons.append(f"{name}: {reason}")
    if name == "reference":
        _say_once(problem.device.type, "; ".join(reasons))
    return name


def _refusal(module: Any, problem: Problem, function: str | None) -> str | None:
    if function is not None and not hasattr(module, function):
        return f"it has no {function}"
    reason: str | None = module.refusal(problem)
    return reason


@functools.cache
def _say_once(device: str, reasons: str) -> None:
    warnings.warn(
        f"slattn runs its slow reference on a {device} device, because no kernel takes the call: {reasons}",
        stacklevel=2,
    )
