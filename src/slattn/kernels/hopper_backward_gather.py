"""The Hopper backward's gatherer: the group of threads that brings what the others multiply, in 24 or 32 registers.

These are the keys of a block as their buffer is freed, a query's Q and dO, what belongs to its heads, delta among it
where no kernel before has made it, and notes of the queries to come.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import HopperBackwardConfig
from slattn.kernels.device import INT32

GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
HEADS, BLOCK = 64, 64
PIECE = 128  # columns of Q and dO that come at a time, and of dKV formed at a time, 64 by each back group
SHARE = 192  # columns of dQ that a back group keeps; the front keeps the rest
NOTES = 4  # tasks that are noted at a time: of the last one, while it ends, to the one after the next


@T.macro
def arrive(barriers: Any, index: Any):
    """Arrive once for the whole warp, after all that its lanes did."""
    T.call_extern("handle", "slattn::arrive_warp", barriers[index])


def blocks_of(m: Any, task: Any) -> Any:
    """The blocks of a task's slots; one where there are none, which makes dQ zero."""
    return T.max(T.ceildiv(m.task[task % NOTES, 2], BLOCK), 1)


def pieces_of(dim: int) -> tuple[tuple[int, int], ...]:
    """(start, width) of the columns of Q and dO that come at a time. A loop over a tuple is written out."""
    return tuple((c, min(PIECE, dim - c)) for c in range(0, dim, PIECE))


def halves_of(dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """From and to: the columns of keys that come, and are waited for, at a time."""
    return (0, 256), (256, dim)


def pieces_in(half: tuple[int, int], dim: int) -> tuple[int, ...]:
    """Which pieces begin there."""
    return tuple(c for c, (start, _) in enumerate(pieces_of(dim)) if half[0] <= start < half[1])


def gatherer(config: HopperBackwardConfig, tokens: Any, heads: Any) -> SimpleNamespace:
    """`gather`, and what all groups do of it for the first query: `plan`, `load_heads`, `makes_delta`, `add_deltas`."""
    dim, value_dim = config.head_dim, config.value_dim
    pieces, halves = pieces_of(dim), halves_of(dim)

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
            m.task[task % NOTES, 2] < g.within,
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

    def makes_delta(g: Any, m: Any, task: Any) -> Any:
        """Whether there is such a task, and delta of it is not made beforehand."""
        return T.And(m.task[task % NOTES, 0] >= 0, m.task[task % NOTES, 2] >= g.within)

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
                        for c in pieces_in(halves[i], dim):
                            load_query(g, m, c, task)
                    T.ptx_wait_group(1 - i)
                    T.fence_proxy_async()
                    T.barrier_arrive(m.key_full[i])
                if b == 0:
                    plan(g, m, task + 2)
                    if m.task[(task + 1) % NOTES, 0] >= 0:
                        load_heads(g, m, task + 1)
                    T.sync_threads(2, GROUP)
                if makes_delta(g, m, task + 1):
                    add_deltas(g, m, task + 1, WARPS, b * share, T.min(b * share + share, HEADS // WARPS))
                step += 1
            task += 1

    return SimpleNamespace(
        gather=gather, plan=plan, load_heads=load_heads, add_deltas=add_deltas, makes_delta=makes_delta
    )
