"""Every configuration claimed compiles for its architecture, fits its shared memory and, on SM90a, spills nothing."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from slattn.kernels.build import pass_configs
from slattn.kernels.config import (
    SHARED_BYTES,
    TARGETS,
    VALUE_DIMS,
    BackwardConfig,
    ForwardConfig,
    HopperForwardConfig,
    architecture,
    backward_config,
    forward_config,
    head_tiles,
    slot_probs_config,
)
from slattn.kernels.needed import claimed
from slattn.kernels.nvcc import find_nvcc

CLAIMED = claimed()


def name(config):
    kind = type(config).__name__.removesuffix("Config").lower()
    fields = vars(config)
    flags = [field for field in ("reference_rounding", "grad_lse", "deterministic") if fields.get(field)]
    flags += [f"no_{field}" for field in ("dq", "dkv") if fields.get(field) is False]
    sizes = [str(fields[field]) for field in ("head_tile", "head_dim", "value_dim", "dtype") if field in fields]
    return "-".join([TARGETS[config.arch], kind, *sizes, *flags])


@pytest.mark.parametrize("config", CLAIMED, ids=name)
def test_compiles_and_fits(config, tmp_path):
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed: pip install tilelang==0.1.15")
    nvcc = find_nvcc()
    assert nvcc is not None, "no nvcc found: install nvidia-cuda-nvcc and its companions of requirements/test.txt"
    from slattn.kernels.build import source

    text = tmp_path / "kernel.cu"
    text.write_text(source(config))
    assert narrow_addresses(text.read_text()) == []
    assert barriers_of_all_in_branches(text.read_text()) == []
    report = ptxas(nvcc, config, text, Path(tilelang.__file__).parent)
    static = int((re.search(r"(\d+) bytes smem", report) or [0, 0])[1])
    assert requested_shared_bytes(config) + static <= SHARED_BYTES[config.arch]
    assert not re.search(r"C75\d\d", report), report
    if config.arch == 90:
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report), report
        assert "0 bytes stack frame" in report, report


def narrow_addresses(text):
    """Where the program forms an address in global memory by a product of 32 bits, which a long sequence overflows.

    The CUDA helpers before the program are not seen: they take 64-bit rows, or products cast in sight.
    """
    head = re.search(r"__launch_bounds__\([^)]*\) main_kernel\((.*?)\) \{", text)
    narrow = []
    for pointer in re.findall(r"__restrict__ (\w+)", head[1]):
        uses = list(re.finditer(rf"\b{pointer}(?:\[| \+ \()", text[head.end() :]))
        assert uses or pointer == "GradLse", pointer  # else the pattern does not fit what TileLang writes
        for use in uses:
            start = head.end() + use.end()
            index = text[start : closing(text, start)]
            narrow += [f"{pointer}: {index}" for factor in index.split("*")[1:] if "(int64_t)" not in factor[:12]]
    return narrow


def closing(text, start):
    """The position of the bracket that closes the one before `start`."""
    depth = 1
    while depth:
        depth += (text[start] in "([") - (text[start] in ")]")
        start += 1
    return start - 1


def barriers_of_all_in_branches(text):
    """The barriers of all threads after a specialised program's warpgroups have parted, each at its own instruction.

    bar.sync is the aligned form, which wants all threads at the same one; compute-sanitizer's synccheck reports others.
    """
    threads = re.search(r"__launch_bounds__\((\d+)", text)[1]
    parted = re.search(r"warpgroup_reg_(?:de)?alloc<", text)
    after = text[parted.start() :] if parted else ""
    return re.findall(rf"__syncthreads\(\)|__sync_thread_partial\([^;]*, {threads}\)", after)


def test_barriers_of_all_in_branches_are_seen():
    program = "__launch_bounds__(384, 1) {} if (threadIdx.x < 128) {{ tl::warpgroup_reg_alloc<176>(); {} }}"
    whole, own = "tl::__sync_thread_partial(2, 384);", "tl::__sync_thread_partial(1, 128);"
    assert barriers_of_all_in_branches(program.format("__syncthreads();", own)) == []
    assert barriers_of_all_in_branches(program.format("", own + whole)) != []
    assert barriers_of_all_in_branches(program.format("", "__syncthreads();")) != []


def test_narrow_addresses_are_seen():
    program = "__launch_bounds__(128, 1) main_kernel(const float* __restrict__ Q, int heads) {{ x = Q[{}]; }}"
    assert narrow_addresses(program.format("(((int64_t)t) * ((int64_t)heads)) + (int64_t)h")) == []
    assert narrow_addresses(program.format("((t * heads) + h)")) != []
    assert narrow_addresses(program.format("((int64_t)((t * heads) + h))")) != []


def test_the_pass_that_overwrote_live_buffers_is_off():
    """tile-ai/tilelang issue 2199: finite losses, NaN gradients."""
    for config in CLAIMED:
        assert pass_configs(config)["tl.enable_aggressive_shared_memory_merge"] is False


def ptxas(nvcc, config, text, tilelang):
    """What the assembler says of a kernel."""
    target = TARGETS[config.arch].removeprefix("sm_")
    fast = [] if getattr(config, "reference_rounding", False) else ["--use_fast_math"]
    command = [
        *(nvcc, "-std=c++20", "-O3", "-cubin", "-o", str(text.with_suffix(".cubin"))),
        *("-gencode", f"arch=compute_{target},code=sm_{target}"),
        *("-I", str(tilelang / "src"), "-I", str(tilelang / "3rdparty" / "cutlass" / "include")),
        *("--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xptxas=-v", *fast, str(text)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def requested_shared_bytes(config):
    return getattr(config, "shared_bytes", 0)


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize(("heads", "head_dim"), [(64, 512), (16, 512), (64, 576), (64, 128)])
def test_a_warp_holds_16_rows_of_dkv(arch, heads, head_dim):
    """reduce_rows reads accumulators so. Where the products are mma.sync, TileLang has a choice; wgmma leaves none."""
    pytest.importorskip("tilelang", reason="TileLang is not installed: pip install tilelang==0.1.15")
    from slattn.kernels.build import source

    config = backward_config(arch, heads, head_dim)
    loads = [line for line in source(config).splitlines() if "ldmatrix" in line and ("p_s)" in line or "ds_s)" in line)]
    loads = [line for line in loads if "ldmatrix_x4(" in line]  # as the left operand, which dkv's products read
    assert loads
    rows = "& 127) >> 5)" if config.threads == 256 else "((((int)threadIdx.x) >> 5) *"
    assert all(rows in line for line in loads), loads


def test_few_enough_to_compile_them_all():
    """A pair of forward and backward takes 15 s on one core, each of the indexer's target 4, the others 1 or 2."""
    assert len([config for config in CLAIMED if "ward" in type(config).__name__]) <= 86
    assert len(CLAIMED) <= 125


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("head_dim", VALUE_DIMS)
def test_every_head_count_has_a_configuration(arch, head_dim):
    for heads in range(1, 257):
        for config in (forward_config(arch, heads, head_dim), backward_config(arch, heads, head_dim)):
            assert config in CLAIMED
            assert config.head_tile in head_tiles(head_dim)
            assert config.shared_bytes <= SHARED_BYTES[arch]
        config = slot_probs_config(arch, heads, head_dim)
        assert config in CLAIMED
        assert config.shared_bytes <= SHARED_BYTES[arch]
        assert 1 <= config.ahead <= config.head_dim // 64  # a copy runs at most one block of slots ahead


def test_few_heads_waste_no_tile():
    assert forward_config(90, 16, 512).head_tile == backward_config(90, 16, 512).head_tile == 16
    assert forward_config(80, 17, 512).head_tile == backward_config(90, 17, 512).head_tile == 32
    assert forward_config(90, 128, 512).head_tile == backward_config(90, 128, 512).head_tile == 64


@pytest.mark.parametrize("head_dim", [512, 576])
def test_hopper_has_a_forward_of_its_own_for_many_heads(head_dim):
    assert {type(forward_config(90, heads, head_dim)) for heads in (17, 32, 64, 96, 256)} == {HopperForwardConfig}
    others = forward_config(90, 16, head_dim), forward_config(90, 64, 256), forward_config(80, 64, head_dim)
    assert {type(config) for config in others} == {ForwardConfig}
    assert forward_config(90, 64, head_dim, block=32).block == 32


def test_a_tile_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(ValueError, match=r"needs \d+ bytes of shared memory; this architecture has 232448"):
        forward_config(90, 64, 576, block=128)
    with pytest.raises(ValueError, match="blocks of 64 slots only; got a block of 32"):
        forward_config(90, 16, 128, block=32, threads=256)
    with pytest.raises(ValueError, match="32, 64 or 128 slots and 128 or 256 threads; got block 48, threads 256"):
        forward_config(90, 64, 512, block=48)


def test_a_tile_that_the_caller_sets_is_honoured():
    config = forward_config(90, 16, 128, block=32, threads=128)
    assert (config.block, config.threads) == (32, 128)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), 80), ((9, 0), 90), ((10, 0), 100), ((8, 6), None), ((10, 3), None), ((12, 0), None)],
)
def test_architecture(capability, expected):
    assert architecture(capability) == expected


def test_sizes_of_a_call_are_in_no_configuration():
    fields = set(ForwardConfig.__dataclass_fields__) | set(BackwardConfig.__dataclass_fields__)
    assert not fields & {"tokens", "queries", "keys", "slots", "batch", "heads", "scale"}


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(64, 512), (16, 512), (24, 576), (80, 576), (64, 128), (8, 64)])
def test_the_sm80_kernels_are_right(monkeypatch, heads, head_dim):
    """Assembled for this GPU: the one way to see the program of SM80, and nearly that of SM100, at work on another."""
    from slattn.backends import tilelang
    from slattn.kernels import build
    from slattn.testing import Case, check

    major, minor = torch.cuda.get_device_capability()
    here = f"sm_{major}{minor}"
    target = build.target
    monkeypatch.setattr(build, "target", lambda arch: target(arch, runs_on=(here,) if here != TARGETS[arch] else ()))
    monkeypatch.setattr(tilelang, "_arch", lambda device: 80)
    build.kernel.cache_clear()
    for lse in (False, True):
        case = Case("sm80", heads=heads, head_dim=head_dim, queries=33, indices="holes", lengths="random", grad_lse=lse)
        for row in check(case, "tilelang", "cuda"):
            assert row.error <= 1.5 * row.budget, row
    build.kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(64, 512), (16, 576)])
def test_another_length_compiles_nothing(heads, head_dim):
    import slattn
    from slattn.kernels.build import kernel

    def step(batch, queries, keys, slots):
        q = torch.randn(batch, queries, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kv = torch.randn(batch, keys, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        indices = torch.randint(keys, (batch, queries, slots), device="cuda", dtype=torch.int32)
        slattn.sparse_attention(q, kv, indices, backend="tilelang").sum().backward()
        return kernel.cache_info().misses

    first = step(1, 48, 48, 64)
    assert [step(1, 129, 129, 64), step(2, 1024, 1024, 160), step(1, 1025, 1400, 2063), step(3, 5, 7, 1)] == [first] * 4
