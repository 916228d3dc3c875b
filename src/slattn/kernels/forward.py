"""The forward device program, portable from SM80 on.

One block of threads owns one query and `head_tile` of its heads, and walks over the row's slots `block` at a time
with an online softmax. Key rows arrive by cp.async into two buffers in turn, so that the gather of the next block
runs behind both products of this one. Slots that do not count are not loaded: their rows of the tile are zeros.
"""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import ForwardConfig
from slattn.kernels.device import (
    BF16,
    FP32,
    GRID_TOKENS,
    INT32,
    gather_rows,
    grid,
    load_heads,
    load_slots,
    publish,
    store_heads,
)
from slattn.problem import LOG2E


def forward(config: ForwardConfig) -> Any:
    """The program for one configuration; every size but the tile and the columns is a run-time value.

    Parameters of the program, all contiguous: Q [T, H, D], KV [B * N, D], Indices [T, K], Lengths [T] (any length,
    not read, unless use_lengths), Sink [H] (likewise, unless use_sink), Out [T, H, d_v] and Lse [T, H] (written;
    natural logarithm, keys only, +inf for an empty row), queries S, keys N, use_lengths, use_sink, scale.
    """
    head_tile, block, threads = config.head_tile, config.block, config.threads
    dim, value_dim, natural = config.head_dim, config.value_dim, config.reference_rounding
    base = 1.0 if natural else LOG2E  # logits are kept times this, so that an exponential is one instruction
    exp = T.exp if natural else T.exp2
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths, sinks = T.dynamic("lengths, sinks")

    @T.prim_func
    def main(
        Q: T.Tensor((tokens, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Sink: T.Tensor((sinks,), FP32),
        Out: T.Tensor((tokens, heads, value_dim), BF16),
        Lse: T.Tensor((tokens, heads), FP32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        use_sink: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(*grid(tokens, heads, head_tile), threads=threads) as (bx, by, bz):
            q_s = T.alloc_shared((head_tile, dim), BF16)
            kv_s = T.alloc_shared((2, block, dim), BF16)
            p_s = T.alloc_shared((head_tile, block), BF16)
            row_s = T.alloc_shared((2, block), INT32)
            s = T.alloc_fragment((head_tile, block), FP32)
            weights = T.alloc_fragment((head_tile, block), FP32)
            acc = T.alloc_fragment((head_tile, value_dim), FP32)
            top = T.alloc_fragment((head_tile,), FP32)
            last_top = T.alloc_fragment((head_tile,), FP32)
            rescale = T.alloc_fragment((head_tile,), FP32)
            total = T.alloc_fragment((head_tile,), FP32)
            slot = T.alloc_local((block * 8 // threads,), INT32)
            count = T.alloc_var(INT32, slots)
            t = T.alloc_var(INT32, bz * GRID_TOKENS + by)
            h0 = T.alloc_var(INT32, bx * head_tile)
            first = T.alloc_var(INT32)

            tx = T.get_thread_binding()
            if t < tokens:
                first = t // queries * keys
                if use_lengths != 0:
                    count = T.min(T.max(Lengths[t], 0), slots)

                load_slots(slot, Indices, t, 0, count, tx, threads)
                gather_rows(slot, KV, kv_s, row_s, 0, first, keys, tx, threads)
                load_slots(slot, Indices, t, 1, count, tx, threads)
                load_heads(Q, q_s, t, h0, heads)
                T.fill(acc, 0)
                T.fill(weights, 0)
                T.fill(top, -1e30 if natural else -3.4028234e38)  # finite, so that no infinity meets itself

                for b in T.serial(T.ceildiv(count, block)):
                    T.ptx_wait_group(0)
                    publish(config.wgmma)
                    gather_rows(slot, KV, kv_s, row_s, (b + 1) % 2, first, keys, tx, threads)
                    load_slots(slot, Indices, t, b + 2, count, tx, threads)
                    T.gemm(
                        q_s, kv_s[b % 2, :, :], s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
                    )
                    for i, j in T.Parallel(head_tile, block):
                        s[i, j] = T.if_then_else(row_s[b % 2, j] >= 0, s[i, j] * (scale * base), -T.infinity(FP32))
                    T.copy(top, last_top)
                    T.reduce_max(s, top, dim=1, clear=False)
                    for i in T.Parallel(head_tile):
                        rescale[i] = exp(last_top[i] - top[i])
                    for i, j in T.Parallel(head_tile, block):
                        s[i, j] = exp(s[i, j] - top[i])
                        weights[i, j] = weights[i, j] * rescale[i] + s[i, j]
                    T.copy(s, p_s)
                    for i, j in T.Parallel(head_tile, value_dim):
                        acc[i, j] *= rescale[i]
                    publish(config.wgmma)
                    T.gemm(p_s, kv_s[b % 2, :, 0:value_dim], acc, policy=T.GemmWarpPolicy.FullRow)

                T.ptx_wait_group(0)
                T.reduce_sum(weights, total, dim=1)
                for i in T.Parallel(head_tile):
                    if h0 + i < heads:
                        Lse[t, h0 + i] = T.if_then_else(
                            total[i] == 0.0, T.infinity(FP32), (top[i] * (LOG2E / base) + T.log2(total[i])) / LOG2E
                        )
                    if total[i] > 0.0:
                        if use_sink != 0 and h0 + i < heads:
                            total[i] += exp(Sink[h0 + i] * base - top[i])
                        total[i] = 1.0 / total[i]
                for i, j in T.Parallel(head_tile, value_dim):
                    acc[i, j] *= total[i]
                T.sync_threads()
                T.copy(acc, q_s[:, 0:value_dim])
                T.sync_threads()
                store_heads(q_s, Out, t, h0, heads, value_dim)

    return main
