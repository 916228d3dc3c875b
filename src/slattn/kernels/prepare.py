"""The device program before the backward: delta = <out, grad_out> and the base-2 lse with the sink."""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import PrepareConfig
from slattn.kernels.device import BF16, FP32, LOG2E


def prepare(config: PrepareConfig) -> Any:
    """The program for one configuration.

    Parameters of the program, all contiguous: Out, GradOut [T * H, d_v / 64, 64]; Lse [T * H] (natural, keys only,
    +inf for an empty row); Sink [H] (any length, not read, unless use_sink); Delta, Lse2 and GradSink [T * H]
    (written; GradSink, each query's share of the sink's gradient, only with use_sink); heads H; use_lse, without
    which only Delta is written, whatever the row; use_sink.
    """
    block, threads = config.rows, config.threads
    rows, pieces, sinks = T.dynamic("rows, pieces, sinks")

    @T.prim_func
    def main(
        Out: T.Tensor((rows, pieces, 64), BF16),
        GradOut: T.Tensor((rows, pieces, 64), BF16),
        Lse: T.Tensor((rows,), FP32),
        Sink: T.Tensor((sinks,), FP32),
        Delta: T.Tensor((rows,), FP32),
        Lse2: T.Tensor((rows,), FP32),
        GradSink: T.Tensor((rows,), FP32),
        heads: T.int32,
        use_lse: T.int32,
        use_sink: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, block), threads=threads) as bx:
            product = T.alloc_fragment((block, 64), FP32)
            delta = T.alloc_fragment((block,), FP32)
            sink = T.alloc_fragment((block,), FP32)
            lse = T.alloc_fragment((block,), FP32)
            peak = T.alloc_fragment((block,), FP32)
            lse2 = T.alloc_fragment((block,), FP32)
            T.fill(product, 0)
            for c in T.serial(pieces):
                for i, j in T.Parallel(block, 64):
                    if bx * block + i < rows:
                        product[i, j] += T.cast(Out[bx * block + i, c, j], FP32) * T.cast(
                            GradOut[bx * block + i, c, j], FP32
                        )
            T.reduce_sum(product, delta, dim=1)
            for i in T.Parallel(block):
                if bx * block + i < rows:
                    if use_lse == 0:
                        Delta[bx * block + i] = delta[i]
                    else:
                        lse[i] = Lse[bx * block + i]
                        sink[i] = -T.infinity(FP32)
                        if use_sink != 0:
                            sink[i] = Sink[(bx * block + i) % heads]
                        peak[i] = T.max(lse[i], sink[i])
                        lse2[i] = peak[i] * LOG2E
                        if peak[i] < T.infinity(FP32):
                            lse2[i] += T.log2(T.exp2((lse[i] - peak[i]) * LOG2E) + T.exp2((sink[i] - peak[i]) * LOG2E))
                        Delta[bx * block + i] = T.if_then_else(lse[i] < T.infinity(FP32), delta[i], 0.0)
                        Lse2[bx * block + i] = lse2[i]
                        if use_sink != 0:
                            # exp(sink - lse with sink), written so that neither infinity can meet itself
                            GradSink[bx * block + i] = T.if_then_else(
                                T.max(lse[i], T.abs(sink[i])) < T.infinity(FP32),
                                -delta[i] / (1.0 + T.exp2((lse[i] - sink[i]) * LOG2E)),
                                0.0,
                            )

    return main
