"""The forward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

All that an SM computes is one stream of blocks of 64 keys, query after query. Three warpgroups walk along it:

- the gatherer finds the slots of a row that count, 256 at a time, and copies the keys they name into two buffers in
  turn, a block for each scorer, running ahead into the next query's;
- two scorers share the output's columns, half each. Each scores every other block and makes its P, multiplies it from
  registers with its half of the columns, and the other's P, from shared memory, with its half of the other's buffer.
  The other's P comes between the halves of the score: by then it is there, and half a buffer of keys is free early.

    scorer 0  | S 0, left | P-1 V-1 | S 0, right | softmax 0 | P0 V0 | S 2, left | P1 V1 | S 2, right | softmax 2 ...
    scorer 1              | S 1, left |                      | P0 V0 | S 1, right | softmax 1 | P1 V1 | S 3, left ...

Blocks take turns over the whole stream, not within a query, so that an odd number of them costs nothing. Both halves
of the output meet the blocks in their order and the sums of even and odd blocks are added once, so that the bits do not
depend on which scorer has which block.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import HopperForwardConfig
from slattn.kernels.device import BF16, FP32, INT32, LOG2E
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE
from slattn.kernels.hopper_device import FORWARD_PRELUDE

GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
HEADS, BLOCK = 64, 64
STRETCH, RING = 256, 512  # slots looked at in one go, and how many that count can wait
FRESH, LAST, LEAVING = 1, 2, 4  # flags of a block: its query's first, its last, the last its scorer has of the query


def hopper_forward(config: HopperForwardConfig) -> Any:
    """The program; its parameters are those of `slattn.kernels.forward.forward`, followed by sms, the number of blocks
    of threads to launch, which share the queries.
    """
    dim, value_dim, natural = config.head_dim, config.value_dim, config.reference_rounding
    half = value_dim // 2
    tail = dim - value_dim  # columns that only S needs; P takes their place in shared memory afterwards
    flag = "true" if natural else "false"
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths, sinks = T.dynamic("lengths, sinks")
    pieces = (0, half), (half, dim)  # columns of a key that arrive together

    @T.macro
    def arrive(barriers: Any, index: Any):
        """Arrive once for the whole warp, after all that its lanes did."""
        T.call_extern("handle", "__syncwarp")
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(barriers[index])

    @T.macro
    def look(g: Any, slot: Any, length: Any, task: Any, start: Any):
        """Load a stretch of slots, and how many of its row count; with its first, bring the row into the L2."""
        tx = T.get_thread_binding()
        t = T.alloc_var(INT32, (g.bx + task * g.sms) // g.groups)
        if start == 0 and t < tokens and tx * 32 < slots:
            T.call_extern("handle", "slattn::prefetch", T.access_ptr(g.indices[t, tx * 32], "r"))
        for i in T.unroll(STRETCH // 32):
            k = T.alloc_var(INT32, start + i * 32 + tx % 32)
            slot[i] = -1
            if t < tokens and k < slots:
                slot[i] = g.indices[t, k]
        length[0] = slots
        if t < tokens and g.use_lengths != 0:
            length[0] = g.lengths[t]

    @T.macro
    def copy_piece(g: Any, m: Any, source: Any, left: Any, buffer: Any, c: int):
        """Start copying this thread's share of piece `c` of a block's keys; its barrier hears when they are there."""
        tx = T.get_thread_binding()
        for r in T.unroll(4):
            T.call_extern(
                "handle",
                f"slattn::copy_row<{(pieces[c][1] - pieces[c][0]) // 64}>",
                T.access_ptr(m.kv[buffer, 0, 0], "w", BLOCK * dim),
                T.call_extern("handle", "slattn::at", T.access_ptr(g.kv, "r"), source[r]),
                r * 16 + tx // 8,
                tx % 8,
                pieces[c][0] // 64,
                r * 16 + tx // 8 < left,
            )
        T.cp_async_barrier_noinc(m.key_full[buffer * 2 + c])

    @T.macro
    def describe(m: Any, step: Any, count: Any, flags: Any, query: Any, t: Any, h0: Any):
        T.call_extern(
            "handle",
            "slattn::describe",
            T.access_ptr(m.block[step % 4, 0], "w", 8),
            count,
            flags,
            query,
            t,
            h0,
        )

    @T.macro
    def gather(g: Any, m: Any):
        slot = T.alloc_local((STRETCH // 32,), INT32)
        length = T.alloc_local((1,), INT32)
        source = T.alloc_local((4,), "int64")
        ahead = T.alloc_var(INT32, 0)  # the task, and the place in its row, of what `slot` holds
        start = T.alloc_var(INT32, 0)
        filled = T.alloc_var(INT32, 0)  # of the ring, over all rows: what a slower warp still reads is not overwritten
        used = T.alloc_var(INT32, 0)
        step = T.alloc_var(INT32, 0)
        turn = T.alloc_var(INT32, 0)
        tx = T.get_thread_binding()
        look(g, slot, length, 0, 0)
        for task in T.serial(g.tasks):
            t = T.alloc_var(INT32, (g.bx + task * g.sms) // g.groups)
            h0 = T.alloc_var(INT32, (g.bx + task * g.sms) % g.groups * HEADS)
            first = T.alloc_var(INT32, t // g.queries * g.keys)
            begin = T.alloc_var(INT32, used)
            left = T.alloc_var(INT32, 1)
            while left > 0:
                while ahead == task and filled - used <= 2 * BLOCK:
                    count = T.alloc_var(INT32, T.min(length[0], slots))
                    filled += T.call_extern(
                        INT32, "slattn::scan", slot.data, start, count, g.keys, T.access_ptr(m.ring, "w"), filled
                    )
                    start += STRETCH
                    if start >= count:
                        ahead += 1
                        start = 0
                    look(g, slot, length, ahead, start)
                left = filled - used
                if left > 0:
                    own = T.alloc_var(INT32, step % 2)
                    parity = T.alloc_var(INT32, step // 2 % 2 ^ 1)
                    for r in T.unroll(4):
                        source[r] = 0
                        if r * 16 + tx // 8 < left:
                            source[r] = T.cast(first + m.ring[(used + r * 16 + tx // 8) & (RING - 1)], "int64") * dim
                        source[r] += tx % 8 * 8
                    T.barrier_wait(m.key_free[own * 2], parity)
                    if tx == 0:
                        flags = T.if_then_else(used == begin, FRESH, 0) + T.if_then_else(left <= BLOCK, LAST, 0)
                        leaving = T.if_then_else(left <= 2 * BLOCK, LEAVING, 0)
                        describe(m, step, T.min(left, BLOCK), flags + leaving, turn, t, h0)
                        T.barrier_arrive(m.key_full[own * 2])
                    copy_piece(g, m, source, left, own, 0)
                    if used == begin:
                        T.barrier_wait(m.query_free[0], turn % 2 ^ 1)
                        T.tma_copy(g.q[t, h0 : h0 + HEADS, 0:dim], m.q, barrier=m.query_full[0])
                        arrive(m.query_full, 0)
                    T.barrier_wait(m.key_free[own * 2 + 1], parity)
                    copy_piece(g, m, source, left, own, 1)
                    step += 1
                    used += T.min(left, BLOCK)
                    left -= BLOCK
            if filled != begin:
                turn += 1
            else:
                T.call_extern(
                    "handle",
                    f"slattn::empty_rows<{value_dim}>",
                    T.access_ptr(g.out[t, h0, 0], "w"),
                    T.access_ptr(g.lse[t, h0], "w"),
                    T.min(heads - h0, HEADS),
                )
        for _ in T.serial(2):  # each scorer ends with a block without keys, beside which it adds the other's last
            for c in (0, 1):  # P of its last block is no longer read
                T.barrier_wait(m.key_free[step % 2 * 2 + c], step // 2 % 2 ^ 1)
            if tx == 0:
                describe(m, step, 0, FRESH, turn - 1, 0, 0)
                T.barrier_arrive(m.key_full[step % 2 * 2])
            for c in (0, 1):
                T.cp_async_barrier_noinc(m.key_full[step % 2 * 2 + c])
            step += 1

    def field(m: Any, step: Any, index: int) -> Any:
        return T.call_extern(INT32, "slattn::field", T.access_ptr(m.block[step % 4, 0], "r", 8), index)

    def p_tile(m: Any, group: int) -> Any:
        return m.kv[group, :, value_dim:dim] if tail else m.p[group, :, :]

    def p_start(m: Any, group: int) -> Any:
        return m.kv[group, 0, value_dim] if tail else m.p[group, 0, 0]

    @T.macro
    def close(g: Any, group: int, top: Any, total: Any, inverse: Any, t: Any, h0: Any):
        T.call_extern(
            "handle",
            f"slattn::close_rows<{flag}>",
            top.data,
            total.data,
            inverse.data,
            T.access_ptr(g.sink[T.if_then_else(g.use_sink != 0, h0, 0)], "r"),
            g.use_sink != 0,
            T.access_ptr(g.lse[t, h0], "w"),
            group == 0,
            heads - h0,
        )

    @T.macro
    def finish(g: Any, group: int, acc: Any, inverse: Any, t: Any, h0: Any):
        T.call_extern(
            "handle",
            f"slattn::finish_rows<{half}>",
            acc.data,
            inverse.data,
            T.access_ptr(g.out[t, h0, group * half], "w"),
            heads - h0,
            value_dim,
        )

    @T.macro
    def score_piece(m: Any, group: int, s: Any, c: int):
        """Add a piece's part to the scores. The keys came by the generic proxy, the tensor core reads by the other."""
        T.fence_proxy_async()
        T.wgmma_gemm(
            m.q[:, pieces[c][0] : pieces[c][1]],
            m.kv[group, :, pieces[c][0] : pieces[c][1]],
            s,
            transpose_B=True,
            clear_accum=c == 0,
        )

    @T.macro
    def score(g: Any, m: Any, group: int):
        s = T.alloc_fragment((HEADS, BLOCK), FP32)
        p = T.alloc_fragment((HEADS, BLOCK), BF16)
        acc = T.alloc_fragment((HEADS, half), FP32)
        top = T.alloc_local((2,), FP32)
        total = T.alloc_local((2,), FP32)
        rest = T.alloc_local((2,), FP32)
        factor = T.alloc_local((2,), FP32)
        inverse = T.alloc_local((2,), FP32)
        turn = T.alloc_var(INT32, 0)
        seen = T.alloc_var(INT32, 0)
        count = T.alloc_var(INT32, 1)
        theirs = T.alloc_var(INT32, 0)
        t = T.alloc_var(INT32, 0)
        h0 = T.alloc_var(INT32, 0)
        for i in T.unroll(2):
            top[i] = 0
            total[i] = 0
            rest[i] = 0
        while count > 0:
            T.barrier_wait(m.key_full[group * 2], turn % 2)
            count = field(m, 2 * turn + group, 0)
            mine = T.alloc_var(INT32, field(m, 2 * turn + group, 1))
            query = T.alloc_var(INT32, field(m, 2 * turn + group, 2))
            while seen < query:  # queries of which this group scores nothing
                T.barrier_wait(m.query_full[0], seen % 2)
                arrive(m.query_free, 0)
                seen += 1
            T.barrier_wait(m.query_full[0], query & 1)
            score_piece(m, group, s, 0)
            T.wait_wgmma(0)

            theirs = FRESH
            if 2 * turn + group > 0:
                T.barrier_wait(m.p_full[1 - group], (turn + group + 1) % 2)
                theirs = field(m, 2 * turn + group + 3, 1)
            T.call_extern(
                "handle",
                f"slattn::adopt_block<{half}, {flag}>",
                acc.data,
                top.data,
                total.data,
                rest.data,
                T.access_ptr(m.rows[1 - group, 0], "r", 5 * HEADS),
                theirs % 2 != 0,
                theirs // LAST % 2 != 0,
            )
            if theirs // LAST % 2 != 0:
                t = field(m, 2 * turn + group + 3, 3)
                h0 = field(m, 2 * turn + group + 3, 4)
                close(g, group, top, rest, inverse, t, h0)
            T.wgmma_gemm(
                p_tile(m, 1 - group),
                m.kv[1 - group, :, group * half : (group + 1) * half],
                acc,
                clear_accum=theirs % 2 != 0,
            )
            T.barrier_wait(m.key_full[group * 2 + 1], turn % 2)
            score_piece(m, group, s, 1)
            T.wait_wgmma(1)
            if 2 * turn + group > 0:
                arrive(m.key_free, (1 - group) * 2 + group)
            T.wait_wgmma(0)
            if mine >= LEAVING:
                arrive(m.query_free, 0)
                seen += 1

            if tail:
                T.sync_threads(2 + group, GROUP)  # the whole group is done with the columns that P overwrites
            T.call_extern(
                "handle",
                f"slattn::softmax_block<{flag}>",
                s.data,
                p.data,
                top.data,
                total.data,
                rest.data,
                factor.data,
                g.weight,
                count,
                mine % 2 != 0,
                T.access_ptr(p_start(m, group), "w", HEADS * BLOCK),
                T.access_ptr(m.rows[group, 0], "w", 5 * HEADS),
            )
            T.fence_proxy_async()
            T.barrier_arrive(m.p_full[group])  # every thread for itself: maxima and sums pass by ordinary stores
            if theirs // LAST % 2 != 0:
                finish(g, group, acc, inverse, t, h0)

            T.call_extern("handle", f"slattn::rescale_rows<{half}>", acc.data, factor.data)
            if mine // LAST % 2 != 0:
                t = field(m, 2 * turn + group, 3)
                h0 = field(m, 2 * turn + group, 4)
                for i in T.unroll(2):
                    rest[i] = T.call_extern(FP32, "slattn::quad_sum", total[i]) + rest[i]
                close(g, group, top, rest, inverse, t, h0)
            T.wgmma_gemm(
                p,
                m.kv[group, :, group * half : (group + 1) * half],
                acc,
                clear_accum=mine % 2 != 0,
            )
            T.wait_wgmma(0)
            arrive(m.key_free, group * 3)
            if mine // LAST % 2 != 0:
                finish(g, group, acc, inverse, t, h0)
            turn += 1

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
        sms: T.int32,
    ):
        with T.Kernel(sms, threads=3 * GROUP, prelude=HOPPER_PRELUDE + FORWARD_PRELUDE) as bx:
            groups = T.alloc_var(INT32, T.ceildiv(heads, HEADS))
            g = SimpleNamespace(
                q=Q,
                kv=KV,
                indices=Indices,
                lengths=Lengths,
                sink=Sink,
                out=Out,
                lse=Lse,
                queries=queries,
                keys=keys,
                use_lengths=use_lengths,
                use_sink=use_sink,
                weight=scale * (1.0 if natural else LOG2E),
                sms=sms,
                bx=bx,
                groups=groups,
                tasks=T.ceildiv(tokens * groups - bx, sms),
            )
            m = SimpleNamespace(
                q=T.alloc_shared((HEADS, dim), BF16),
                kv=T.alloc_shared((2, BLOCK, dim), BF16),
                p=None if tail else T.alloc_shared((2, HEADS, BLOCK), BF16),
                rows=T.alloc_shared((2, 5 * HEADS), FP32),
                ring=T.alloc_shared((RING,), INT32),
                block=T.alloc_shared((4, 8), INT32),
                query_full=T.alloc_barrier([WARPS]),
                query_free=T.alloc_barrier([2 * WARPS]),
                key_full=T.alloc_barrier([GROUP + 1, GROUP] * 2),
                key_free=T.alloc_barrier([WARPS] * 4),
                p_full=T.alloc_barrier([GROUP] * 2),
            )
            tx = T.get_thread_binding()
            if tx < GROUP:
                T.set_max_nreg(config.gather_registers, 0)
                gather(g, m)
            elif tx < 2 * GROUP:
                T.set_max_nreg(config.score_registers, 1)
                score(g, m, 0)
            else:
                T.set_max_nreg(config.score_registers, 1)
                score(g, m, 1)

    return main
