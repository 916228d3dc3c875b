"""The backward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

Three warpgroups share a query's 64 heads. The front gathers the keys of a block of 64 slots, forms S and dP as their
columns land, and leaves P and dS in shared memory; the two back groups form dKV, 64 columns at a time, and reduce it
into the table of dkv straight from registers. Each of the three keeps its share of the columns of dQ in registers over
the whole row.

    front     | gather b+1, S, softmax, dP of b+1 | dQ b+1 | gather b+2 ...
    back 0    | dQ b, dKV b: 4 chunks, each reduced        | dQ b+1, dKV b+1 ...
    back 1    | dKV b: a chunk, dQ b; the other chunks     | dKV b+1 ...

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


def hopper_backward(config: HopperBackwardConfig) -> Any:
    """The program for one configuration.

    Parameters of the program, all contiguous: Q [T, H, D], KV [N, D], GradOut [T, H, d_v], bf16; Rows [T, K'] and
    Counts [T], what `slattn.kernels.prepare.compact` makes of the indices; Lse2 (base 2, with the sink, +inf for an
    empty row), Delta (<out, grad_out>) and later Lse (natural, keys only) [T, H] fp32; GradLse, the same, read with
    use_grad_lse only; GradQ [T, H, D] bf16 (written); GradKV [N, D] fp32 (added to), its columns in the order of
    `slattn.kernels.collect.finish`, or if `deterministic` [N, D / 2] int64; then Expected [T] and Scales [N] fp32 and
    Whole [N, D] int64 (added to), otherwise of any length and not read (`slattn.kernels.exact_cuda`); scale; sms, the
    number of blocks of threads to launch, which share the queries.
    """
    dim, value_dim, buffers = config.head_dim, config.value_dim, config.score_buffers
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    queries, units, wholes = T.dynamic("queries, units, wholes")
    prelude = HOPPER_PRELUDE + (EXACT_PRELUDE if config.deterministic else "")
    # (start, width) of the columns gathered at a time. A Python loop over these writes its body out for each.
    pieces = tuple((c, min(PIECE, dim - c)) for c in range(0, dim, PIECE))
    every_piece = tuple(range(len(pieces)))

    @T.macro
    def arrive(barriers: Any, index: Any):
        """Arrive once for the whole warp, after all that its lanes did."""
        T.call_extern("handle", "__syncwarp")
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(barriers[index])

    @T.macro
    def plan(g: Any, m: Any, task: Any):
        """Note a task's query, its first head and the number of its slots, for all three groups."""
        if task < g.tasks and T.get_thread_binding() == 0:
            t = T.alloc_var(INT32, T.truncdiv(g.bx + task * g.sms, g.groups))
            m.task[task % 8, 0] = t
            m.task[task % 8, 1] = T.truncmod(g.bx + task * g.sms, g.groups) * HEADS
            m.task[task % 8, 2] = g.counts[t]

    @T.macro
    def load_query(g: Any, m: Any, c: int, task: Any):
        """Start loading piece `c` of the columns of Q and dO, once the last query's is no longer read."""
        start, width = pieces[c]
        t = T.alloc_var(INT32, m.task[task % 8, 0])
        h0 = T.alloc_var(INT32, m.task[task % 8, 1])
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
        """Bring lse and delta of a task's heads.

        P is made without the sink, and what that leaves of it is multiplied in later: a gradient of lse acts on it so,
        and where a sink has nearly all of the weight fp16 holds nothing else.
        """
        tx = T.get_thread_binding()
        t = T.alloc_var(INT32, m.task[task % 8, 0])
        h = T.alloc_var(INT32, m.task[task % 8, 1] + tx)
        lse = T.alloc_var(FP32, T.infinity(FP32))
        left = T.alloc_var(FP32, 1.0)
        delta = T.alloc_var(FP32, 0.0)
        if tx < HEADS:
            if h < heads:
                left = T.if_then_else(
                    g.lse[t, h] < T.infinity(FP32), T.exp2(T.min(g.lse[t, h] * LOG2E - g.lse2[t, h], 0.0)), 0.0
                )
                lse = g.lse[t, h] * LOG2E
                delta = left * g.delta[t, h]
                if g.use_grad_lse != 0:
                    delta -= g.grad_lse[t, h]
            m.stats[task % 2, 0, tx] = lse
            m.stats[task % 2, 1, tx] = left
            m.stats[task % 2, 2, tx] = delta

    @T.macro
    def store_query(g: Any, m: Any, dq: Any, task: Any, column: int):
        """Write a group's share of a task's dQ."""
        store_rows(dq, g.grad_q, m.task[task % 8, 0], m.task[task % 8, 1], heads, column)

    def blocks_of(m: Any, task: Any) -> Any:
        """The blocks of a task's slots; one where there are none, which makes dQ zero."""
        return T.max(T.ceildiv(m.task[task % 8, 2], BLOCK), 1)

    @T.macro
    def copy_rows(g: Any, m: Any, step: Any, task: Any, b: Any):
        """Start copying the numbers of a block's key rows, in whatever asynchronous group is committed next."""
        if T.get_thread_binding() < BLOCK // 4:
            T.call_extern(
                "handle",
                "slattn::copy_16",
                T.access_ptr(m.rows[T.truncmod(step, 3), T.get_thread_binding() * 4], "w", 4),
                T.access_ptr(g.rows[m.task[task % 8, 0], b * BLOCK + T.get_thread_binding() * 4], "r", 4),
            )

    @T.macro
    def gather(g: Any, m: Any, c: int, row: Any, source: Any):
        """Start copying piece `c` of the columns of a block's key rows, as one asynchronous group."""
        start, width = pieces[c]
        T.call_extern(
            "handle",
            f"slattn::gather_columns<{width // 64}, {start // 64}>",
            T.access_ptr(m.kv, "w"),
            T.access_ptr(g.kv, "r"),
            row.data,
            source.data,
        )
        T.ptx_commit_group()

    @T.macro
    def front(g: Any, m: Any):
        row = T.alloc_local((4,), INT32)
        source = T.alloc_local((4,), "int64")
        s = T.alloc_fragment((HEADS, BLOCK), FP32)
        dp = T.alloc_fragment((HEADS, BLOCK), FP32)
        dq = T.alloc_fragment((HEADS, dim - 2 * SHARE), FP32)
        packed = T.alloc_local((HEADS * BLOCK // 2 // GROUP,), "uint32")
        step = T.alloc_var(INT32, 0)
        if g.tasks > 0:
            copy_rows(g, m, 0, 0, 0)
            T.ptx_commit_group()
            load_heads(g, m, 0)
            T.ptx_wait_group(0)
        T.sync_threads(1, GROUP)
        for task in T.serial(g.tasks):
            blocks = T.alloc_var(INT32, blocks_of(m, task))
            for b in T.serial(blocks):
                T.call_extern(
                    "handle",
                    "slattn::key_rows",
                    T.access_ptr(m.rows[T.truncmod(step, 3), 0], "r"),
                    dim,
                    row.data,
                    source.data,
                )
                T.barrier_wait(m.key_free[0], step % 2 ^ 1)
                for c in every_piece:
                    if c == 1:
                        T.barrier_wait(m.key_free[1], step % 2 ^ 1)
                        # The rows of two blocks ago, in whose place these come, are no longer read either.
                        if b + 1 < blocks_of(m, task):
                            copy_rows(g, m, step + 1, task, b + 1)
                        elif task + 1 < g.tasks:
                            copy_rows(g, m, step + 1, task + 1, 0)
                    if pieces[c][0] == 2 * SHARE:
                        T.sync_threads(1, GROUP)  # the front's own share of dQ is formed
                    gather(g, m, c, row, source)
                if b == 0:
                    load_query(g, m, 0, task)
                    plan(g, m, task + 2)
                    if task + 1 < g.tasks:
                        load_heads(g, m, task + 1)
                for c in every_piece:
                    T.ptx_wait_group(len(pieces) - 1 - c)
                    T.fence_proxy_async()
                    T.sync_threads(1, GROUP)
                    if b == 0:
                        if c + 1 < len(pieces):
                            load_query(g, m, c + 1, task)
                        T.barrier_wait(m.query_full[c], task % 2)
                    start, width = pieces[c]
                    T.wgmma_gemm(
                        m.q[:, start : start + width],
                        m.kv[:, start : start + width],
                        s,
                        transpose_B=True,
                        clear_accum=c == 0,
                    )
                T.wait_wgmma(0)
                T.call_extern(
                    "handle",
                    "slattn::pack_probabilities",
                    s.data,
                    packed.data,
                    T.access_ptr(m.stats[task % 2, 0, 0], "r"),
                    g.scale * LOG2E,
                    m.task[task % 8, 2] - b * BLOCK,
                )
                T.wgmma_gemm(m.do, m.kv[:, 0:value_dim], dp, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.barrier_wait(m.scores_free[step % buffers], step // buffers % 2 ^ 1)
                T.call_extern(
                    "handle",
                    "slattn::store_gradients",
                    packed.data,
                    dp.data,
                    T.access_ptr(m.stats[task % 2, 0, 0], "r"),
                    g.scale,
                    m.task[task % 8, 2] > 0,
                    T.access_ptr(m.p[step % buffers, 0, 0], "w"),
                    T.access_ptr(m.ds[step % buffers, 0, 0], "w"),
                )
                T.fence_proxy_async()
                arrive(m.scores_full, 0)
                T.sync_threads(1, GROUP)
                T.wgmma_gemm(m.ds[step % buffers, :, :], m.kv[:, 2 * SHARE : dim], dq, clear_accum=b == 0)
                T.wait_wgmma(0)
                step += 1
            store_query(g, m, dq, task, 2 * SHARE)

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
        for task in T.serial(g.tasks):
            blocks = T.alloc_var(INT32, blocks_of(m, task))
            for b in T.serial(blocks):
                T.barrier_wait(m.scores_full, step % 2)
                if config.deterministic:
                    read_scales(g, scale, g.expected[m.task[task % 8, 0]], m.rows, T.truncmod(step, 3), 0)
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
        scale: T.float32,
        sms: T.int32,
    ):
        with T.Kernel(sms, threads=3 * GROUP, prelude=prelude) as bx:
            groups = T.alloc_var(INT32, T.ceildiv(heads, HEADS))
            tasks = T.alloc_var(INT32, T.truncdiv(tokens * groups - bx + sms - 1, sms))
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
                expected=Expected,
                scales=Scales,
                whole=Whole,
                grad_q=GradQ,
                grad_kv=GradKV,
                scale=scale,
                sms=sms,
                bx=bx,
                groups=groups,
                tasks=tasks,
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
                task=T.alloc_shared((8, 3), INT32, scope="shared"),
                key_free=T.alloc_barrier([WARPS] * 2),
                scores_full=T.alloc_barrier(WARPS),
                scores_free=T.alloc_barrier([2 * WARPS] * buffers),
                query_full=T.alloc_barrier([WARPS] * len(pieces)),
                query_free=T.alloc_barrier([2 * WARPS] * len(pieces)),
            )
            plan(g, m, 0)
            plan(g, m, 1)
            # Before the groups part: bar.sync is an aligned barrier, of which all threads execute the same instruction.
            T.sync_threads()
            tx = T.get_thread_binding()
            front_registers, back_registers = config.registers
            if tx < GROUP:
                T.set_max_nreg(front_registers, int(front_registers > 168))
                front(g, m)
            elif tx < 2 * GROUP:
                T.set_max_nreg(back_registers, int(back_registers > 168))
                back(g, m, 0)
            else:
                T.set_max_nreg(back_registers, int(back_registers > 168))
                back(g, m, 1)

    return main
