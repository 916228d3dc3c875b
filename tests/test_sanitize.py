"""The smallest calls that reach every kernel, for compute-sanitizer: `make sanitize` runs what is named sanitize here.

Without a tool they still say that nothing raises. Values are not compared: the oracle under a tool takes minutes, and
`slattn check` compares the same cases. Without a GPU they say which kernels they reach: all.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable

import pytest
import torch

import slattn
from slattn import testing
from slattn.automodel.tilelang_sparse_mla_bwd import sparse_mqa_bwd_interface
from slattn.automodel.tilelang_sparse_mla_fwd import sparse_mqa_fwd_interface
from slattn.backends import exact, tilelang
from slattn.kernels.config import Config
from slattn.kernels.needed import claimed
from slattn.problem import describe

# Both key sizes and a short one, one head tile and several, a last tile that is not full, slots and keys that fill no
# tile, every kind of index, lengths, sinks, a gradient of lse, the batched layout, no keys at all.
CASES = (
    "H8-D128-T16-N20-K16",
    "H2-D576-T62-N300-K65",
    "H80-D512-T3-N100-K1",
    "indices-fillers",
    "indices-empty-rows-no-sink-576",
    "length-mixed",
    "sink-mixed-576",
    "grad-lse-576",
    "batch-3-lengths",
    "keys-0",
)

# (heads, D) of the kernels that no case reaches, each on two queries.
OTHERS = ((16, 64), (64, 64), (64, 128), (16, 256), (64, 256), (32, 512), (32, 576), (96, 576))


@pytest.fixture(autouse=True)
def _poison() -> None:
    """None here: initcheck has to see fresh memory as it comes."""


def test_the_cases_exist() -> None:
    assert set(CASES) <= {case.name for case in testing.CASES}


def both_modes(case: testing.Case, device: str) -> None:
    """Forward, backward in either mode, and the indexer's target."""
    inputs = testing.make_inputs(case, device)
    results = testing.run(inputs, "tilelang")
    testing.run(inputs, "tilelang", deterministic=True)
    options = {"scale": inputs.scale, "topk_length": inputs.topk_length, "attn_sink": inputs.attn_sink}
    slattn.attention_slot_probs(inputs.q, inputs.kv, inputs.indices, results.lse, backend="tilelang", **options)
    assert results.dkv.shape[-1] == case.head_dim


def named(name: str, device: str) -> None:
    both_modes(next(case for case in testing.CASES if case.name == name), device)


def of_size(size: tuple[int, int], device: str) -> None:
    heads, head_dim = size
    case = testing.Case("size", heads, head_dim, queries=2, keys=70, slots=65, indices="holes")
    both_modes(case, device)


def one_gradient(needs: tuple[bool, bool, bool], device: str) -> None:
    """dkv in float32 too."""
    x = testing.make_inputs(testing.Case("one", heads=64, queries=2, keys=70, slots=65), device)
    out, lse = slattn.sparse_attention(x.q, x.kv, x.indices, return_lse=True, backend="tilelang")
    for deterministic in (False, True):
        slattn.sparse_attention_backward(
            *(x.q, x.kv, x.indices, out, lse, x.grad_out),
            needs=needs,
            dkv_dtype=torch.float32,
            deterministic=deterministic,
            backend="tilelang",
        )


def drop_in(settings: tuple[int, int], device: str) -> None:
    """AutoModel's V4 kernels: an lse with the sink inside, roundings and blocks of their own."""
    head_dim, block = settings
    x = testing.make_inputs(testing.Case("v4", 64, head_dim, queries=2, keys=70, slots=65, batch=1), device)
    if head_dim == 512:
        out, lse = sparse_mqa_fwd_interface(x.q, x.kv, x.attn_sink, x.indices, block_I=block, reference_rounding=True)
        sparse_mqa_bwd_interface(x.q, x.kv, x.attn_sink, out, x.grad_out, x.indices, lse)
    else:  # the modules have D = d_v; the functions below them take this pair too
        problem = describe(x.q, x.kv, x.indices)
        out, lse = tilelang.forward(problem, x.q, x.kv, x.indices, None, None, reference_rounding=True)
        delta = tilelang.delta_of(out, x.grad_out)
        tilelang.main_backward(problem, x.q, x.kv, x.indices, None, x.grad_out, lse, delta, dkv=x.kv.float())


def long_rows(head_dim: int, device: str) -> None:
    """Of so many slots that count that Hopper's backward makes delta itself; the last head tile is not full."""
    slots = tilelang.DELTA_WITHIN
    case = testing.Case("long", heads=72, head_dim=head_dim, queries=2, keys=slots + 9, slots=slots + 3)
    testing.run(testing.make_inputs(case, device), "tilelang")


def stream(head_dim: int, device: str) -> None:
    """Rows that one multiprocessor takes after another."""
    case = testing.Case(
        "stream", heads=64, head_dim=head_dim, queries=12, keys=300, slots=300, indices="holes", lengths="random"
    )
    testing.run(testing.make_inputs(case, device), "tilelang")


CALLS: dict[str, tuple[Callable[..., None], object]] = {
    **{name: (named, name) for name in CASES},
    **{f"H{size[0]}-D{size[1]}": (of_size, size) for size in OTHERS},
    "dq": (one_gradient, (True, False, False)),
    "dkv": (one_gradient, (False, True, False)),
    "both": (one_gradient, (True, True, True)),
    **{f"delta-within-{head_dim}": (long_rows, head_dim) for head_dim in (512, 576)},
    **{
        f"drop-in-{head_dim}-{block}": (drop_in, (head_dim, block))
        for head_dim, block in ((512, 64), (512, 32), (576, 64))
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_sanitize(name: str) -> None:
    call, argument = CALLS[name]
    call(argument, "cuda")
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("within", [1, 80, tilelang.NEVER])
def test_sanitize_rows_of_one_multiprocessor(head_dim: int, within: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few rows have a multiprocessor each; here Hopper's own kernels take one row after another."""
    monkeypatch.setattr(tilelang, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(tilelang, "DELTA_WITHIN", within)
    stream(head_dim, "cuda")
    torch.cuda.synchronize()


def test_every_kernel_of_hopper_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with nothing launched."""
    reached: set[Config] = set()

    def kernel(config: Config) -> Callable[..., None]:
        return lambda *arguments: reached.add(config)

    for module in (tilelang, exact):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(tilelang, "refusal", lambda problem: None)
    monkeypatch.setattr(tilelang, "_arch", lambda device: 90)
    monkeypatch.setattr(tilelang, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tilelang, "_multiprocessors", lambda device: 132)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for call, argument in CALLS.values():
        call(argument, "cpu")
    assert [config for config in claimed() if config.arch == 90 and config not in reached] == []
