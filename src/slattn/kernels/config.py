"""Launch configurations: what a kernel is compiled for, and the shared memory that it takes.

Nothing here imports TileLang, so that every choice can be tested on any machine. Sizes of a call (T, N, B, K, H) are
never part of a configuration: one compiled kernel serves them all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

VALUE_DIMS = {64: 64, 128: 128, 256: 256, 512: 512, 576: 512}  # head dimension -> value dimension
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one block of threads may use
TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled forward kernel: `head_tile` heads a block of threads, `block` slots a step, two key buffers."""

    arch: int
    head_tile: int
    head_dim: int
    value_dim: int
    block: int
    threads: int
    reference_rounding: bool = False

    @property
    def wgmma(self) -> bool:
        """Whether the products run on Hopper's warpgroup instructions, which want 64 rows."""
        return self.arch == 90 and self.head_tile == 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads."""
        numbers = self.head_tile * self.head_dim + 2 * self.block * self.head_dim + self.head_tile * self.block
        return 2 * numbers + 8 * self.block


@dataclass(frozen=True)
class HopperForwardConfig:
    """One compiled Hopper forward kernel: four warpgroups over 64 heads and 64 slots that count a step."""

    head_dim: int
    value_dim: int
    reference_rounding: bool = False
    arch: int = 90
    head_tile: int = 64
    threads: int = 512

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of the group that gathers keys, of the one that scores, of the two that multiply."""
        return 32, 160, 160

    @property
    def held(self) -> int:
        """Columns of Q that the scorer holds in registers: 96 of a thread's."""
        return 384

    @property
    def key_buffers(self) -> tuple[int, int]:
        """Buffers of the keys' left half, with the columns that only scores need, and of the right half."""
        return (3, 3) if self.head_dim == self.value_dim else (3, 2)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads: keys, the rest of Q, P twice, inverse sums, slots that wait.

        Barriers and what groups tell one another of a block are in static memory, 752 bytes of the 1024 before the
        tiles' alignment.
        """
        left, right = self.key_buffers
        columns = left * (self.head_dim - self.value_dim // 2) + right * self.value_dim // 2
        return 2 * 64 * (columns + self.head_dim - self.held + 2 * 64) + 4 * (2 * 64 + 256)


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled backward kernel. `grad_lse`: a gradient of lse comes in. dq, dkv: which gradients it computes.

    `deterministic`: dkv is summed in integers (`slattn.kernels.exact_cuda`).
    """

    arch: int
    head_tile: int
    head_dim: int
    value_dim: int
    threads: int
    grad_lse: bool = False
    dq: bool = True
    dkv: bool = True
    deterministic: bool = False
    block: int = 64  # the reductions are written for 4 warps of 16 rows

    @property
    def wgmma(self) -> bool:
        """Whether the products run on Hopper's warpgroup instructions: the 64 keys of a block are their rows."""
        return self.arch == 90

    @property
    def chunk(self) -> int:
        """Columns of dkv formed at a time: 64 for each group of 4 warps, as far as the row has them."""
        return min(64 * (self.threads // 128), self.value_dim)

    @property
    def query_parts(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of the pieces of dQ^T, whose rows the warps share evenly."""
        if self.head_dim % (self.threads // 2) == 0:
            return ((0, self.head_dim),)
        return (0, self.value_dim), (self.value_dim, self.head_dim - self.value_dim)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads."""
        numbers = self.head_tile * (self.head_dim + self.value_dim) + self.block * (self.head_dim + 2 * self.head_tile)
        return 2 * numbers + 8 * self.block + 16 * self.head_tile


@dataclass(frozen=True)
class HopperBackwardConfig:
    """One compiled Hopper backward kernel: four warpgroups over 64 heads and 64 slots a step, both gradients.

    `deterministic`: dkv is summed in integers (`slattn.kernels.exact_cuda`).
    """

    head_dim: int
    value_dim: int
    deterministic: bool = False
    arch: int = 90
    head_tile: int = 64

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of the gatherer, the front and a back group; the four groups have 512 to share."""
        return (32, 160, 160) if self.head_dim == self.value_dim else (24, 168, 160)

    @property
    def score_buffers(self) -> int:
        """Buffers of P and dS: two where the columns leave room for them, so that the front may run a block ahead."""
        return 2 if self.head_dim == self.value_dim else 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads: Q, dO, a block of keys, P and dS, and what heads have.

        Rows and barriers are in static memory, at most 952 bytes of the 1024 before the tiles' alignment.
        """
        numbers = 64 * (2 * self.head_dim + self.value_dim) + self.score_buffers * 2 * 64 * 64
        return 2 * numbers + 24 * 64


@dataclass(frozen=True)
class PrepareConfig:
    """One compiled kernel that makes delta and the base-2 lse out of a forward's results."""

    arch: int
    rows: int = 16
    threads: int = 128


@dataclass(frozen=True)
class SlotProbsConfig:
    """One compiled kernel of the indexer's target: key pieces of `block` slots and 64 columns, `ahead` on their way."""

    arch: int
    head_tile: int
    head_dim: int
    ahead: int
    block: int = 128

    @property
    def threads(self) -> int:
        """128 for each 64 slots of a block."""
        return 2 * self.block

    @property
    def stages(self) -> int:
        """Pieces that there is room for: one is being multiplied."""
        return self.ahead + 1

    @property
    def wgmma(self) -> bool:
        """Whether the products run on Hopper's warpgroup instructions: 64 slots are their rows."""
        return self.arch == 90

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads."""
        numbers = self.head_tile * self.head_dim + self.stages * self.block * 64
        return 2 * numbers + 4 * (self.head_tile + self.block)


@dataclass(frozen=True)
class CompactConfig:
    """One compiled kernel that lists the rows of kv that each query's slots name, a warp a query."""

    arch: int = 90
    threads: int = 128


@dataclass(frozen=True)
class _WindowConfig:
    """A kernel whose blocks of threads have `window` rows of dkv each, in `TABLES` tables of shared memory."""

    TABLES: ClassVar[int]

    arch: int
    window: int = 16384
    threads: int = 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block of threads."""
        return 4 * self.TABLES * self.window


class TallyConfig(_WindowConfig):
    """One compiled kernel that notes how much a backward adds to each row of dkv, and of what size."""

    TABLES = 2


class WeighConfig(_WindowConfig):
    """One compiled kernel that sums what is expected of the parts of each row of dkv."""

    TABLES = 1


@dataclass(frozen=True)
class UnitsConfig:
    """One compiled kernel that makes each row's unit of that, a thread a row."""

    arch: int
    threads: int = 128


@dataclass(frozen=True)
class FinishConfig:
    """One compiled kernel that takes dkv out of the table that a backward leaves, in `dtype`."""

    dtype: str
    deterministic: bool = False
    arch: int = 90
    threads: int = 128


Config = (
    ForwardConfig
    | HopperForwardConfig
    | BackwardConfig
    | HopperBackwardConfig
    | PrepareConfig
    | CompactConfig
    | FinishConfig
    | TallyConfig
    | WeighConfig
    | UnitsConfig
    | SlotProbsConfig
)


def architecture(capability: tuple[int, int]) -> int | None:
    """The architecture whose kernels a device of this compute capability runs; None where there are none."""
    return {(8, 0): 80, (9, 0): 90, (10, 0): 100}.get(capability)


def head_tiles(head_dim: int) -> tuple[int, ...]:
    """Heads that one block of threads may take. Below D = 512 a tile of 32 would gain too little over one of 64."""
    return (64, 32, 16) if head_dim >= 512 else (64, 16)


@functools.cache
def forward_config(
    arch: int,
    heads: int,
    head_dim: int,
    *,
    reference_rounding: bool = False,
    block: int | None = None,
    threads: int | None = None,
) -> ForwardConfig | HopperForwardConfig:
    """The forward's configuration for a head count; `block` and `threads` where the caller fixes them.

    On Hopper its own kernel where it is written for the call and the caller fixes nothing: at 32 heads too, half of
    whose rows are then nobody's, it takes 0.65 of the portable kernel's time.

    Raises:
        ValueError: a block or a number of threads that no kernel of this architecture can have.
    """
    tile = next((tile for tile in reversed(head_tiles(head_dim)) if heads <= tile), 64)
    if arch == 90 and tile >= 32 and head_dim >= 512 and block is None and threads is None:
        return HopperForwardConfig(head_dim, VALUE_DIMS[head_dim], reference_rounding)
    config = ForwardConfig(
        arch=arch,
        head_tile=tile,
        head_dim=head_dim,
        value_dim=VALUE_DIMS[head_dim],
        block=64 if block is None else block,
        threads=(128 if tile == 16 or head_dim < 256 else 256) if threads is None else threads,
        reference_rounding=reference_rounding,
    )
    if block is None and config.shared_bytes > SHARED_BYTES[arch]:
        config = replace(config, block=32)
    if config.block not in (32, 64, 128) or config.threads not in (128, 256):
        raise ValueError(
            f"the forward kernel takes a block of 32, 64 or 128 slots and 128 or 256 threads; "
            f"got block {config.block}, threads {config.threads}"
        )
    if tile == 16 and config.threads == 256 and config.block != 64:
        raise ValueError(f"256 threads share 16 heads in blocks of 64 slots only; got a block of {config.block}")
    if config.shared_bytes > SHARED_BYTES[arch]:
        raise ValueError(
            f"a block of {config.block} slots at {heads} heads of {head_dim} needs {config.shared_bytes} bytes of "
            f"shared memory; this architecture has {SHARED_BYTES[arch]}"
        )
    return config


def backward_config(
    arch: int,
    heads: int,
    head_dim: int,
    *,
    grad_lse: bool = False,
    dq: bool = True,
    dkv: bool = True,
    deterministic: bool = False,
    lse: bool = True,
) -> BackwardConfig | HopperBackwardConfig:
    """The backward's configuration for a head count. `lse`: the one over the keys alone is at hand.

    On Hopper its own kernel where it is written for the call, faster than the portable one at every shape measured
    (docs/performance.md). Elsewhere the widest head tile that covers the heads and fits.
    """
    deterministic = deterministic and dkv
    widest = next((tile for tile in reversed(head_tiles(head_dim)) if heads <= tile), 64)
    if arch == 90 and widest == 64 and head_dim >= 512 and dq and dkv and lse:
        return HopperBackwardConfig(head_dim, VALUE_DIMS[head_dim], deterministic)
    value_dim, flags = VALUE_DIMS[head_dim], {"grad_lse": grad_lse, "dq": dq, "dkv": dkv}
    for tile in (tile for tile in head_tiles(head_dim) if tile <= widest):
        threads = 128 if tile == 16 or head_dim < 256 else 256
        config = BackwardConfig(arch, tile, head_dim, value_dim, threads, **flags, deterministic=deterministic)
        if config.shared_bytes <= SHARED_BYTES[arch]:
            break
    return config


def slot_probs_config(arch: int, heads: int, head_dim: int) -> SlotProbsConfig:
    """The configuration of the indexer's target for a head count.

    128 heads at once where the model has them: 2.393 ms at v32, against 3.47 for two passes of 64. With 64, two blocks
    of threads on a multiprocessor, so that one starts a query while the other multiplies: 0.471 ms at v4-flash against
    0.556 for one block with 8 pieces on their way; where pieces of 128 slots leave no room for that, of 64.
    """
    whole = SHARED_BYTES[arch]
    half = (whole - 1024) // 2  # each block of threads takes 1 KB more than it asks for
    tile, rooms = 64, [(half, 128), (half, 64), (whole, 128)]
    if arch == 90 and heads > 64 and head_dim >= 512:
        tile, rooms = 128, [(whole, 128)]
    for room, block in rooms:
        least = SlotProbsConfig(arch, tile, head_dim, ahead=0, block=block)
        ahead = (room - least.shared_bytes) // (2 * block * 64)
        if ahead >= 2:
            break
    return replace(least, ahead=min(ahead, head_dim // 64))  # the program copies one block of slots ahead at most
