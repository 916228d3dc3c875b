"""The small device programs before the backward's: delta = <out, grad_out> and the base-2 lse with the sink; and, for
Hopper's, the rows of kv that count.
"""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import CompactConfig, PrepareConfig
from slattn.kernels.device import BF16, FP32, INT32
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE
from slattn.problem import LOG2E


def prepare(config: PrepareConfig) -> Any:
    """The program for one configuration.

    Parameters of the program, all contiguous: Out, GradOut [T * H, d_v / 64, 64]; Lse [T * H] (natural, keys only,
    +inf for an empty row); Sink [H] (any length, not read, unless use_sink); Delta, Lse2 and SinkWeight [T * H]
    (written; SinkWeight, what of each row's weight the sink has, only with use_sink); heads H; use_lse, without which
    only Delta is, whatever the row; use_sink; Norm [T * H] (written with use_norm, the sum of |grad_out|); Counts [T]
    and within: of a query with as many slots as that, or more, Hopper's backward makes Delta, and neither Delta nor
    Norm need be written (the largest int32: all are, and Counts, of any length, is not read).
    """
    block, threads = config.rows, config.threads
    rows, pieces, sinks, norms, tokens = T.dynamic("rows, pieces, sinks, norms, tokens")

    @T.prim_func
    def main(
        Out: T.Tensor((rows, pieces, 64), BF16),
        GradOut: T.Tensor((rows, pieces, 64), BF16),
        Lse: T.Tensor((rows,), FP32),
        Sink: T.Tensor((sinks,), FP32),
        Delta: T.Tensor((rows,), FP32),
        Lse2: T.Tensor((rows,), FP32),
        SinkWeight: T.Tensor((rows,), FP32),
        heads: T.int32,
        use_lse: T.int32,
        use_sink: T.int32,
        Norm: T.Tensor((norms,), FP32),
        use_norm: T.int32,
        Counts: T.Tensor((tokens,), INT32),
        within: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, block), threads=threads) as bx:
            least = T.alloc_var(INT32, 0)
            if within < 2**31 - 1:  # then at least as many heads as a block has rows: they are of two queries at most
                least = T.min(Counts[bx * block // heads], Counts[T.min(bx * block + block - 1, rows - 1) // heads])
            norm = T.alloc_fragment((block,), FP32)
            delta = T.alloc_fragment((block,), FP32)
            sink = T.alloc_fragment((block,), FP32)
            lse = T.alloc_fragment((block,), FP32)
            peak = T.alloc_fragment((block,), FP32)
            lse2 = T.alloc_fragment((block,), FP32)
            if least < within:
                product = T.alloc_fragment((block, 64), FP32)
                size = T.alloc_fragment((block, 64), FP32)
                T.fill(product, 0)
                T.fill(size, 0)
                for c in T.serial(pieces):
                    for i, j in T.Parallel(block, 64):
                        if bx * block + i < rows:
                            product[i, j] += T.cast(Out[bx * block + i, c, j], FP32) * T.cast(
                                GradOut[bx * block + i, c, j], FP32
                            )
                            size[i, j] += T.abs(T.cast(GradOut[bx * block + i, c, j], FP32))
                T.reduce_sum(product, delta, dim=1)
                T.reduce_sum(size, norm, dim=1)
            for i in T.Parallel(block):
                if bx * block + i < rows:
                    if least < within:
                        Delta[bx * block + i] = delta[i]
                        if use_norm != 0:
                            Norm[bx * block + i] = norm[i]
                    if use_lse != 0:
                        lse[i] = Lse[bx * block + i]
                        sink[i] = -T.infinity(FP32)
                        if use_sink != 0:
                            sink[i] = Sink[(bx * block + i) % heads]
                        peak[i] = T.max(lse[i], sink[i])
                        lse2[i] = peak[i] * LOG2E
                        if peak[i] < T.infinity(FP32):
                            lse2[i] += T.log2(T.exp2((lse[i] - peak[i]) * LOG2E) + T.exp2((sink[i] - peak[i]) * LOG2E))
                        Lse2[bx * block + i] = lse2[i]
                        if least < within and lse[i] == T.infinity(FP32):
                            Delta[bx * block + i] = 0
                        if use_sink != 0:
                            # exp(sink - lse with sink), written so that neither infinity can meet itself
                            SinkWeight[bx * block + i] = T.if_then_else(
                                T.max(lse[i], T.abs(sink[i])) < T.infinity(FP32),
                                1.0 / (1.0 + T.exp2((lse[i] - sink[i]) * LOG2E)),
                                0.0,
                            )

    return main


def compact(config: CompactConfig) -> Any:
    """The program that lists each query's rows of kv, without holes.

    Parameters of the program, all contiguous: Indices [T, K]; Lengths [T] (any length, not read, unless use_lengths);
    Rows [T, K'] with K' >= 64 and a multiple of 64 that is K or more: (written) the rows that the slots which count
    name, in their order, counted over the whole batch, then -1 up to a multiple of 64 and at least 64; Counts [T]
    (written), how many those are; queries and keys of a batch entry; use_lengths.
    """
    tokens, slots, room, lengths = T.dynamic("tokens, slots, room, lengths")

    @T.prim_func
    def main(
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Rows: T.Tensor((tokens, room), INT32),
        Counts: T.Tensor((tokens,), INT32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
    ):
        warps = config.threads // 32
        with T.Kernel(T.ceildiv(tokens, warps), threads=config.threads, prelude=HOPPER_PRELUDE) as bx:
            t = T.alloc_var(INT32, bx * warps + T.get_thread_binding() // 32)
            count = T.alloc_var(INT32, slots)
            if t < tokens:
                if use_lengths != 0:
                    count = T.min(T.max(Lengths[t], 0), slots)
                T.call_extern(
                    "handle",
                    "slattn::compact_row",
                    T.access_ptr(Indices[t, 0], "r"),
                    count,
                    keys,
                    t // queries * keys,
                    T.access_ptr(Rows[t, 0], "w"),
                    T.access_ptr(Counts[t], "w"),
                )

    return main
