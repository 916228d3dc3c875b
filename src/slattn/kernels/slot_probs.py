"""The device program of the indexer's target: each slot's attention probability, summed over the heads.

One block of threads owns one query. It keeps up to `head_tile` of the query's heads in shared memory and walks over
the row's slots `block` at a time; keys stand on the rows of the product, so that the sum over the heads is one along a
row. More heads than a tile are taken in turns by the same threads, which add to what they wrote: no atomics, and the
same bits in every run.

    every piece of 64 columns      wait for it, multiply it, start copying the piece `ahead` places on
    after a block's last piece     p = exp2(s - lse), sum over the heads, one store a slot

A group of 128 threads copies, multiplies and sums its own 64 slots of a block and meets the other groups only where
the heads change, so that one's exponentials run beside another's products.
"""

from typing import Any

import tilelang.language as T

from slattn.kernels.config import SlotProbsConfig
from slattn.kernels.device import BF16, FP32, INT32
from slattn.problem import LOG2E

GROUP, WARP = 128, 32  # threads
COLUMNS = 64  # of a piece
COPIES = 4  # of 16 bytes that a thread makes of a piece: a warp copies the 16 rows that it multiplies, 4 at a time


def slot_probs(config: SlotProbsConfig) -> Any:
    """The program for one configuration; every size but the tile and the columns is a run-time value.

    Parameters of the program, all contiguous: Q [T, H, D], KV [B * N, D], Indices [T, K], Lengths [T] (any length, not
    read, unless use_lengths), Lse [T, H] (natural, the sink included), Probs [T, K] (written), queries S, keys N,
    use_lengths, scale.
    """
    dim, tile, block, threads = config.head_dim, config.head_tile, config.block, config.threads
    stages, ahead, pieces = config.stages, config.ahead, config.head_dim // COLUMNS
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths = T.dynamic("lengths")

    @T.macro
    def load_slots(slot: Any, indices: Any, t: Any, first_slot: Any, count: Any, tx: Any):
        """slot[r] = the index in the row of a block that this thread's r-th copy goes to, -1 past the row's end."""
        for r in T.unroll(COPIES):
            k = first_slot + tx // WARP * 16 + r * 4 + tx % WARP // 8
            slot[r] = -1
            if k < count:
                slot[r] = indices[t, k]

    @T.macro
    def name_rows(slot: Any, source: Any, first: Any, keys: Any):
        for r in T.unroll(COPIES):
            if slot[r] >= keys:
                slot[r] = -1
            source[r] = first + T.max(slot[r], 0)

    @T.macro
    def copy_piece(kv: Any, ring: Any, stage: Any, source: Any, slot: Any, column: Any, tx: Any):
        """Start copying 64 columns of a block's rows; zeros where a slot does not count, and nothing is read."""
        for r in T.unroll(COPIES):
            T.ptx_cp_async(
                T.access_ptr(ring[stage, tx // WARP * 16 + r * 4 + tx % WARP // 8, tx % 8 * 8], "w", 8),
                T.access_ptr(kv[source[r], column + tx % 8 * 8], "r", 8),
                8,
                slot[r] >= 0,
            )
        T.ptx_commit_group()

    @T.macro
    def copy_heads(q: Any, tile_s: Any, t: Any, h0: Any, tx: Any):
        """Start copying heads h0 and on, zeros past the last one."""
        for r in T.unroll(tile * 8 // threads):
            h = h0 + r * (threads // 8) + tx // 8
            for c in T.unroll(pieces):
                T.ptx_cp_async(
                    T.access_ptr(tile_s[r * (threads // 8) + tx // 8, c * COLUMNS + tx % 8 * 8], "w", 8),
                    T.access_ptr(q[t, T.min(h, heads - 1), c * COLUMNS + tx % 8 * 8], "r", 8),
                    8,
                    h < heads,
                )

    @T.macro
    def multiply(keys: Any, queries: Any, s: Any, clear: Any):
        if config.wgmma:
            T.wgmma_gemm(keys, queries, s, transpose_B=True, clear_accum=clear, policy=T.GemmWarpPolicy.FullRow)
        else:
            T.gemm(keys, queries, s, transpose_B=True, clear_accum=clear, policy=T.GemmWarpPolicy.FullRow)

    @T.prim_func
    def main(
        Q: T.Tensor((tokens, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Lse: T.Tensor((tokens, heads), FP32),
        Probs: T.Tensor((tokens, slots), FP32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(tokens, threads=threads) as t:
            q_s = T.alloc_shared((tile, dim), BF16)
            ring = T.alloc_shared((stages, block, COLUMNS), BF16)
            lse_s = T.alloc_shared((tile,), FP32)
            total_s = T.alloc_shared((block,), FP32)
            s = T.alloc_fragment((block, tile), FP32)
            total = T.alloc_fragment((block,), FP32)
            slot = T.alloc_local((COPIES,), INT32)
            following = T.alloc_local((COPIES,), INT32)
            source = T.alloc_local((COPIES,), INT32)
            count = T.alloc_var(INT32, slots)
            first = T.alloc_var(INT32, t // queries * keys)
            filled = T.alloc_var(INT32)
            used = T.alloc_var(INT32)
            named = T.alloc_var(INT32)  # by the slot whose sum this thread stores
            prior = T.alloc_var(FP32)
            tx = T.get_thread_binding()
            if use_lengths != 0:
                count = T.min(T.max(Lengths[t], 0), slots)
            for part in T.serial(T.ceildiv(slots, threads)):
                k = part * threads + tx
                if k >= T.ceildiv(count, block) * block and k < slots:
                    Probs[t, k] = 0.0

            for group in T.serial(T.ceildiv(heads, tile)):
                h0 = group * tile
                load_slots(slot, Indices, t, 0, count, tx)
                load_slots(following, Indices, t, block, count, tx)
                T.sync_threads()  # the products of the heads before are done
                copy_heads(Q, q_s, t, h0, tx)
                if tx < tile:
                    lse_s[tx] = T.infinity(FP32)
                    if h0 + tx < heads:
                        lse_s[tx] = Lse[t, h0 + tx] * LOG2E
                name_rows(slot, source, first, keys)
                for c in T.unroll(ahead):
                    copy_piece(KV, ring, c, source, slot, c * COLUMNS, tx)
                T.ptx_wait_group(ahead - 1)  # the queries, which came with the first piece
                if config.wgmma:
                    T.fence_proxy_async()
                T.sync_threads()
                used = 0
                filled = ahead
                for b in T.serial(T.ceildiv(count, block)):
                    k = b * block + tx // WARP * 16 + tx % WARP
                    named = -1
                    prior = 0.0
                    if tx % WARP < 16 and k < count:
                        named = Indices[t, k]
                        if group > 0:
                            prior = Probs[t, k]
                    for c in T.serial(pieces):
                        T.ptx_wait_group(ahead - 1)
                        if config.wgmma:
                            T.fence_proxy_async()
                            T.wait_wgmma(0)  # of this group's last piece, whose place is filled next
                        T.sync_threads(1 + tx // GROUP, GROUP)
                        multiply(ring[used, :, :], q_s[:, c * COLUMNS : (c + 1) * COLUMNS], s, c == 0)
                        if c + ahead == pieces:
                            for r in T.unroll(COPIES):
                                slot[r] = following[r]
                            name_rows(slot, source, first, keys)
                            load_slots(following, Indices, t, (b + 2) * block, count, tx)
                        copy_piece(KV, ring, filled, source, slot, (c + ahead) % pieces * COLUMNS, tx)
                        used = T.Select(used + 1 == stages, 0, used + 1)
                        filled = T.Select(filled + 1 == stages, 0, filled + 1)
                    if config.wgmma:
                        T.wait_wgmma(0)
                    for i, j in T.Parallel(block, tile):
                        s[i, j] = T.exp2(s[i, j] * (scale * LOG2E) - lse_s[j])
                    T.reduce_sum(s, total, dim=1)
                    T.copy(total, total_s)
                    T.call_extern("handle", "__syncwarp")  # a warp has whole rows, and stores their sums
                    if tx % WARP < 16 and k < slots:
                        Probs[t, k] = T.Select(
                            named >= 0 and named < keys, prior + total_s[tx // WARP * 16 + tx % WARP], 0.0
                        )
                T.ptx_wait_group(0)

    return main
