"""The forward device program for Hopper (SM90): warp-specialised, persistent, one block of threads an SM.

All that an SM computes is one stream of blocks of 64 keys, query after query. Four warpgroups walk along it:

- the gatherer finds the slots of a row that count, 128 at a time, and copies the keys they name into buffers in turn,
  left and right half of the columns apart, running ahead into the next query's. Q comes the same way, before its keys;
- the scorer holds 384 columns of Q in registers, the rest in shared memory, and makes P of one block after the other;
- two multipliers hold half of the output's columns each, the left or the right, and multiply P with them.

    gatherer    |   K 3    |     K 4      |   K 5    |     K 6      | ...
    scorer      |   S 1    |  softmax 1   |   S 2    |  softmax 2   | S 3 ...
    multipliers | O *= f 0 | O += P 0 V 0 | O *= f 1 | O += P 1 V 1 | O *= f 2 ...

Within a query P V waits until the next scores are made: these, for which the next P waits, have the tensor cores to
themselves, and products run beside exponentials. What a block adds to the rows' maxima asks for a factor on the output;
that takes its time beside the scores. One group does each thing, in the stream's order, so that a row's bits depend on
nothing around it.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import HopperForwardConfig
from slattn.kernels.device import BF16, FP32, INT32
from slattn.kernels.hopper_cuda import HOPPER_PRELUDE
from slattn.kernels.hopper_forward_cuda import FORWARD_PRELUDE, at_head, at_sink, call, describe, field, release
from slattn.kernels.hopper_forward_gather_cuda import GATHER_PRELUDE
from slattn.problem import LOG2E

GROUP, WARPS = 128, 4  # threads and warps of a warpgroup
HEADS, BLOCK = 64, 64
STRETCH, RING = 128, 256  # slots looked at in one go, and how many that count can wait
END, QUERY = 0, -1  # what stands in a buffer in place of a number of keys
FRESH, LAST = 1, 2  # flags of a block: its query's first, its last
QUADS = GROUP // 4  # lanes of a group that exchange what belongs to rows: they arrive for their own accesses


def hopper_forward(config: HopperForwardConfig) -> Any:
    """The program; its parameters are those of `slattn.kernels.forward.forward`, followed by sms, the number of blocks
    of threads to launch, which share the queries.
    """
    dim, value_dim, natural, held = config.head_dim, config.value_dim, config.reference_rounding, config.held
    half, tail = value_dim // 2, dim - value_dim  # the tail: columns that only scores need
    lefts, rights = config.key_buffers
    prelude = HOPPER_PRELUDE + GATHER_PRELUDE + FORWARD_PRELUDE
    flag, has_tail = ("true" if x else "false" for x in (natural, tail))
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths, sinks = T.dynamic("lengths, sinks")

    def left_at(m: Any, buffer: Any) -> Any:
        return T.access_ptr(m.left[buffer, 0], "rw", BLOCK * half)

    def right_at(m: Any, buffer: Any, column: int = 0) -> Any:
        return T.access_ptr(m.right[buffer, column * BLOCK], "rw", BLOCK * (half - column))

    def tail_at(m: Any, buffer: Any) -> Any:
        return T.access_ptr(m.tail[buffer, 0], "rw", BLOCK * tail) if tail else left_at(m, buffer)

    def kept_at(m: Any, column: int) -> Any:
        return T.access_ptr(m.kept[column * HEADS], "rw", HEADS * (dim - held - column))

    def p_at(m: Any, turn: Any) -> Any:
        return T.access_ptr(m.p[turn % 2, 0], "rw", HEADS * BLOCK)

    def rows_at(table: Any, turn: Any) -> Any:
        return T.access_ptr(table[turn % 2, 0], "rw", HEADS)

    @T.macro
    def begin(at: Any, parity: int):
        """The first place: a left buffer and its barriers' parity, a right one and its."""
        for i, value in enumerate((0, parity, 0, parity)):
            at[i] = value

    @T.macro
    def advance(at: Any):
        for i, buffers in ((0, lefts), (2, rights)):
            at[i] += 1
            if at[i] == buffers:
                at[i] = 0
                at[i + 1] = at[i + 1] ^ 1

    @T.macro
    def follow(g: Any, place: Any):
        """To the next task of this SM: a token, and a group of its heads."""
        place[0] += g.step[0]
        place[1] += g.step[1]
        if place[1] >= g.groups:
            place[0] += 1
            place[1] -= g.groups

    @T.macro
    def look(g: Any, slot: Any, length: Any, thread: Any, t: Any, start: Any):
        """Load a stretch of slots; with the first, how many of the row count, and bring the row into the L2."""
        tx = T.get_thread_binding()
        call("prefetch", T.access_ptr(g.indices[t, tx * 32], "r"), start == 0 and t < tokens and tx * 32 < slots)
        if start == 0:
            length[0] = T.if_then_else(t < tokens, slots, 0)
        if start == 0 and t < tokens and g.use_lengths != 0:
            length[0] = T.min(g.lengths[t], slots)
        row = (T.access_ptr(g.indices[T.min(t, tokens - 1), 0], "r"),)
        call(f"load_slots<{STRETCH}>", slot.data, *row, start, length[0], thread)

    def scan(g: Any, m: Any, slot: Any, filled: Any, thread: Any) -> Any:
        return call(f"scan<{STRETCH}>", slot.data, g.keys, T.access_ptr(m.ring, "w"), filled, thread, dtype=INT32)

    @T.macro
    def announce(m: Any, at: Any, count: Any, flags: Any, here: Any):
        """Wait for the next left buffer, and say what it will hold."""
        T.barrier_wait(m.left_free[at[0]], at[1])
        if T.get_thread_binding() == 0:
            describe(m.block, at[0], count, flags, here[0], here[1] * HEADS)
            T.barrier_arrive(m.left_full[at[0]])

    @T.macro
    def copy(g: Any, m: Any, at: Any, query: Any, first: Any, used: Any, left: Any, thread: Any):
        """Start copying this thread's part of Q or of keys: the left half, and the right when its buffer is free."""
        source = T.alloc_local((4,), INT32)
        ring = T.access_ptr(m.ring, "r"), RING
        call("find_rows", source.data, query != 0, first, *ring, used, left, thread)
        rows = T.access_ptr(g.q, "r"), T.access_ptr(g.kv, "r"), query != 0, source.data, left, thread
        call(f"copy_rows<{half // 64}, {dim}, 0>", left_at(m, at[0]), *rows)
        if tail:
            call(f"copy_rows<{tail // 64}, {dim}, {value_dim}>", tail_at(m, at[0]), *rows)
        T.cp_async_barrier_noinc(m.left_full[at[0]])
        T.barrier_wait(m.right_free[at[2]], at[3])
        call(f"copy_rows<{half // 64}, {dim}, {half}>", right_at(m, at[2]), *rows)
        T.cp_async_barrier_noinc(m.right_full[at[2]])
        advance(at)

    def empty(g: Any, t: Any, h0: Any) -> Any:
        results = at_head("w", g.out, t, h0, 0), at_head("w", g.lse, t, h0)
        return call(f"empty_rows<{value_dim}>", *results, T.min(heads - h0, HEADS))

    @T.macro
    def gather(g: Any, m: Any):
        slot = T.alloc_local((STRETCH // 32,), INT32)
        length = T.alloc_local((1,), INT32)
        at = T.alloc_local((4,), INT32)
        here = T.alloc_local((2,), INT32)  # the task that is copied, and the next one
        next = T.alloc_local((2,), INT32)
        ahead = T.alloc_var(INT32, 0)  # whether `slot` is of the next one
        start = T.alloc_var(INT32, 0)  # and of which place in its row
        filled = T.alloc_var(INT32, 0)  # of the ring, over all rows
        used = T.alloc_var(INT32, 0)
        thread = T.alloc_var(INT32, call("thread", dtype=INT32))
        begin(at, 1)  # buffers are free at first
        for place in (here, next):
            place[0] = T.truncdiv(g.bx, g.groups)
            place[1] = T.truncmod(g.bx, g.groups)
        look(g, slot, length, thread, here[0], 0)
        while here[0] < tokens:
            query = T.alloc_var(INT32, 1)  # its Q is the first of what it has copied
            first = T.alloc_var(INT32, 0)
            begun = T.alloc_var(INT32, used)
            left = T.alloc_var(INT32, 1)
            follow(g, next)
            while left > 0:
                while ahead == 0 and filled - used <= 2 * BLOCK:
                    filled += scan(g, m, slot, filled, thread)
                    start += STRETCH
                    if start >= length[0]:
                        ahead = 1
                        start = 0
                    look(g, slot, length, thread, T.if_then_else(ahead == 0, here[0], next[0]), start)
                left = filled - used
                if left > 0:
                    flags = T.if_then_else(used == begun, FRESH, 0) + T.if_then_else(left <= BLOCK, LAST, 0)
                    announce(m, at, T.if_then_else(query != 0, QUERY, T.min(left, BLOCK)), flags, here)
                    if query != 0:
                        left = heads - here[1] * HEADS
                        first = here[0] * heads + here[1] * HEADS
                    copy(g, m, at, query, first, used, left, thread)
                    if query == 0:
                        used += T.min(left, BLOCK)
                        left -= BLOCK
                    else:
                        query = 0
                        first = T.truncdiv(here[0], g.queries) * g.keys
                        size = T.min(heads - next[1] * HEADS, HEADS) * (2 * dim)
                        wanted = next[0] < tokens and T.get_thread_binding() == 0
                        call("prefetch_query", at_head("r", g.q, next[0], next[1] * HEADS, 0), size, wanted)
            if filled == begun:
                empty(g, here[0], here[1] * HEADS)
            ahead = 0
            for i in T.unroll(2):
                here[i] = next[i]
        T.ptx_commit_group()
        T.ptx_wait_group(0)  # no thread ends while a copy of its is on its way
        announce(m, at, END, 0, here)
        T.barrier_arrive(m.left_full[at[0]])

    @T.macro
    def take_query(m: Any, q: Any, at: Any):
        """Q from its buffers into registers and to where it stays."""
        T.barrier_wait(m.right_full[at[2]], at[3])
        call(f"hold_query<{half}>", q.data, left_at(m, at[0]))
        call(f"hold_query<{held - half}>", T.access_ptr(q[half // 4], "w"), right_at(m, at[2]))
        call(f"keep_query<{(value_dim - held) // 64}>", kept_at(m, 0), right_at(m, at[2], held - half))
        if tail:
            call(f"keep_query<{tail // 64}>", kept_at(m, value_dim - held), tail_at(m, at[0]))
        release(m.left_free, at[0], 1, 1)
        release(m.right_free, at[2], 1, 1)

    def score_keys(m: Any, s: Any, q: Any, at: Any, sides: str) -> Any:
        tiles = kept_at(m, 0), left_at(m, at[0]), tail_at(m, at[0]), right_at(m, at[2])
        return call(f"score_keys<{sides}, {has_tail}>", s.data, q.data, *tiles)

    def softmax(g: Any, m: Any, s: Any, top: Any, total: Any, count: Any, flags: Any, turn: Any) -> Any:
        state = s.data, top.data, total.data, g.weight, count, flags % 2 != 0
        return call(f"softmax_block<{flag}>", *state, p_at(m, turn), rows_at(m.factor, turn))

    def close(g: Any, m: Any, top: Any, total: Any, query: Any, t: Any, h0: Any) -> Any:
        state = top.data, total.data, rows_at(m.inverse, query), at_sink(g.sink, g.use_sink, h0), g.use_sink != 0
        return call(f"close_rows<{flag}>", *state, at_head("w", g.lse, t, h0), heads - h0)

    @T.macro
    def score(g: Any, m: Any):
        q = T.alloc_local((held // 4,), "uint32")
        s = T.alloc_local((BLOCK // 2,), FP32)
        top = T.alloc_local((2,), FP32)
        total = T.alloc_local((2,), FP32)
        at = T.alloc_local((4,), INT32)
        turn = T.alloc_var(INT32, 0)
        query = T.alloc_var(INT32, 0)
        count = T.alloc_var(INT32, 0)
        flags = T.alloc_var(INT32, 0)
        fresh = T.alloc_var(INT32, 0)
        for i in T.unroll(2):
            top[i] = 0
            total[i] = 0
        begin(at, 0)
        T.barrier_wait(m.left_full[0], 0)
        count = field(m.block, 0, 0)
        while count != END:
            t = T.alloc_var(INT32, field(m.block, at[0], 2))
            h0 = T.alloc_var(INT32, field(m.block, at[0], 3))
            take_query(m, q, at)
            advance(at)
            fresh = 1
            flags = 0
            while flags < LAST:
                T.barrier_wait(m.left_full[at[0]], at[1])
                if lefts == rights:
                    T.barrier_wait(m.right_full[at[2]], at[3])
                T.fence_proxy_async()
                if fresh == 0:
                    release(m.p_full, (turn + 1) % 2, 4)  # the last block's, by the same fence
                if lefts == rights:
                    score_keys(m, s, q, at, "true, true")
                else:  # the right half comes later
                    score_keys(m, s, q, at, "true, false")
                    T.barrier_wait(m.right_full[at[2]], at[3])
                    T.fence_proxy_async()
                    score_keys(m, s, q, at, "false, true")
                fresh = 0
                count = field(m.block, at[0], 0)
                flags = field(m.block, at[0], 1)
                release(m.left_free, at[0], 32, 16)  # what was said of it; its keys, by the multiplier
                T.barrier_wait(m.p_free[turn % 2], turn // 2 % 2 ^ 1)
                if T.get_thread_binding() == GROUP:
                    describe(m.made, turn % 2, at[0] + 8 * at[2], flags, t, h0)
                call("wait_scores", s.data)
                if flags % 2 == 0:
                    release(m.scored, turn % 2)
                if flags >= LAST:
                    release(m.scored, (turn + 1) % 2)  # of the next query, nothing to wait for
                softmax(g, m, s, top, total, count, flags, turn)
                if flags >= LAST:
                    T.fence_proxy_async()
                    release(m.p_full, turn % 2, 4)
                    close(g, m, top, total, query, t, h0)
                    release(m.closed, query % 2, 4)
                    query += 1
                turn += 1
                advance(at)
            T.barrier_wait(m.left_full[at[0]], at[1])
            count = field(m.block, at[0], 0)
        T.barrier_wait(m.p_free[turn % 2], turn // 2 % 2 ^ 1)
        if T.get_thread_binding() == GROUP:
            describe(m.made, turn % 2, -1, 0, 0, 0)
        release(m.p_full, turn % 2, 4)

    def values_at(m: Any, group: int, buffers: Any) -> Any:
        return right_at(m, buffers // 8) if group else left_at(m, buffers % 8)

    @T.macro
    def hear(m: Any, what: Any, factor: Any, turn: Any):
        """Wait for P; of which block it is, and its factors."""
        T.barrier_wait(m.p_full[turn % 2], turn // 2 % 2)
        of = T.access_ptr(m.made[turn % 2, 0], "r", 4), rows_at(m.factor, turn)
        call("hear_block", *of, what.data, factor.data)

    @T.macro
    def multiply(g: Any, m: Any, group: int):
        acc = T.alloc_local((half // 2,), FP32)
        inverse = T.alloc_local((2,), FP32)
        factor = T.alloc_local((2,), FP32)
        what = T.alloc_local((2,), INT32)  # buffers, and flags
        turn = T.alloc_var(INT32, 0)
        query = T.alloc_var(INT32, 0)
        t = T.alloc_var(INT32, 0)
        h0 = T.alloc_var(INT32, 0)
        hear(m, what, factor, 0)
        while what[0] >= 0:
            call("rescale", acc.data, factor.data)
            T.barrier_wait(m.scored[(turn + 1) % 2], turn // 2 % 2)
            call("multiply_block", acc.data, p_at(m, turn), values_at(m, group, what[0]), what[1] % 2 != 0)
            T.wait_wgmma(0)
            if group:
                release(m.right_free, what[0] // 8, 32, 32)
            else:
                release(m.left_free, what[0] % 8, 32, 16)
            if what[1] >= LAST:
                T.barrier_wait(m.closed[query % 2], query // 2 % 2)
                call("get_rows", rows_at(m.inverse, query), inverse.data)
                t = field(m.made, turn % 2, 2)
                h0 = field(m.made, turn % 2, 3)
                query += 1
            release(m.p_free, turn % 2, 4)
            if what[1] >= LAST:
                out = at_head("w", g.out, t, h0, group * half)
                call("finish_rows", acc.data, inverse.data, out, heads - h0, value_dim)
            turn += 1
            hear(m, what, factor, turn)

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
        with T.Kernel(sms, threads=config.threads, prelude=prelude) as bx:
            groups = T.alloc_var(INT32, T.ceildiv(heads, HEADS))
            step_tokens = T.alloc_var(INT32, T.truncdiv(sms, groups))
            step_groups = T.alloc_var(INT32, T.truncmod(sms, groups))
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
                groups=groups,
                bx=bx,
                use_lengths=use_lengths,
                use_sink=use_sink,
                weight=scale * (1.0 if natural else LOG2E),
                step=(step_tokens, step_groups),
            )
            m = SimpleNamespace(
                left=T.alloc_shared((lefts, BLOCK * half), BF16),
                right=T.alloc_shared((rights, BLOCK * half), BF16),
                tail=T.alloc_shared((lefts, BLOCK * tail), BF16) if tail else None,
                p=T.alloc_shared((2, HEADS * BLOCK), BF16),
                kept=T.alloc_shared((HEADS * (dim - held),), BF16),
                factor=T.alloc_shared((2, HEADS), FP32, scope="shared"),
                inverse=T.alloc_shared((2, HEADS), FP32),
                ring=T.alloc_shared((RING,), INT32),
                block=T.alloc_shared((lefts, 4), INT32, scope="shared"),  # what buffers hold
                made=T.alloc_shared((2, 4), INT32, scope="shared"),  # of which block P is
                left_full=T.alloc_barrier([GROUP + 1] * lefts),  # each thread's copies, and what is said of them
                right_full=T.alloc_barrier([GROUP] * rights),
                left_free=T.alloc_barrier([GROUP] * lefts),  # by the left multiplier and the scorer; Q's, by it
                right_free=T.alloc_barrier([GROUP] * rights),
                p_full=T.alloc_barrier([QUADS] * 2),
                p_free=T.alloc_barrier([2 * QUADS] * 2),
                scored=T.alloc_barrier([WARPS] * 2),  # a block of the turn, or nothing that its products could disturb
                closed=T.alloc_barrier([QUADS] * 2),  # a query: its inverse sums are there
            )
            tx = T.get_thread_binding()
            if tx < GROUP:
                T.set_max_nreg(config.registers[0], 0)
                gather(g, m)
            elif tx < 2 * GROUP:
                T.set_max_nreg(config.registers[1], 1)
                score(g, m)
            elif tx < 3 * GROUP:
                T.set_max_nreg(config.registers[2], 1)
                multiply(g, m, 0)
            else:
                T.set_max_nreg(config.registers[2], 1)
                multiply(g, m, 1)

    return main
