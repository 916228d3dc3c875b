"""The backward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

Four warpgroups share a query's 64 heads. The gatherer copies the keys of a block of 64 slots as their buffer is freed,
and makes delta of the next query, where that is left to it.
The front forms S and dP, and leaves P and dS in shared memory; the two back groups form dKV, 64 columns at a time, and
reduce it into the table of dkv straight from registers. All but the gatherer keep their share of the columns of dQ in
registers over the whole row.

    gatherer  | gather b+1        | Q and dO, if b+1 begins a query | delta of some heads | gather b+2 ...
    front     | S of b+1 as it lands, dP beside the softmax, P, dS  | dQ b+1 | S ...
    back 0    | dQ b, dKV b: 4 chunks, each reduced                 | dQ b+1, dKV b+1 ...
    back 1    | dKV b: a chunk, dQ b; the other chunks              | dKV b+1 ...

There is one key buffer, so dQ comes early and releases it, a group's share of the columns at a time; and a query's Q
and dO are replaced piece by piece while the last block's chunks still go out. docs/performance.md has the figures and
what bounds it.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import HopperBackwardConfig
from slattn.kernels.device import BF16, FP32, INT32, add_exactly, read_scales
from slattn.kernels.exact_cuda import EXACT_PRELUDE
from slattn.kernels.hopper_backward_gather import (
    BLOCK,
    GROUP,
    HEADS,
    NOTES,
    PIECE,
    SHARE,
    WARPS,
    arrive,
    blocks_of,
    gatherer,
    halves_of,
    pieces_in,
    pieces_of,
)
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE, store_rows
from slattn.problem import LOG2E


def hopper_backward(config: HopperBackwardConfig) -> Any:
    """The program for one configuration.

    Parameters of the program, all contiguous: Q [T, H, D], KV [N, D], GradOut [T, H, d_v], bf16; Rows [T, K'] and
    Counts [T], what `slattn.kernels.prepare.compact` makes of the indices; Lse2 (base 2, with the sink, +inf for an
    empty row), Delta (<out, grad_out>) and later Lse (natural, keys only) [T, H] fp32; GradLse, the same, read with
    use_grad_lse only; Out [T, H, d_v] bf16, and within: of queries with as many slots that count, or more, Delta is
    made of Out and written; GradQ [T, H, D] bf16 (written); GradKV [N, D] fp32 (added to), its columns in the order of
    `slattn.kernels.collect.column_in_table`, or if `deterministic` [N, D / 2] int64; then Expected [T] and Scales [N]
    fp32 and Whole [N, D] int64 (added to), otherwise of any length and not read (`slattn.kernels.exact_cuda`); scale;
    sms, the number of blocks of threads to launch, which share the queries.
    """
    dim, value_dim, buffers = config.head_dim, config.value_dim, config.score_buffers
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    queries, units, wholes, outs = T.dynamic("queries, units, wholes, outs")
    # Of a thread's 16 pairs of P: how many it makes before dP is begun, for want of registers to make them beside it.
    early = 12 if dim > value_dim else 0
    prelude = HOPPER_PRELUDE + (EXACT_PRELUDE if config.deterministic else "")
    pieces, halves = pieces_of(dim), halves_of(dim)
    gathers = gatherer(config, tokens, heads)

    @T.macro
    def store_query(g: Any, m: Any, dq: Any, task: Any, column: int):
        """Write a group's share of a task's dQ."""
        store_rows(dq, g.grad_q, m.task[task % NOTES, 0], m.task[task % NOTES, 1], heads, column)

    @T.macro
    def pack(g: Any, m: Any, s: Any, packed: Any, task: Any, b: Any, start: int, end: int):
        """Make P, some of a thread's pairs."""
        T.call_extern(
            "handle",
            f"slattn::pack_probabilities<{start}, {end}>",
            s.data,
            packed.data,
            T.access_ptr(m.stats[task % 2, 0, 0], "r"),
            g.scale * LOG2E,
            m.task[task % NOTES, 2] - b * BLOCK,
        )

    @T.macro
    def front(g: Any, m: Any):
        """The front: S, P, dP and dS of a block, and its share of dQ."""
        s = T.alloc_fragment((HEADS, BLOCK), FP32)
        dp = T.alloc_fragment((HEADS, BLOCK), FP32)
        dq = T.alloc_fragment((HEADS, dim - 2 * SHARE), FP32)
        packed = T.alloc_local((HEADS * BLOCK // 2 // GROUP,), "uint32")
        step = T.alloc_var(INT32, 0)
        task = T.alloc_var(INT32, 0)
        while m.task[task % NOTES, 0] >= 0:
            blocks = T.alloc_var(INT32, blocks_of(m, task))
            for b in T.serial(blocks):
                for i in (0, 1):
                    if b == 0:
                        for c in pieces_in(halves[i], dim):
                            T.barrier_wait(m.query_full[c], task % 2)
                    T.barrier_wait(m.key_full[i], step % 2)
                    start, end = halves[i]
                    T.wgmma_gemm(m.q[:, start:end], m.kv[:, start:end], s, transpose_B=True, clear_accum=i == 0)
                T.wait_wgmma(0)
                pack(g, m, s, packed, task, b, 0, early)
                zero = T.alloc_var(INT32, T.call_extern(INT32, "slattn::zero"))
                T.wgmma_gemm(m.do, m.kv[:, zero : zero + value_dim], dp, transpose_B=True, clear_accum=True)
                pack(g, m, s, packed, task, b, early, 16)
                T.wait_wgmma(0)
                T.barrier_wait(m.scores_free[step % buffers], step // buffers % 2 ^ 1)
                T.call_extern(
                    "handle",
                    "slattn::store_gradients",
                    packed.data,
                    dp.data,
                    T.access_ptr(m.stats[task % 2, 0, 0], "r"),
                    g.scale,
                    m.task[task % NOTES, 2] > 0,
                    T.access_ptr(m.p[step % buffers, 0, 0], "w"),
                    T.access_ptr(m.ds[step % buffers, 0, 0], "w"),
                )
                T.fence_proxy_async()
                arrive(m.scores_full, 0)
                T.sync_threads(1, GROUP)
                T.wgmma_gemm(m.ds[step % buffers, :, :], m.kv[:, 2 * SHARE : dim], dq, clear_accum=b == 0)
                T.wait_wgmma(0)
                T.barrier_arrive(m.key_free[2])  # each lane for itself, as it has read the heads' numbers
                step += 1
            store_query(g, m, dq, task, 2 * SHARE)
            task += 1

    @T.macro
    def chunk(m: Any, dkv: Any, buffer: Any, column: Any, both: bool):
        """Issue dkv = P^T dO + dS^T Q for the columns from `column` on, as many as dkv has; not `both`: the second."""
        width = dkv.shape[1]
        if both:
            T.wgmma_gemm(m.p[buffer, :, :], m.do[:, column : column + width], dkv, transpose_A=True, clear_accum=True)
        T.wgmma_gemm(m.ds[buffer, :, :], m.q[:, column : column + width], dkv, transpose_A=True, clear_accum=not both)

    @T.macro
    def query_share(m: Any, dq: Any, buffer: Any, b: Any, group: int):
        """Issue a back group's share of dQ."""
        T.wgmma_gemm(m.ds[buffer, :, :], m.kv[:, group * SHARE : (group + 1) * SHARE], dq, clear_accum=b == 0)

    @T.macro
    def add(g: Any, m: Any, dkv: Any, scale: Any, step: Any, column: Any, part: tuple[int, int]):
        """Add columns of a chunk, `part`: how many and from which on."""
        if config.deterministic:
            add_exactly(g, dkv, scale, m.rows, T.truncmod(step, 3), 0, column, part, dim)
        else:
            T.call_extern(
                "handle",
                f"slattn::add_rows<{part[0]}, {part[1]}, {column + part[1]}, {dim}>",
                dkv.data,
                T.access_ptr(g.grad_kv, "rw"),
                T.access_ptr(m.rows[T.truncmod(step, 3), 0], "r"),
            )

    @T.macro
    def later_chunk(g: Any, m: Any, dkv: Any, scale: Any, step: Any, last: Any, c: Any, group: int):
        """Form a back group's half of a piece of dKV that is not a block's first, and add it."""
        chunk(m, dkv, step % buffers, c * PIECE + group * 64, True)
        T.wait_wgmma(0)
        if last:
            arrive(m.query_free, c)
        if c + 1 == value_dim // PIECE:
            arrive(m.scores_free, step % buffers)
        add(g, m, dkv, scale, step, c * PIECE + group * 64, (64, 0))

    @T.macro
    def back(g: Any, m: Any, group: int):
        """One back group: its half of every piece of dKV, and its share of dQ.

        The second group forms its first chunk before its dQ, so that the two do not wait for each other's.
        """
        dq = T.alloc_fragment((HEADS, SHARE), FP32)
        dkv = T.alloc_fragment((BLOCK, 64), FP32)
        scale = T.alloc_local((4,), FP32)
        step = T.alloc_var(INT32, 0)
        both = dim == value_dim
        first_piece, column = (0, group * 64) if both else (len(pieces) - 1, value_dim)
        later_pieces = tuple(range(int(both), value_dim // PIECE))
        task = T.alloc_var(INT32, 0)
        while m.task[task % NOTES, 0] >= 0:
            blocks = T.alloc_var(INT32, blocks_of(m, task))
            for b in T.serial(blocks):
                T.barrier_wait(m.scores_full, step % 2)
                if config.deterministic:
                    read_scales(g, scale, g.expected[m.task[task % NOTES, 0]], m.rows, T.truncmod(step, 3), 0)
                if group == 0:
                    query_share(m, dq, step % buffers, b, group)
                    chunk(m, dkv, step % buffers, column, both)
                    T.wait_wgmma(2 if both else 1)
                    arrive(m.key_free, group)
                    if b + 1 == blocks:
                        store_query(g, m, dq, task, group * SHARE)
                else:
                    chunk(m, dkv, step % buffers, column, both)
                    query_share(m, dq, step % buffers, b, group)
                T.wait_wgmma(0)
                if group == 1:
                    arrive(m.key_free, group)
                if b + 1 == blocks:
                    arrive(m.query_free, first_piece)
                add(g, m, dkv, scale, step, column, (64, 0) if both else (32, group * 32))
                if group == 1 and b + 1 == blocks:
                    store_query(g, m, dq, task, group * SHARE)
                if config.deterministic:  # a loop: written out, the code does not fit in the cache of instructions
                    for i in T.unroll(value_dim // PIECE - int(both), unroll_factor=1):
                        later_chunk(g, m, dkv, scale, step, b + 1 == blocks, i + int(both), group)
                else:
                    for c in later_pieces:
                        later_chunk(g, m, dkv, scale, step, b + 1 == blocks, c, group)
                step += 1
            task += 1

    @T.prim_func
    def main(
        Q: T.Tensor((tokens, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        GradOut: T.Tensor((tokens, heads, value_dim), BF16),
        Rows: T.Tensor((tokens, slots), INT32),
        Counts: T.Tensor((tokens,), INT32),
        Lse2: T.Tensor((tokens, heads), FP32),
        Delta: T.Tensor((tokens, heads), FP32),
        GradQ: T.Tensor((tokens, heads, dim), BF16),
        GradKV: T.Tensor(
            (rows, dim // 2) if config.deterministic else (rows, dim), "int64" if config.deterministic else FP32
        ),
        Expected: T.Tensor((queries,), FP32),
        Scales: T.Tensor((units,), FP32),
        Whole: T.Tensor((wholes, dim), "int64"),
        Lse: T.Tensor((tokens, heads), FP32),
        GradLse: T.Tensor((tokens, heads), FP32),
        use_grad_lse: T.int32,
        Out: T.Tensor((outs, heads, value_dim), BF16),
        within: T.int32,
        scale: T.float32,
        sms: T.int32,
    ):
        with T.Kernel(sms, threads=4 * GROUP, prelude=prelude) as bx:
            groups = T.alloc_var(INT32, T.ceildiv(heads, HEADS))
            g = SimpleNamespace(
                q=Q,
                kv=KV,
                grad_out=GradOut,
                rows=Rows,
                counts=Counts,
                lse2=Lse2,
                delta=Delta,
                lse=Lse,
                grad_lse=GradLse,
                use_grad_lse=use_grad_lse,
                out=Out,
                within=within,
                expected=Expected,
                scales=Scales,
                whole=Whole,
                grad_q=GradQ,
                grad_kv=GradKV,
                scale=scale,
                sms=sms,
                bx=bx,
                groups=groups,
            )
            m = SimpleNamespace(
                q=T.alloc_shared((HEADS, dim), BF16),
                do=T.alloc_shared((HEADS, value_dim), BF16),
                kv=T.alloc_shared((BLOCK, dim), BF16),
                p=T.alloc_shared((buffers, HEADS, BLOCK), BF16),
                ds=T.alloc_shared((buffers, HEADS, BLOCK), BF16),
                stats=T.alloc_shared((2, 3, HEADS), FP32),
                # The rows of three blocks, and the notes of `plan`, in static memory: beside the barriers there is room
                # before the tiles.
                rows=T.alloc_shared((3, BLOCK), INT32, scope="shared"),
                task=T.alloc_shared((NOTES, 3), INT32, scope="shared"),
                key_full=T.alloc_barrier([GROUP] * 2),
                key_free=T.alloc_barrier([WARPS, WARPS, GROUP]),  # of the share of each group's dQ
                scores_full=T.alloc_barrier(WARPS),  # one for both buffers: with one of keys the front is a block ahead
                scores_free=T.alloc_barrier([2 * WARPS] * buffers),
                query_full=T.alloc_barrier([WARPS] * len(pieces)),
                query_free=T.alloc_barrier([2 * WARPS] * len(pieces)),
            )
            gathers.plan(g, m, 0)
            gathers.plan(g, m, 1)
            # Before the groups part: bar.sync is an aligned barrier, of which all threads execute the same instruction.
            T.sync_threads()
            if m.task[0, 0] >= 0:
                gathers.load_heads(g, m, 0)
            T.sync_threads()
            if gathers.makes_delta(g, m, 0):
                gathers.add_deltas(g, m, 0, 4 * WARPS, 0, HEADS // (4 * WARPS))
            T.sync_threads()
            tx = T.get_thread_binding()
            gather_registers, front_registers, back_registers = config.registers
            if tx < GROUP:
                T.set_max_nreg(gather_registers, 0)
                gathers.gather(g, m)
            elif tx < 2 * GROUP:
                T.set_max_nreg(front_registers, 1)
                front(g, m)
            elif tx < 3 * GROUP:
                T.set_max_nreg(back_registers, 1)
                back(g, m, 0)
            else:
                T.set_max_nreg(back_registers, 1)
                back(g, m, 1)

    return main
