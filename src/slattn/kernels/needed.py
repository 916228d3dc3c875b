"""Which kernels a call needs, and which there are in all. Imports no TileLang, as `slattn.kernels.config`."""

from __future__ import annotations

from slattn.kernels.config import (
    TARGETS,
    VALUE_DIMS,
    CompactConfig,
    Config,
    FinishConfig,
    HopperBackwardConfig,
    PrepareConfig,
    TallyConfig,
    UnitsConfig,
    WeighConfig,
    backward_config,
    forward_config,
    slot_probs_config,
)


def needed(
    arch: int, heads: int, head_dim: int, *, grad_lse: bool = False, deterministic: bool = False
) -> list[Config]:
    """All kernels of a forward and of its backward to every input, the slowest to compile first."""
    backward = backward_config(arch, heads, head_dim, grad_lse=grad_lse, deterministic=deterministic)
    configs: list[Config] = [backward, forward_config(arch, heads, head_dim), PrepareConfig(arch)]
    if isinstance(backward, HopperBackwardConfig):
        configs += [CompactConfig()]
    if deterministic or isinstance(backward, HopperBackwardConfig):
        configs += [FinishConfig(dtype, deterministic, arch) for dtype in ("bfloat16", "float32")]
    if deterministic:
        configs += [TallyConfig(arch), WeighConfig(arch), UnitsConfig(arch)]
    return configs


def claimed() -> list[Config]:
    """Every configuration that calls can ask for, but for the rarer flags: each is compiled by the tests."""
    configs: list[Config] = []
    for arch in TARGETS:
        for head_dim in VALUE_DIMS:
            configs += [forward_config(arch, heads, head_dim) for heads in (16, 32, 64)]
            configs += [backward_config(arch, heads, head_dim) for heads in (16, 32, 64)]
    configs += [forward_config(90, 64, 512, reference_rounding=True, block=block) for block in (None, 32)]
    configs += [forward_config(90, 64, 576, reference_rounding=True)]
    configs += [backward_config(90, 16, 576, grad_lse=True)]
    configs += [backward_config(90, 64, head_dim, lse=False) for head_dim in (512, 576)]
    configs += [backward_config(90, 64, 512, dq=False), backward_config(90, 64, 512, dkv=False)]
    configs += [PrepareConfig(arch) for arch in TARGETS] + [CompactConfig()]
    configs += [FinishConfig(dtype) for dtype in ("bfloat16", "float32")]
    configs += [FinishConfig("float32", True), *(FinishConfig("bfloat16", True, arch) for arch in TARGETS)]
    configs += [backward_config(arch, 16, head_dim, deterministic=True) for arch in TARGETS for head_dim in (128, 576)]
    configs += [HopperBackwardConfig(head_dim, 512, deterministic=True) for head_dim in (512, 576)]
    configs += [kind(arch) for kind in (TallyConfig, WeighConfig, UnitsConfig) for arch in TARGETS]
    configs += [
        slot_probs_config(arch, heads, head_dim) for arch in TARGETS for head_dim in VALUE_DIMS for heads in (64, 128)
    ]
    return list(dict.fromkeys(configs))
