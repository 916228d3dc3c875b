"""The small device programs of deterministic mode, before the backward: the units that each row of dkv is summed in."""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import TallyConfig, UnitsConfig, WeighConfig
from slattn.kernels.device import FP32, INT32
from slattn.kernels.exact_cuda import EXACT_PRELUDE


def _place(bx: Any, by: Any, share: Any, tokens: Any, window: int, rows: Any) -> tuple[Any, ...]:
    """A block's share of the queries, from and to, and its window of the rows: the first, how many, and of how many."""
    return bx * share, T.min(bx * share + share, tokens), T.cast(by, "int64") * window, window, T.cast(rows, "int64")


def tally(config: TallyConfig) -> Any:
    """The program that notes how much is added to each row of dkv, and of what size (`tally` in exact_cuda).

    Parameters of the program, all contiguous: Indices [T, K]; Lengths [T] (any length, not read, unless use_lengths);
    Norm [T, H], the sum of |dO| over the columns, fp32; Lse (natural, keys only) and Lse2 (base 2, with the sink)
    [T, H]; LsePart [T, H], what the gradient of lse adds of q to a slot with all of the weight (read with use_lse_part
    only); Expected [T] (written); Size and Parts [B * N] int32, zeros before (written: the bits of the largest
    expected, and a number); queries and keys of a batch entry; use_lengths; use_lse_part; columns d_v; groups of heads;
    shares, among which the queries are divided.
    """
    window = config.window
    tokens, slots, heads, rows, lengths = T.dynamic("tokens, slots, heads, rows, lengths")

    @T.prim_func
    def main(
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Norm: T.Tensor((tokens, heads), FP32),
        Lse: T.Tensor((tokens, heads), FP32),
        Lse2: T.Tensor((tokens, heads), FP32),
        LsePart: T.Tensor((tokens, heads), FP32),
        Expected: T.Tensor((tokens,), FP32),
        Size: T.Tensor((rows,), INT32),
        Parts: T.Tensor((rows,), INT32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        use_lse_part: T.int32,
        columns: T.int32,
        groups: T.int32,
        shares: T.int32,
    ):
        with T.Kernel(shares, T.ceildiv(rows, window), threads=config.threads, prelude=EXACT_PRELUDE) as (bx, by):
            noted = T.alloc_shared((2, window), INT32)
            share = T.alloc_var(INT32, T.ceildiv(tokens, shares))
            T.call_extern(
                "handle",
                "slattn::tally",
                T.access_ptr(Indices, "r"),
                T.access_ptr(Lengths, "r"),
                T.access_ptr(Norm, "r"),
                T.access_ptr(Lse, "r"),
                T.access_ptr(Lse2, "r"),
                T.access_ptr(LsePart, "r"),
                T.access_ptr(Expected, "rw"),
                T.access_ptr(Size, "rw"),
                T.access_ptr(Parts, "rw"),
                T.access_ptr(noted, "rw"),
                *_place(bx, by, share, tokens, window, rows),
                slots,
                heads,
                queries,
                keys,
                use_lengths != 0,
                use_lse_part != 0,
                columns,
                groups,
            )

    return main


def weigh(config: WeighConfig) -> Any:
    """The program that sums what is expected of each row's parts (`weigh` in exact_cuda).

    Parameters of the program: as `tally`'s, but of its results Expected and Size are read, and Weight [B * N] int64,
    zeros before, is written.
    """
    window = config.window
    tokens, slots, rows, lengths = T.dynamic("tokens, slots, rows, lengths")

    @T.prim_func
    def main(
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Expected: T.Tensor((tokens,), FP32),
        Size: T.Tensor((rows,), INT32),
        Weight: T.Tensor((rows,), "int64"),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        groups: T.int32,
        shares: T.int32,
    ):
        with T.Kernel(shares, T.ceildiv(rows, window), threads=config.threads, prelude=EXACT_PRELUDE) as (bx, by):
            noted = T.alloc_shared((window,), INT32)
            share = T.alloc_var(INT32, T.ceildiv(tokens, shares))
            T.call_extern(
                "handle",
                "slattn::weigh",
                T.access_ptr(Indices, "r"),
                T.access_ptr(Lengths, "r"),
                T.access_ptr(Expected, "r"),
                T.access_ptr(Size, "r"),
                T.access_ptr(Weight, "rw"),
                T.access_ptr(noted, "rw"),
                *_place(bx, by, share, tokens, window, rows),
                slots,
                queries,
                keys,
                use_lengths != 0,
                groups,
            )

    return main


def units(config: UnitsConfig) -> Any:
    """The program of each row's scale: Size and Parts [N] int32 and Weight [N] int64 in, Scales [N] fp32 out."""
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        Size: T.Tensor((rows,), INT32),
        Weight: T.Tensor((rows,), "int64"),
        Parts: T.Tensor((rows,), INT32),
        Scales: T.Tensor((rows,), FP32),
    ):
        with T.Kernel(T.ceildiv(rows, config.threads), threads=config.threads, prelude=EXACT_PRELUDE) as bx:
            n = T.alloc_var(INT32, bx * config.threads + T.get_thread_binding())
            if n < rows:
                Scales[n] = T.call_extern(FP32, "slattn::unit_of", Size[n], Weight[n], Parts[n])

    return main
