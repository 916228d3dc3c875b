"""The kernel of `attention_slot_probs` against float64 on a GPU.

Nothing is rounded to bfloat16 on the way, so that the error is float32's: of the exponent, and of sums over heads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import slattn
from slattn.kernels.config import TARGETS
from slattn.testing import BENCH_SHAPES, CASES, Case, Inputs, bench_inputs, counting_slots, make_inputs, relative_error

pytestmark = pytest.mark.gpu

BUDGET = 2e-3


def both(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The kernel's answer and float64's, with the same float32 lse."""
    exact = replace(inputs, q=inputs.q.double(), kv=inputs.kv.double())
    sink = inputs.attn_sink
    options = {"scale": inputs.scale, "topk_length": inputs.topk_length}
    _, lse = slattn.sparse_attention(exact.q, exact.kv, exact.indices, return_lse=True, backend="reference", **options)
    want = slattn.attention_slot_probs(
        *(exact.q, exact.kv, exact.indices, lse.float().double()),
        attn_sink=None if sink is None else sink.double(),
        backend="reference",
        **options,
    )
    arguments = (inputs.q, inputs.kv, inputs.indices, lse.float())
    got = slattn.attention_slot_probs(*arguments, attn_sink=sink, backend="tilelang", **options)
    assert torch.equal(got, slattn.attention_slot_probs(*arguments, attn_sink=sink, backend="tilelang", **options))
    return got, want


def check(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    got, want = both(inputs)
    assert got.dtype == torch.float32
    assert not got[~counting_slots(inputs)].any()
    if want.any():
        assert relative_error(got, want) <= BUDGET


@pytest.mark.parametrize("case", [case for case in CASES if case.value_dim is None], ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512, 576])
@pytest.mark.parametrize("heads", [1, 64, 65, 128, 129, 256])
def test_sizes(heads: int, head_dim: int) -> None:
    """One tile of heads, a part of one, several; slots that end inside a block."""
    check(Case("sizes", heads=heads, head_dim=head_dim, queries=7, slots=130, indices="holes", lengths="random"))


@pytest.mark.parametrize("name", ["v32", "v4-flash"])
def test_training_shapes(name: str) -> None:
    inputs = bench_inputs(replace(BENCH_SHAPES[name], queries=200), "cuda")
    got, want = both(inputs)
    assert relative_error(got, want) <= BUDGET


@pytest.mark.parametrize(("heads", "head_dim"), [(64, 512), (24, 576), (80, 64)])
def test_the_sm80_kernel_is_right(monkeypatch: pytest.MonkeyPatch, heads: int, head_dim: int) -> None:
    """Assembled for this GPU, as in test_kernels_compile.py."""
    from slattn.backends import tilelang
    from slattn.kernels import build

    major, minor = torch.cuda.get_device_capability()
    here = f"sm_{major}{minor}"
    target = build.target
    monkeypatch.setattr(build, "target", lambda arch: target(arch, runs_on=(here,) if here != TARGETS[arch] else ()))
    monkeypatch.setattr(tilelang, "_arch", lambda device: 80)
    build.kernel.cache_clear()
    check(Case("sm80", heads=heads, head_dim=head_dim, queries=33, indices="holes", lengths="random"))
    build.kernel.cache_clear()


def test_another_length_compiles_nothing() -> None:
    from slattn.kernels.build import kernel

    misses = []
    for queries, keys, slots in ((48, 48, 64), (129, 200, 2063), (5, 7, 1)):
        q = torch.randn(queries, 16, 512, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(keys, 512, device="cuda", dtype=torch.bfloat16)
        indices = torch.randint(keys, (queries, slots), device="cuda", dtype=torch.int32)
        lse = torch.zeros(queries, 16, device="cuda")
        slattn.attention_slot_probs(q, kv, indices, lse, backend="tilelang")
        misses.append(kernel.cache_info().misses)
    assert misses == [misses[0]] * 3
