"""The backward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

Three warpgroups share a query's 64 heads. The front gathers the keys of a block of 64 slots, forms S and dP as their
columns land, and leaves P and dS in shared memory; the two back groups each hold half of the columns: first of dQ, in
registers over the whole row, then of dKV, 64 columns at a time, reduced into the fp32 dkv straight from registers.

    front     | gather b+1, S, dP, softmax of b+1        | gather b+2 ...
    back      | dQ b | dKV b: 4 chunks, each reduced     | dQ b+1 | ...

The reductions are the limit (docs/performance.md), so everything else is arranged to run behind them: dQ comes first
and releases the key buffer, P and dS have two buffers, and a query's Q and dO are replaced piece by piece while the
last block's chunks still go out.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import HopperBackwardConfig
from slattn.kernels.device import BF16, FP32, INT32, LOG2E, PRELUDE, load_slots, reduce_rows

GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
HEADS, BLOCK = 64, 64
PIECE = 128  # columns of dKV formed at a time, 64 by each back group


def hopper_backward(config: HopperBackwardConfig) -> Any:
    """The program; its parameters are those of `slattn.kernels.backward.backward`, the last two replaced by sms, the
    number of blocks of threads to launch, which share the queries.
    """
    dim, pieces = config.head_dim, config.head_dim // PIECE
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths = T.dynamic("lengths")
    every_piece = tuple(range(pieces))  # a Python loop: its body is written out for each

    @T.macro
    def arrive(barriers: Any, index: Any):
        """Arrive once for the whole warp, after all that its lanes did."""
        T.call_extern("handle", "__syncwarp")
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(barriers[index])

    @T.macro
    def load_query(g: Any, m: Any, c: int, t: Any, h0: Any, turn: Any):
        """Start loading piece `c` of the columns of Q and dO, once the last query's is no longer read."""
        T.barrier_wait(m.query_free[c], turn % 2 ^ 1)
        T.tma_copy(
            g.q[t, h0 : h0 + HEADS, c * PIECE : c * PIECE + PIECE],
            m.q[:, c * PIECE : c * PIECE + PIECE],
            barrier=m.query_full[c],
        )
        T.tma_copy(
            g.grad_out[t, h0 : h0 + HEADS, c * PIECE : c * PIECE + PIECE],
            m.do[:, c * PIECE : c * PIECE + PIECE],
            barrier=m.query_full[c],
        )
        arrive(m.query_full, c)

    @T.macro
    def front(g: Any, m: Any):
        slot = T.alloc_local((BLOCK * 8 // GROUP,), INT32)
        source = T.alloc_local((BLOCK * 8 // GROUP,), "int64")
        s = T.alloc_fragment((HEADS, BLOCK), FP32)
        dp = T.alloc_fragment((HEADS, BLOCK), FP32)
        lse = T.alloc_fragment((HEADS,), FP32)
        delta = T.alloc_fragment((HEADS,), FP32)
        step = T.alloc_var(INT32, 0)
        turn = T.alloc_var(INT32, 0)
        tx = T.get_thread_binding()
        for task in T.serial(g.tasks):
            t = T.alloc_var(INT32, (g.bx + task * g.sms) // g.groups)
            h0 = T.alloc_var(INT32, (g.bx + task * g.sms) % g.groups * HEADS)
            first = T.alloc_var(INT32, t // g.queries * g.keys)
            count = T.alloc_var(INT32, slots)
            if g.use_lengths != 0:
                count = T.min(T.max(g.lengths[t], 0), slots)
            load_slots(slot, g.indices, t, 0, count, tx, GROUP)
            for h in T.Parallel(HEADS):
                lse[h] = T.if_then_else(h0 + h < heads, g.lse2[t, h0 + h], T.infinity(FP32))
                delta[h] = T.if_then_else(h0 + h < heads, g.delta[t, h0 + h] * g.scale, 0.0)
            for b in T.serial(T.max(T.ceildiv(count, BLOCK), 1)):
                for r in T.unroll(4):
                    if slot[r] >= g.keys or slot[r] < 0:
                        slot[r] = -1
                    source[r] = T.cast(first + T.max(slot[r], 0), "int64") * dim + tx % 8 * 8
                T.barrier_wait(m.key_free, step % 2 ^ 1)
                for r in T.unroll(4):
                    if tx % 8 == 0:
                        m.rows[step % 2, r * 16 + tx // 8] = slot[r]
                for c in every_piece:
                    for r in T.unroll(4):
                        T.call_extern(
                            "handle",
                            f"slattn::copy_row<{PIECE // 64}>",
                            T.access_ptr(m.kv, "w"),
                            T.call_extern("handle", "slattn::at", T.access_ptr(g.kv, "r"), source[r]),
                            r * 16 + tx // 8,
                            tx % 8,
                            c * (PIECE // 64),
                            slot[r] >= 0,
                        )
                    T.ptx_commit_group()
                load_slots(slot, g.indices, t, b + 1, count, tx, GROUP)
                if b == 0:
                    load_query(g, m, 0, t, h0, turn)
                for c in every_piece:
                    T.ptx_wait_group(pieces - 1 - c)
                    T.fence_proxy_async()
                    T.sync_threads(1, GROUP)
                    if b == 0:
                        if c + 1 < pieces:
                            load_query(g, m, c + 1, t, h0, turn)
                        T.barrier_wait(m.query_full[c], turn % 2)
                    for source, score in ((m.q, s), (m.do, dp)):
                        T.wgmma_gemm(
                            source[:, c * PIECE : c * PIECE + PIECE],
                            m.kv[:, c * PIECE : c * PIECE + PIECE],
                            score,
                            transpose_B=True,
                            clear_accum=c == 0,
                        )
                T.wait_wgmma(0)
                for i, j in T.Parallel(HEADS, BLOCK):
                    s[i, j] = T.exp2(T.min(s[i, j] * (g.scale * LOG2E) - lse[i], 0.0))
                    dp[i, j] = s[i, j] * (dp[i, j] * g.scale - delta[i])
                    s[i, j] = T.Select(m.rows[step % 2, j] >= 0, s[i, j], 0.0)
                    dp[i, j] = T.Select(m.rows[step % 2, j] >= 0, dp[i, j], 0.0)
                T.copy(s, m.p[step % 2, :, :])
                T.copy(dp, m.ds[step % 2, :, :])
                T.fence_proxy_async()
                arrive(m.scores_full, 0)
                step += 1
            turn += 1

    @T.macro
    def chunk(m: Any, dkv: Any, buffer: Any, column: Any):
        """Issue dkv = P^T dO + dS^T Q for 64 columns."""
        T.wgmma_gemm(m.p[buffer, :, :], m.do[:, column : column + 64], dkv, transpose_A=True, clear_accum=True)
        T.wgmma_gemm(m.ds[buffer, :, :], m.q[:, column : column + 64], dkv, transpose_A=True)

    @T.macro
    def back(g: Any, m: Any, group: int):
        """One back group: its half of the columns of every piece, and of dQ.

        The second group forms its first chunk before its dQ, so that reductions go out while the first forms dQ.
        """
        dq = T.alloc_fragment((HEADS, dim // 2), FP32)
        dkv = T.alloc_fragment((BLOCK, 64), FP32)
        step = T.alloc_var(INT32, 0)
        for task in T.serial(g.tasks):
            t = T.alloc_var(INT32, (g.bx + task * g.sms) // g.groups)
            h0 = T.alloc_var(INT32, (g.bx + task * g.sms) % g.groups * HEADS)
            first = T.alloc_var(INT32, t // g.queries * g.keys)
            count = T.alloc_var(INT32, slots)
            if g.use_lengths != 0:
                count = T.min(T.max(g.lengths[t], 0), slots)
            for b in T.serial(T.max(T.ceildiv(count, BLOCK), 1)):
                T.barrier_wait(m.scores_full, step % 2)
                for c in every_piece:
                    if c == group:
                        T.wgmma_gemm(
                            m.ds[step % 2, :, :],
                            m.kv[:, group * (dim // 2) : (group + 1) * (dim // 2)],
                            dq,
                            clear_accum=b == 0,
                        )
                    chunk(m, dkv, step % 2, c * PIECE + group * 64)
                    if c == group:
                        T.wait_wgmma(2)
                        arrive(m.key_free, 0)
                        if (b + 1) * BLOCK >= count:
                            T.call_extern(
                                "handle",
                                f"slattn::store_rows<{dim // 2}>",
                                dq.data,
                                T.access_ptr(g.grad_q[t, h0, group * (dim // 2)], "w"),
                                heads - h0,
                                dim,
                            )
                    T.wait_wgmma(0)
                    if (b + 1) * BLOCK >= count:
                        arrive(m.query_free, c)
                    reduce_rows(dkv, g.grad_kv, m.rows, step % 2, first, c * PIECE + group * 64)
                step += 1

    @T.prim_func
    def main(
        Q: T.Tensor((tokens, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        GradOut: T.Tensor((tokens, heads, dim), BF16),
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Lse2: T.Tensor((tokens, heads), FP32),
        Delta: T.Tensor((tokens, heads), FP32),
        GradQ: T.Tensor((tokens, heads, dim), BF16),
        GradKV: T.Tensor((rows, dim), FP32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        scale: T.float32,
        sms: T.int32,
    ):
        with T.Kernel(sms, threads=3 * GROUP, prelude=PRELUDE) as bx:
            groups = T.alloc_var(INT32, T.ceildiv(heads, HEADS))
            g = SimpleNamespace(
                q=Q,
                kv=KV,
                grad_out=GradOut,
                indices=Indices,
                lengths=Lengths,
                lse2=Lse2,
                delta=Delta,
                grad_q=GradQ,
                grad_kv=GradKV,
                queries=queries,
                keys=keys,
                use_lengths=use_lengths,
                scale=scale,
                sms=sms,
                bx=bx,
                groups=groups,
                tasks=T.ceildiv(tokens * groups - bx, sms),
            )
            m = SimpleNamespace(
                q=T.alloc_shared((HEADS, dim), BF16),
                do=T.alloc_shared((HEADS, dim), BF16),
                kv=T.alloc_shared((BLOCK, dim), BF16),
                p=T.alloc_shared((2, HEADS, BLOCK), BF16),
                ds=T.alloc_shared((2, HEADS, BLOCK), BF16),
                rows=T.alloc_shared((2, BLOCK), INT32),
                key_free=T.alloc_barrier(2 * WARPS),
                scores_full=T.alloc_barrier(WARPS),
                query_full=T.alloc_barrier([WARPS] * pieces),
                query_free=T.alloc_barrier([2 * WARPS] * pieces),
            )
            tx = T.get_thread_binding()
            if tx < GROUP:
                T.set_max_nreg(config.front_registers, 0)
                front(g, m)
            elif tx < 2 * GROUP:
                T.set_max_nreg(config.back_registers, 1)
                back(g, m, 0)
            else:
                T.set_max_nreg(config.back_registers, 1)
                back(g, m, 1)

    return main
