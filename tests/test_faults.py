"""Faults that people met in kernels of this kind, each at its smallest input: docs/faults.md says which is held where.

Here are those that no other test has; the reference runs them everywhere, the kernels on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slattn
from conftest import poison
from slattn.kernels.build import kernel
from slattn.testing import CASES, Case, Inputs, make_inputs, oracle, relative_error, run
from test_backends import device_of, run_or_skip

gpu = pytest.mark.gpu
BACKENDS = ["reference", pytest.param("tilelang", marks=gpu), pytest.param("flashmla_cudnn", marks=gpu)]
ROOT = Path(__file__).parents[1]
GUARD = 64 * 1024  # bytes on each side; keeps every alignment


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Whatever slattn allocates lies in memory of its own, between bands of a pattern that nobody may change."""
    memories: list[Tensor] = []
    real = torch.full

    def guarding(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarded(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("slattn") or tensor.device.type == "meta":
                return tensor
            size = tensor.numel() * tensor.element_size()
            memory = real((GUARD + size + GUARD,), 0x5A, dtype=torch.uint8, device=tensor.device)
            memories.append(memory)
            inside = memory[GUARD : GUARD + size].view(tensor.dtype).view(tensor.shape)
            if "empty" in allocate.__name__:
                poison(inside)
                return inside
            return inside.copy_(tensor)

        guarded.__name__ = allocate.__name__
        return guarded

    monkeypatch.undo()  # conftest's poison, which `guarded` does itself
    for owner, names in ((torch, ("empty", "empty_like", "zeros", "zeros_like", "full")), (Tensor, ("new_zeros",))):
        for name in names:
            monkeypatch.setattr(owner, name, guarding(getattr(owner, name)))
    for name in ("new_empty", "new_full"):
        monkeypatch.setattr(Tensor, name, guarding(getattr(Tensor, name)))
    yield memories
    bands = [torch.cat([memory[:GUARD], memory[-GUARD:]]) for memory in memories]
    assert all(bool((band == 0x5A).all()) for band in bands), "written outside a tensor"


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 20, 24, 31, 32, 33, 40, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_outside_what_is_allocated(backend: str, heads: int, head_dim: int, guards: list[Tensor]):
    """A tile of 16 or 64 heads over fewer of them reached the next query, or past the end; -1 reached before dkv."""
    case = Case("guards", heads=heads, head_dim=head_dim, queries=3, keys=70, indices="fillers", grad_lse=True)
    inputs = make_inputs(case, device_of(backend))
    results = run_or_skip(inputs, backend)
    assert guards
    assert all(x.isfinite().all() for x in (results.out, results.dq, results.dkv, results.dsink))


def by_hand(backend: str, heads: int, head_dim: int, keys: int, rows: list[list[int]]) -> Inputs:
    """A call of zeros in bfloat16, with a sink of zeros."""
    device, options = device_of(backend), {"dtype": torch.bfloat16}
    d_v = 512 if head_dim == 576 else head_dim
    return Inputs(
        q=torch.zeros(len(rows), heads, head_dim, **options).to(device),
        kv=torch.zeros(keys, head_dim, **options).to(device),
        indices=torch.tensor(rows, dtype=torch.int32, device=device),
        attn_sink=torch.zeros(heads, device=device),
        topk_length=None,
        scale=None,
        d_v=None,
        grad_out=torch.zeros(len(rows), heads, d_v, **options).to(device),
        grad_lse=None,
    )


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_row_before_the_keys_is_never_read(backend: str, head_dim: int):
    """Index -1 as an address: NaN, or Inf times a weight of zero."""
    for outside in (math.nan, math.inf):
        inputs = by_hand(backend, 16, head_dim, 64, [[k % 64 if k % 2 else -1 for k in range(64)]] * 2)
        memory = torch.full((3, 64, head_dim), outside, dtype=torch.bfloat16, device=inputs.kv.device)
        memory[1] = torch.randn(64, head_dim)
        grad_out = torch.randn_like(inputs.grad_out)
        results = run_or_skip(dataclasses.replace(inputs, kv=memory[1], grad_out=grad_out), backend)
        assert all(x.isfinite().all() for x in (results.out, results.dq, results.dkv, results.dsink))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_row_is_nothing_however_large_its_logits_would_be(backend: str):
    """A row without keys lent key 0 for safety: exp(120) overflows float32, and zero times that is NaN."""
    inputs = by_hand(backend, 64, 512, 4, [[-1] * 64, [1] + [-1] * 63])
    inputs.q[0], inputs.kv[0] = 120 * math.sqrt(512) / 512, 1.0
    inputs.grad_out.fill_(1.0)
    results = run_or_skip(inputs, backend)
    assert not results.dkv[0].any()
    assert not results.dq[0].any()
    assert not results.out[0].any()
    assert results.lse[0].isposinf().all()
    assert results.dkv.isfinite().all()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_zero_beside_keys_of_zero(backend: str, head_dim: int, length: int):
    """The sink was left out of the denominator at D = 576. With n logits of 0 it takes 1 / (n + 1)."""
    inputs = by_hand(backend, 64, head_dim, 128, [[k if k < length else -1 for k in range(128)]])
    inputs.kv[:, 500] = 1.0  # of the value, where every q is 0
    inputs.grad_out[..., 500] = 1.0
    results = run_or_skip(inputs, backend)
    share = length / (length + 1)
    assert relative_error(results.out[..., 500], torch.full_like(results.lse, share)) < 4e-3
    assert relative_error(results.lse, torch.full_like(results.lse, math.log(length)).clamp_min(1e-30)) < 1e-5 or (
        length == 1 and results.lse.abs().max() < 1e-6
    )
    assert relative_error(results.dsink, torch.full_like(results.dsink, -share / (length + 1))) < 8e-3
    assert (
        relative_error(results.dkv[:length, 500], torch.full_like(results.dkv[:length, 500], 64 / (length + 1))) < 8e-3
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_equal_shares_do_not_stall(backend: str):
    """4096 contributions to one key, added up in bfloat16, stop at 256."""
    inputs = by_hand(backend, 1, 512, 1, [[0]] * 4096)
    inputs.grad_out.fill_(1.0)
    got = run_or_skip(dataclasses.replace(inputs, attn_sink=None), backend)
    assert torch.equal(got.dkv, torch.full_like(got.dkv, 4096.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_no_memory_of_its_own(backend: str):
    """.sum() sends a gradient of stride 0; a kernel that reads it as contiguous reads past it."""
    inputs = make_inputs(Case("expanded", heads=8, queries=3, keys=70), device_of(backend))
    one = torch.ones((), dtype=torch.bfloat16, device=inputs.q.device)
    expanded = run_or_skip(dataclasses.replace(inputs, grad_out=one.expand(inputs.grad_out.shape)), backend)
    copied = run_or_skip(dataclasses.replace(inputs, grad_out=torch.ones_like(inputs.grad_out)), backend)
    assert torch.equal(expanded.dq, copied.dq)
    assert relative_error(expanded.dkv, copied.dkv) < 1e-4


def first_in_a_process(backend: str, name: str, device: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slattn", "check", "--backend", backend, "--case", name, "--device", device]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


FIRST = ("H8-D512-T62", "H24-D512-T3", "H64-D576-T2", "H128-D512-T2")


@gpu
@pytest.mark.parametrize(
    ("backend", "name"),
    [("tilelang", "H64-D128-T5"), *((backend, name) for backend in ("tilelang", "flashmla_cudnn") for name in FIRST)],
)
def test_right_as_the_first_kernel_of_a_process(backend: str, name: str):
    """Another compiler's kernel gave zeros where it was the first that a process compiled."""
    inputs = make_inputs(Case("any", heads=64, queries=1), "cuda")
    run_or_skip(inputs, backend)  # what is missing is missing there too
    done = first_in_a_process(backend, name, "cuda")
    assert done.returncode == 0, done.stdout + done.stderr


@gpu
def test_lengths_compile_nothing_new():
    """A kernel for every length costs seconds a step: one compilation serves four (S, N), K and batches."""
    sizes = ((48, 48, 64, None), (129, 129, 1, None), (1024, 1024, 65, 2), (1025, 1400, 640, 3))
    compiled = []
    for queries, keys, slots, batch in sizes:
        case = Case("lengths", heads=64, queries=queries, keys=keys, slots=slots, batch=batch)
        inputs = make_inputs(case, "cuda")
        results, want = run(inputs, "tilelang"), oracle(inputs)
        assert relative_error(results.dkv, want.dkv) < 4e-3
        compiled.append(kernel.cache_info().misses)
    assert len(set(compiled)) == 1, compiled


def test_key_0_stays_where_fillers_are_many():
    """Fillers clamped to 0 and then written as "not attended" took key 0 with them."""
    inputs = by_hand("reference", 1, 512, 3, [[0, -1, -1, -1], [-1, -1, 0, -1]])
    inputs.kv[0] = 1.0
    out = slattn.sparse_attention(inputs.q, inputs.kv, inputs.indices)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize(("document", "least"), [("faults.md", 50), ("reliability.md", 30)])
def test_the_tables_name_what_is_there(document: str, least: int):
    table = (ROOT / "docs" / document).read_text()
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    named = re.findall(r"`(test_\w+)[*`]", table)
    assert len(named) >= least
    assert [name for name in named if f"def {name}" not in tests] == []
    cases = re.findall(r"`(?:case )?((?:indices|keys|length|sink|values|batch|queries)-[\w-]*)[*`]", table)
    assert [name for name in cases if not any(case.name.startswith(name) for case in CASES)] == []
    files = re.findall(r"(?<![\w/])(test_\w+\.py)", table)
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []
    targets = re.findall(r"`(?:\w+=\S+ )?make ([a-z-]+)", table)
    assert [name for name in targets if f"\n{name}: " not in (ROOT / "Makefile").read_text()] == []
