"""The backward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

Four warpgroups share a query's 64 heads. The gatherer copies the keys of a block of 64 slots as their buffer is freed.
The front forms S and dP, and leaves P and dS in shared memory; the two back groups form dKV, 64 columns at a time, and
reduce it into the table of dkv straight from registers. All but the gatherer keep their share of the columns of dQ in
registers over the whole row.

    gatherer  | gather b+1        | Q and dO, if b+1 begins a query | gather b+2 ...
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
from slattn.kernels.device import BF16, FP32, INT32, LOG2E, add_exactly, read_scales
from slattn.kernels.exact_cuda import EXACT_PRELUDE
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE, store_rows

GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
HEADS, BLOCK = 64, 64
PIECE = 128  # columns gathered at a time, and of dKV formed at a time, 64 by each back group
SHARE = 192  # columns of dQ that a back group keeps; the front keeps the rest
NOTES = 4  # tasks that are noted at a time: of the last one, while it ends, to the one after the next


def hopper_backward(config: HopperBackwardConfig) -> Any:
    """The program for one configuration.

    Parameters of the program, all contiguous: Q [T, H, D], KV [N, D], GradOut [T, H, d_v], bf16; Rows [T, K'] and
    Counts [T], what `slattn.kernels.prepare.compact` makes of the indices; Lse2 (base 2, with the sink, +inf for an
    empty row), Delta (<out, grad_out>) and later Lse (natural, keys only) [T, H] fp32; GradLse, the same, read with
    use_grad_lse only; Out [T, H, d_v] bf16, read with use_out only, with which Delta is written; GradQ [T, H, D] bf16
    (written); GradKV [N, D] fp32 (added to), its columns in the order of `slattn.kernels.collect.finish`, or if
    `deterministic` [N, D / 2] int64; then Expected [T] and Scales [N] fp32 and Whole [N, D] int64 (added to), otherwise
    of any length and not read (`slattn.kernels.exact_cuda`); scale; sms, the number of blocks of threads to launch,
    which share the queries.
    """
    dim, value_dim, buffers = config.head_dim, config.value_dim, config.score_buffers
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    queries, units, wholes, outs = T.dynamic("queries, units, wholes, outs")
    # Of a thread's 16 pairs of P: how many it makes before dP is begun, for want of registers to make them beside it.
    early = 12 if dim > value_dim else 0
    prelude = HOPPER_PRELUDE + (EXACT_PRELUDE if config.deterministic else "")
    # (start, width) of the columns gathered at a time. A Python loop over these writes its body out for each.
    pieces = tuple((c, min(PIECE, dim - c)) for c in range(0, dim, PIECE))
    every_piece = tuple(range(len(pieces)))
    halves = (0, 256), (256, dim)  # from and to: the columns of keys that come, and are waited for, at a time

    @T.macro
    def arrive(barriers: Any, index: Any):
        """Arrive once for the whole warp, after all that its lanes did."""
        T.call_extern("handle", "slattn::arrive_warp", barriers[index])

    @T.macro
    def plan(g: Any, m: Any, task: Any):
        """Note a task's query, its first head and the number of its slots, for all groups; -1 past the last one."""
        if T.get_thread_binding() == 0:
            number = T.alloc_var(INT32, g.bx + task * g.sms)
            t = T.alloc_var(INT32, T.truncdiv(number, g.groups))
            m.task[task % NOTES, 0] = -1
            if t < tokens:
                m.task[task % NOTES, 0] = t
                m.task[task % NOTES, 1] = (number - t * g.groups) * HEADS
                m.task[task % NOTES, 2] = g.counts[t]

    def noted(m: Any, task: Any, what: int) -> Any:
        """What is noted, where the address is not to be kept over a loop."""
        return T.call_extern(INT32, "slattn::noted", T.access_ptr(m.task[0, 0], "r"), task % NOTES * 3 + what)

    @T.macro
    def load_query(g: Any, m: Any, c: int, task: Any):
        """Start loading piece `c` of the columns of Q and dO, once the last query's is no longer read."""
        start, width = pieces[c]
        t = T.alloc_var(INT32, noted(m, task, 0))
        h0 = T.alloc_var(INT32, noted(m, task, 1))
        T.barrier_wait(m.query_free[c], task % 2 ^ 1)
        T.tma_copy(
            g.q[t, h0 : h0 + HEADS, start : start + width], m.q[:, start : start + width], barrier=m.query_full[c]
        )
        if start < value_dim:
            T.tma_copy(
                g.grad_out[t, h0 : h0 + HEADS, start : start + width],
                m.do[:, start : start + width],
                barrier=m.query_full[c],
            )
        arrive(m.query_full, c)

    @T.macro
    def load_heads(g: Any, m: Any, task: Any):
        """Bring what belongs to a task's heads."""
        t, h0 = m.task[task % NOTES, 0], m.task[task % NOTES, 1]
        T.call_extern(
            "handle",
            "slattn::load_heads",
            T.access_ptr(m.stats[task % 2, 0, 0], "w"),
            *(T.access_ptr(x[t, h0], "r") for x in (g.lse, g.lse2, g.delta, g.grad_lse)),
            g.use_out == 0,
            g.use_grad_lse != 0,
            heads - h0,
        )

    @T.macro
    def add_deltas(g: Any, m: Any, task: Any, warps: int, start: Any, end: Any):
        """Make delta of a task's heads, of each so many as there are warps."""
        T.call_extern(
            "handle",
            f"slattn::add_deltas<{warps}, {value_dim}, {2 if dim == value_dim or warps > WARPS else 1}>",
            T.access_ptr(m.stats[task % 2, 0, 0], "rw"),
            T.access_ptr(g.delta, "w"),
            T.access_ptr(g.out, "r"),
            T.access_ptr(g.grad_out, "r"),
            T.access_ptr(m.task[task % NOTES, 0], "r"),
            start,
            end,
            heads,
        )

    @T.macro
    def store_query(g: Any, m: Any, dq: Any, task: Any, column: int):
        """Write a group's share of a task's dQ."""
        store_rows(dq, g.grad_q, m.task[task % NOTES, 0], m.task[task % NOTES, 1], heads, column)

    def blocks_of(m: Any, task: Any) -> Any:
        """The blocks of a task's slots; one where there are none, which makes dQ zero."""
        return T.max(T.ceildiv(m.task[task % NOTES, 2], BLOCK), 1)

    @T.macro
    def copy_rows(g: Any, m: Any, step: Any, task: Any, b: Any):
        """Start copying the numbers of a block's key rows, in whatever asynchronous group is committed next."""
        T.call_extern(
            "handle",
            "slattn::copy_numbers",
            T.access_ptr(m.rows[T.truncmod(step, 3), 0], "w", BLOCK),
            T.access_ptr(g.rows[m.task[task % NOTES, 0], b * BLOCK], "r", BLOCK),
        )

    @T.macro
    def copy_keys(g: Any, m: Any, row: Any, start: int, width: int):
        """Start copying columns of a block's key rows."""
        T.call_extern(
            "handle",
            f"slattn::gather_columns<{width // 64}, {start // 64}, {dim}>",
            T.access_ptr(m.kv, "w"),
            T.access_ptr(g.kv, "r"),
            row.data,
        )

    @T.macro
    def gather(g: Any, m: Any):
        """The gatherer: keys as soon as their columns of the buffer are free, and what belongs to a query."""
        row = T.alloc_local((4,), INT32)
        step = T.alloc_var(INT32, 0)
        task = T.alloc_var(INT32, 0)
        if m.task[0, 0] >= 0:
            copy_rows(g, m, 0, 0, 0)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
        while m.task[task % NOTES, 0] >= 0:
            blocks = T.alloc_var(INT32, blocks_of(m, task))
            share = T.alloc_var(INT32, T.ceildiv(HEADS // WARPS, blocks))  # of the next one's heads, with each block
            for b in T.serial(blocks):
                T.sync_threads(2, GROUP)  # the numbers of its rows have come
                T.call_extern("handle", "slattn::key_rows", T.access_ptr(m.rows[T.truncmod(step, 3), 0], "r"), row.data)
                T.barrier_wait(m.key_free[0], step % 2 ^ 1)
                copy_keys(g, m, row, 0, SHARE)
                T.barrier_wait(m.key_free[1], step % 2 ^ 1)
                copy_keys(g, m, row, SHARE, halves[0][1] - SHARE)
                T.ptx_commit_group()
                copy_keys(g, m, row, halves[0][1], 2 * SHARE - halves[0][1])
                # The rows of two blocks ago, in whose place these come, are no longer read either.
                if b + 1 < blocks:
                    copy_rows(g, m, step + 1, task, b + 1)
                elif m.task[(task + 1) % NOTES, 0] >= 0:
                    copy_rows(g, m, step + 1, task + 1, 0)
                T.barrier_wait(m.key_free[2], step % 2 ^ 1)
                copy_keys(g, m, row, 2 * SHARE, dim - 2 * SHARE)
                T.ptx_commit_group()
                for i in (0, 1):
                    if b == 0:
                        for c in every_piece:
                            if halves[i][0] <= pieces[c][0] < halves[i][1]:
                                load_query(g, m, c, task)
                    T.ptx_wait_group(1 - i)
                    T.fence_proxy_async()
                    T.barrier_arrive(m.key_full[i])
                if b == 0:
                    plan(g, m, task + 2)
                    if m.task[(task + 1) % NOTES, 0] >= 0:
                        load_heads(g, m, task + 1)
                    if g.use_out != 0:
                        T.sync_threads(2, GROUP)
                if g.use_out != 0 and m.task[(task + 1) % NOTES, 0] >= 0:
                    add_deltas(g, m, task + 1, WARPS, b * share, T.min(b * share + share, HEADS // WARPS))
                step += 1
            task += 1

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
                        for c in every_piece:
                            if halves[i][0] <= pieces[c][0] < halves[i][1]:
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
                    for c in every_piece[int(both) : value_dim // PIECE]:
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
        use_out: T.int32,
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
                use_out=use_out,
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
            plan(g, m, 0)
            plan(g, m, 1)
            # Before the groups part: bar.sync is an aligned barrier, of which all threads execute the same instruction.
            T.sync_threads()
            if m.task[0, 0] >= 0:
                load_heads(g, m, 0)
            T.sync_threads()
            if use_out != 0 and m.task[0, 0] >= 0:
                add_deltas(g, m, 0, 4 * WARPS, 0, HEADS // (4 * WARPS))
            T.sync_threads()
            tx = T.get_thread_binding()
            gather_registers, front_registers, back_registers = config.registers
            if tx < GROUP:
                T.set_max_nreg(gather_registers, 0)
                gather(g, m)
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
