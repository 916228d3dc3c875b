"""FlashMLA and cuDNN's sparse attention as found here: whether they import, what they are like, whether they work.

Part of the backend `flashmla_cudnn`, and the source of the runtimes in slattn.automodel.cudnn_sparse_attention.
Nothing is imported before somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slattn import reference
from slattn.problem import Problem

VALUE_DIM = 512  # the only d_v either library takes
CUDNN_COMMAND = "pip install nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl==4.8.1"
FLASH_MLA_COMMAND = "pip install sglang-kernel==0.4.4"
SELF_TEST_ERROR = 1e-2  # relative: bf16 gives 2.4e-3, a wrong convention 1e-1 or more


@dataclass(frozen=True)
class Runtime:
    """A library found, or the sentence that says why not and how to mend it."""

    found: Any  # flash_mla_sparse_fwd, or the namespace cudnn.DSA; None when missing
    missing: str = ""


@functools.cache
def flash_mla() -> Runtime:
    """`flash_mla_sparse_fwd` of FlashMLA itself (main or nv_dev), else of sglang-kernel."""
    reasons = []
    for name in ("flash_mla", "sgl_kernel.flash_mla"):
        try:
            module = importlib.import_module(name)
            # sglang-kernel's module imports without its extension and keeps the error for the first call.
            late = getattr(module, "_flashmla_import_error", None)
            if late is not None:
                raise late
            function = module.flash_mla_sparse_fwd
            parameters = inspect.signature(function).parameters
            if "topk_length" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise TypeError("its flash_mla_sparse_fwd takes no attn_sink and topk_length (before January 2026)")
            return Runtime(function)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever an import raises, the library is not there
            reasons.append(_quote(name, error))
    return Runtime(
        None, f"FlashMLA is missing: {'; '.join(reasons)}. Install it with `{FLASH_MLA_COMMAND}`, or build flash_mla"
    )


@functools.cache
def cudnn_dsa() -> Runtime:
    """The namespace `cudnn.DSA` with its `sparse_attention_backward_wrapper`, which needs the CuTe DSL to load."""
    try:
        namespace = importlib.import_module("cudnn").DSA
        namespace.sparse_attention_backward_wrapper  # noqa: B018  loads the kernels' Python, where most imports fail
        return Runtime(namespace)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever an import raises, the library is not there
        return Runtime(
            None,
            f"cuDNN's sparse attention (nvidia-cudnn-frontend) is missing: {_quote('cudnn', error)}. "
            f"Install it with `{CUDNN_COMMAND}`",
        )


def _quote(name: str, error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"import of {name} raised {type(error).__name__}{f' ({lines[0]})' if lines else ''}"


@dataclass(frozen=True)
class Dialect:
    """What FlashMLA's builds differ in, found by asking one."""

    nats: float  # one unit of its lse in natural logarithm: 1, or ln 2 where it counts in base 2
    clears_empty_rows: bool  # out of a row without a key is 0, even beside keys that hold NaN


def _kept(answer: Callable[..., Any]) -> Any:
    """`answer` cached; where its function cannot be hashed, as a dataclass that stands in for one, not cached."""
    cached = functools.lru_cache(maxsize=64)(answer)

    @functools.wraps(answer)
    def ask_or_remember(function: Callable[..., Any], *rest: Any) -> Any:
        return cached(function, *rest) if isinstance(function, Hashable) else answer(function, *rest)

    ask_or_remember.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return ask_or_remember


def ask(sparse_fwd: Callable[..., Any], device: torch.device) -> Dialect:
    """The dialect of a FlashMLA on a device, from one call (two, where it lets keys that no slot names through).

    100 keys of zeros give lse ln 100 or log2 100; anything else, an exception too, counts as natural: a function that
    cannot run says so in the call proper. Answers are kept, but for that of an exception, which may be a passing one.

    Raises:
        RuntimeError: asked inside the capture of a CUDA graph, where no result can be read.
    """
    try:
        return _dialect(sparse_fwd, device)
    except _Unanswered:
        return Dialect(1.0, False)


class _Unanswered(Exception):
    """The function raised when asked."""


@_kept
def _dialect(sparse_fwd: Callable[..., Any], device: torch.device) -> Dialect:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run the forward once before capturing a CUDA graph: the first call asks FlashMLA its base")
    count, width, head_dim = 100, 512, 576  # a width and a head_dim that every build takes
    rows = torch.full((2, 1, width), -1, dtype=torch.int32, device=device)
    rows[0, 0, :count] = 1
    q = torch.zeros(2, 64, head_dim, dtype=torch.bfloat16, device=device)
    sink = torch.full((64,), -math.inf, device=device, dtype=torch.float32)
    lengths = torch.tensor([count, 0], dtype=torch.int32, device=device)
    extra = {"indexer_topk": 0} if takes_indexer_topk(sparse_fwd) else {}
    for unnamed in (math.nan, 0.0):
        kv = torch.full((3, 1, head_dim), unnamed, dtype=torch.bfloat16, device=device)
        kv[1] = 0.0
        try:
            with on_device(device):
                result = sparse_fwd(q, kv, rows, 1.0, d_v=VALUE_DIM, attn_sink=sink, topk_length=lengths, **extra)
            lse, clears = float(result[2][0, 0]), bool((result[0][1] == 0).all())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a stand-in that takes one shape alone, for one
            raise _Unanswered from error
        for nats in (1.0, math.log(2.0)):
            if abs(lse * nats - math.log(count)) < 1e-2:
                return Dialect(nats, clears and math.isnan(unnamed))
    return Dialect(1.0, False)


@_kept
def takes_indexer_topk(sparse_fwd: Callable[..., Any]) -> bool:
    """Whether the function has a parameter indexer_topk, or **kwargs: FlashMLA's nv_dev branch does, main does not."""
    try:
        parameters = inspect.signature(sparse_fwd).parameters.values()
    except (TypeError, ValueError):  # a builtin shows no signature
        return False
    return any(p.name == "indexer_topk" or p.kind is p.VAR_KEYWORD for p in parameters)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device made current: FlashMLA asks the current device for its architecture."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_verdicts: dict[tuple[Any, ...], str | None] = {}


def self_test_failure(problem: Problem, forward: Callable[..., Any], backward: Callable[..., Any]) -> str | None:
    """Why the installed pair must not be trusted with this head dimension on this device; None if it may.

    Asked once per device, head dimension and pair: builds of both libraries have been seen to give gradients of the
    size 1e11 without an error (cudnn-frontend issues 384 and 385). The test has the call's own heads and slots, so
    that the kernels it compiles are those that the call uses.

    Args:
        forward, backward: those of the backend.
    """
    sparse_fwd, dsa = flash_mla().found, cudnn_dsa().found
    key = (problem.device, problem.head_dim, sparse_fwd, dsa)
    if key not in _verdicts:
        if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "its self-test cannot run while a CUDA graph is captured: run the call once before capturing"
        _verdicts[key] = self_test(
            problem,
            functools.partial(forward, sparse_fwd=sparse_fwd),
            functools.partial(backward, sparse_bwd=dsa.sparse_attention_backward_wrapper),
        )
    return _verdicts[key]


def self_test(problem: Problem, forward: Callable[..., Any], backward: Callable[..., Any]) -> str | None:
    """Six queries, one of them without a key, forward and backward, against the reference: the failure or None."""
    heads = max(problem.heads, 64)  # padded to 64 anyway; dsink of a few heads alone may cancel
    tiny = problem._replace(batch=1, queries=6, keys=40, heads=heads, scale=problem.head_dim**-0.5, deterministic=False)
    q, kv, indices, sink, grad_out = _tiny_inputs(tiny)
    arguments = (tiny, q, kv, indices, sink, None)
    needs, dkv_dtype = (True, True, True), torch.float32
    try:
        out, lse = forward(*arguments)
        gradients = backward(*arguments, out, lse, grad_out, None, needs=needs, dkv_dtype=dkv_dtype)
    except torch.OutOfMemoryError:  # says nothing about the libraries, and the verdict would be kept
        raise
    except Exception as error:  # a library that cannot run a small problem is refused with its own words
        return f"the self-test of FlashMLA and cuDNN on {problem.device} raised {type(error).__name__}: {error}"
    want = reference.forward(*arguments)
    wanted = reference.backward(*arguments, *want, grad_out, None, needs=needs, dkv_dtype=dkv_dtype)
    for name, got, truth in zip(
        ("out", "lse", "dq", "dkv", "dsink"), (out, lse, *gradients), (*want, *wanted), strict=True
    ):
        error_size = _relative_error(got, truth)
        if not error_size < SELF_TEST_ERROR:
            return (
                f"the self-test of FlashMLA and cuDNN on {problem.device} failed: {name} at D = {problem.head_dim} "
                f"is off by {error_size:.2g}, relative (allowed {SELF_TEST_ERROR:g})"
            )
    return None


def _tiny_inputs(tiny: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, kv, indices, sink and grad_out; the first and the last key hold NaN and Inf, and nobody names them."""
    g = torch.Generator(tiny.device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=tiny.device)

    q = randn(1, tiny.queries, tiny.heads, tiny.head_dim).bfloat16()
    kv = randn(1, tiny.keys, tiny.head_dim).bfloat16()
    kv[:, 0], kv[:, -1] = torch.nan, torch.inf
    grad_out = randn(1, tiny.queries, tiny.heads, tiny.value_dim).bfloat16()
    shape = (1, tiny.queries, tiny.slots)
    indices = torch.randint(1, tiny.keys - 1, shape, generator=g, device=tiny.device, dtype=torch.int32)
    indices[:, 2] = -1
    indices[:, 3, 1::2] = tiny.keys
    return q, kv, indices, randn(tiny.heads), grad_out


def _relative_error(got: Tensor | None, truth: Tensor | None) -> float:
    """Relative Frobenius error over what is finite in truth; inf where they differ in what is finite."""
    if got is None or truth is None:
        return math.inf
    finite = truth.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return math.inf
    got, truth = got[finite].double(), truth[finite].double()
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))
