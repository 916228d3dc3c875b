"""Sizes past 2^31 elements and past the limits of a grid, and the memory that a call takes beside its results.

What is compared is the same rows, or the same keys, run alone: the float64 reference would take minutes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import slattn
from slattn import sparse_attention, sparse_attention_backward
from slattn.backends.flashmla_cudnn import most_keys
from slattn.testing import Case, Inputs, Results, Shape, bench_inputs, make_inputs, oracle, relative_error, run
from test_backends import run_or_skip

pytestmark = pytest.mark.gpu
KERNELS = ["tilelang", "flashmla_cudnn"]
GIB = 2**30


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    torch.cuda.empty_cache()


def need(gib: int) -> None:
    if torch.cuda.mem_get_info()[1] < gib * GIB:
        pytest.skip(f"needs a GPU with {gib} GiB")


def many_queries(queries: int, heads: int, head_dim: int, slots: int, keys: int = 256) -> Inputs:
    """Random, but for the indices: made without a table of queries times keys."""
    g = torch.Generator("cuda").manual_seed(0)
    like = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    return Inputs(
        q=torch.randn(queries, heads, head_dim, **like),
        kv=torch.randn(keys, head_dim, **like),
        indices=torch.randint(-1, keys, (queries, slots), generator=g, device="cuda", dtype=torch.int32),
        attn_sink=torch.randn(heads, generator=g, device="cuda"),
        topk_length=None,
        scale=None,
        d_v=None,
        grad_out=torch.randn(queries, heads, min(head_dim, 512), **like),
        grad_lse=None,
    )


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    parts = {name: getattr(inputs, name)[rows].clone() for name in ("q", "indices", "grad_out")}
    length = None if inputs.topk_length is None else inputs.topk_length[rows].clone()
    return replace(inputs, topk_length=length, **parts)


def assert_rows_are_as_alone(inputs: Inputs, whole: Results, backend: str, rows: int = 64) -> None:
    """The first rows, those around the middle, and the last."""
    queries = len(inputs.q)
    for start in (0, queries // 2, queries - rows):
        part = slice(start, start + rows)
        alone = run(rows_of(inputs, part), backend)
        for name in ("out", "lse", "dq"):
            assert torch.equal(getattr(whole, name)[part], getattr(alone, name)), f"{name} from row {start}"


def assert_sums_are_of_parts(inputs: Inputs, whole: Results, backend: str, step: int) -> None:
    """dkv and dsink as the sums, in float64, of those of `step` queries at a time."""
    dkv, dsink = torch.zeros_like(inputs.kv, dtype=torch.float64), torch.zeros_like(inputs.attn_sink).double()
    for start in range(0, len(inputs.q), step):
        part = slice(start, start + step)
        x = rows_of(inputs, part)
        _, of_kv, of_sink = sparse_attention_backward(
            *(x.q, x.kv, x.indices, whole.out[part], whole.lse[part], x.grad_out),
            attn_sink=x.attn_sink,
            topk_length=x.topk_length,
            needs=(False, True, True),
            dkv_dtype=torch.float32,
            backend=backend,
        )
        dkv += of_kv
        dsink += of_sink
    assert relative_error(whole.dkv, dkv) < 3e-3
    assert relative_error(whole.dsink, dsink) < 1e-3


# Elements of q pass 2^31 at T = 65,537, 32,769, 58,255 and 29,128.
@pytest.mark.parametrize(
    ("queries", "heads", "head_dim"), [(70_000, 64, 512), (35_000, 128, 512), (60_000, 64, 576), (30_000, 128, 576)]
)
@pytest.mark.parametrize("backend", KERNELS)
def test_queries_past_32_bits(backend: str, queries: int, heads: int, head_dim: int):
    need(80)
    inputs = many_queries(queries, heads, head_dim, slots=64)
    assert inputs.q.numel() > 2**31
    whole = run_or_skip(inputs, backend)
    assert_rows_are_as_alone(inputs, whole, backend)
    assert_sums_are_of_parts(inputs, whole, backend, step=9_000)


def test_queries_past_32_bits_in_deterministic_mode():
    need(80)
    inputs = many_queries(70_000, 64, 512, slots=64)
    whole = run(inputs, "tilelang", deterministic=True)
    assert_rows_are_as_alone(inputs, whole, "tilelang")
    assert_sums_are_of_parts(inputs, whole, "tilelang", step=9_000)


# Elements of kv pass 2^31 at N = 4,194,305 and 3,728,271; the portable backward has the few heads.
@pytest.mark.parametrize(
    ("keys", "heads", "head_dim"), [(4_200_000, 64, 512), (3_800_000, 64, 576), (4_200_000, 16, 512)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_past_32_bits(keys: int, heads: int, head_dim: int, deterministic: bool):
    assert keys * head_dim > 2**31
    assert_keys_are_as_alone("tilelang", keys, heads, head_dim, deterministic)


@pytest.mark.parametrize("head_dim", [512, 576])
def test_the_most_keys_that_cudnn_takes(head_dim: int):
    """Up to the last block below 2^31 elements on SM90, and a sentence past it; from SM100 on past it too."""
    keys = 4_200_000
    if torch.cuda.get_device_capability()[0] == 9:
        keys = most_keys(head_dim)
        with pytest.raises(slattn.BackendRefusal, match=f"takes up to {keys} keys"):
            assert_keys_are_as_alone("flashmla_cudnn", keys + 1, 64, head_dim)
    assert_keys_are_as_alone("flashmla_cudnn", keys, 64, head_dim)


def assert_keys_are_as_alone(backend: str, keys: int, heads: int, head_dim: int, deterministic: bool = False) -> None:
    """Every query names keys all over the table, among them the last; the same keys alone give the same bits."""
    need(80 if deterministic else 60)
    few = many_queries(64, heads, head_dim, slots=96, keys=300)
    rows = torch.linspace(0, keys - 1, 300, dtype=torch.float64, device="cuda").long()
    kv = torch.full((keys, head_dim), math.nan, dtype=torch.bfloat16, device="cuda")
    kv[rows] = few.kv
    indices = torch.where(few.indices < 0, -1, rows[few.indices.clamp_min(0).long()]).int()
    want = run_or_skip(few, backend, deterministic)
    many = run(replace(few, kv=kv, indices=indices), backend, deterministic)
    if deterministic:
        assert torch.equal(many.dkv[rows], want.dkv)
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(many, name), getattr(want, name)), name
    assert relative_error(many.dkv[rows], want.dkv) < 1e-4
    assert many.dkv.count_nonzero() == many.dkv[rows].count_nonzero()


@pytest.mark.parametrize("slots", [1, 2048])
def test_slots_past_32_bits_and_blocks_past_a_grid_axis(slots: int):
    """2.1 million queries: 65,535 times 32 and more. With 2048 slots each the indices have 4.3e9 elements."""
    need(60)
    inputs = many_queries(2_097_153, 1, 64, slots=slots)
    inputs = replace(inputs, topk_length=torch.full((2_097_153,), 40, dtype=torch.int32, device="cuda"))
    assert slots == 1 or inputs.indices.numel() > 2**32
    whole = run(inputs, "tilelang")
    assert_rows_are_as_alone(inputs, whole, "tilelang")
    assert_sums_are_of_parts(inputs, whole, "tilelang", step=300_000)


def test_a_batch_past_32_bits():
    """Entry 1's queries and keys lie past 2^31 elements of each."""
    need(80)
    flat = many_queries(70_000, 64, 512, slots=64)
    names = ("q", "indices", "grad_out")
    batched = replace(flat, **{n: getattr(flat, n).view(2, 35_000, *getattr(flat, n).shape[1:]) for n in names})
    batched = replace(batched, kv=torch.stack([flat.kv, flat.kv.flip(0)]))
    whole = run(batched, "tilelang")
    for entry in (0, 1):
        alone = replace(rows_of(flat, slice(entry * 35_000, (entry + 1) * 35_000)), kv=batched.kv[entry])
        got = run(alone, "tilelang")
        for name in ("out", "lse", "dq"):
            assert torch.equal(getattr(whole, name)[entry], getattr(got, name)), name
        assert relative_error(whole.dkv[entry], got.dkv) < 5e-4  # 8,750 parts a row, in another order


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("backend", KERNELS)
def test_8192_slots(backend: str, head_dim: int):
    inputs = make_inputs(Case("wide", heads=64, head_dim=head_dim, queries=3, keys=9000, slots=8192), "cuda")
    got, want = run_or_skip(inputs, backend), oracle(inputs)
    for name in ("out", "dq", "dkv"):
        assert relative_error(getattr(got, name), getattr(want, name)) < 4e-3, name


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("head_dim", [512, 576])
def test_memory_as_promised(head_dim: int, heads: int):
    """Beside its results a backward takes dkv in float32, three numbers a head, and the indices once more."""
    shape = Shape("memory", 4096, 8192, heads, head_dim, 640)
    x = bench_inputs(shape, "cuda")
    run(x, "tilelang")
    torch.cuda.synchronize()
    leaves = [t.requires_grad_() for t in (x.q, x.kv, x.attn_sink)]

    def taken(call):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        return torch.cuda.max_memory_allocated() - before, results

    slack = 2 * 2**20  # torch rounds each allocation up
    results = 2 * 4096 * heads * 512 + 4 * 4096 * heads
    peak, out = taken(lambda: sparse_attention(*leaves[:2], x.indices, attn_sink=leaves[2], backend="tilelang"))
    assert peak <= results + slack
    results = 2 * (x.q.numel() + x.kv.numel())
    extra = 4 * x.kv.numel() + 3 * 4 * 4096 * heads + 4 * 4096 * (640 + 1)
    peak, _ = taken(lambda: torch.autograd.grad(out, leaves, x.grad_out))
    assert peak <= results + extra + slack, f"{(peak - results) / 2**20:.1f} MiB, {extra / 2**20:.1f} promised"
