"""The backward device program, portable from SM80 on.

One block of threads owns one query and `head_tile` of its heads, and walks over the row's slots `block` at a time.
All five products keep the keys, or the columns, on the rows of the tensor core's tile, so that 16, 32 and 64 heads
share one program and 16 heads waste nothing:

    S^T  = K Q^T             [block, heads]       P^T  = exp2(S^T * scale * log2(e) - lse2)
    dP^T = V dO^T            [block, heads]       dS^T = P^T * (dP^T - delta) * scale
    dQ^T += K^T dS^T         [D, heads]           kept in registers over the whole row
    dKV  = P^T dO + dS^T Q   [block, columns]     reduced into the table of dkv from registers

dQ comes before dKV, so that the key buffer is free while dKV is formed: the gather of the next block then runs
behind dKV and its reductions. Slots that do not count are neither loaded (the gather fills in zeros) nor reduced.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from slattn.kernels.config import BackwardConfig
from slattn.kernels.device import (
    BF16,
    FP32,
    GRID_TOKENS,
    INT32,
    PRELUDE,
    add_exactly,
    gather_rows,
    grid,
    load_heads,
    load_slots,
    publish,
    read_scales,
    reduce_rows,
    store_heads,
    wait,
)
from slattn.kernels.exact_cuda import EXACT_PRELUDE
from slattn.problem import LOG2E


def backward(config: BackwardConfig) -> Any:
    """The program for one configuration; every size but the tile and the columns is a run-time value.

    Parameters of the program, all contiguous: Q [T, H, D], KV [B * N, D], GradOut [T, H, d_v], Indices [T, K],
    Lengths [T] (any length, not read, unless use_lengths), Lse2 [T, H] (base 2, sink included, +inf for an empty
    row), Delta [T, H], GradQ [T, H, D] (written), GradKV [B * N, D] fp32, or if `deterministic` [B * N, D / 2] int64
    (added to; any number of rows without `config.dkv`), queries S, keys N, use_lengths,
    scale, Lse and GradLse [T, H] (natural, keys only; read with `config.grad_lse` only), and, of any length and not
    read unless `deterministic`, Expected [T] and Scales [B * N] fp32 and Whole [B * N, D] int64 (added to), as in
    `slattn.kernels.exact_cuda`.
    """
    head_tile, block, threads = config.head_tile, config.block, config.threads
    dim, value_dim, chunk = config.head_dim, config.value_dim, config.chunk
    parts = config.query_parts if config.dq else ()
    gemm = T.wgmma_gemm if config.wgmma else T.gemm
    tokens, rows, heads, slots = T.dynamic("tokens, rows, heads, slots")
    lengths, sums, expecting, units, wholes = T.dynamic("lengths, sums, expecting, units, wholes")
    warps, exact = threads // 32, config.deterministic
    prelude = PRELUDE + (EXACT_PRELUDE if exact else "")

    @T.macro
    def add(g: Any, tile: Any, row_s: Any, buffer: Any, first: Any, column: Any):
        """Add a block's rows of dKV, of the columns from `column` on, to the keys'."""
        if exact:
            part = tile.shape[1] * 4 // warps, 0
            add_exactly(g, tile, g.scale, row_s, buffer, first, column, part, dim)
        else:
            reduce_rows(tile, g.grad_kv, row_s, buffer, first, column, warps)

    @T.prim_func
    def main(
        Q: T.Tensor((tokens, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        GradOut: T.Tensor((tokens, heads, value_dim), BF16),
        Indices: T.Tensor((tokens, slots), INT32),
        Lengths: T.Tensor((lengths,), INT32),
        Lse2: T.Tensor((tokens, heads), FP32),
        Delta: T.Tensor((tokens, heads), FP32),
        GradQ: T.Tensor((tokens, heads, dim), BF16),
        GradKV: T.Tensor((sums, dim // 2) if exact else (sums, dim), "int64" if exact else FP32),
        queries: T.int32,
        keys: T.int32,
        use_lengths: T.int32,
        scale: T.float32,
        Lse: T.Tensor((tokens, heads), FP32),
        GradLse: T.Tensor((tokens, heads), FP32),
        Expected: T.Tensor((expecting,), FP32),
        Scales: T.Tensor((units,), FP32),
        Whole: T.Tensor((wholes, dim), "int64"),
    ):
        with T.Kernel(*grid(tokens, heads, head_tile), threads=threads, prelude=prelude) as (
            bx,
            by,
            bz,
        ):
            g = SimpleNamespace(
                grad_kv=GradKV,
                scales=Scales,
                whole=Whole,
                scale=T.alloc_local((4,), FP32),
                expected=T.alloc_local((1,), FP32),
            )
            q_s = T.alloc_shared((head_tile, dim), BF16)
            do_s = T.alloc_shared((head_tile, value_dim), BF16)
            kv_s = T.alloc_shared((1, block, dim), BF16)
            p_s = T.alloc_shared((block, head_tile), BF16)
            ds_s = T.alloc_shared((block, head_tile), BF16)
            row_s = T.alloc_shared((2, block), INT32)
            lse_s = T.alloc_shared((head_tile,), FP32)
            delta_s = T.alloc_shared((head_tile,), FP32)
            lse_keys_s = T.alloc_shared((head_tile,), FP32)
            dlse_s = T.alloc_shared((head_tile,), FP32)
            s = T.alloc_fragment((block, head_tile), FP32)
            dp = T.alloc_fragment((block, head_tile), FP32)
            dkv = T.alloc_fragment((block, chunk), FP32)
            tail = T.alloc_fragment((block, max(dim - value_dim, 64)), FP32)
            dq = [T.alloc_fragment((width, head_tile), FP32) for _, width in parts]
            slot = T.alloc_local((block * 8 // threads,), INT32)
            count = T.alloc_var(INT32, slots)
            t = T.alloc_var(INT32, bz * GRID_TOKENS + by)
            h0 = T.alloc_var(INT32, bx * head_tile)
            first = T.alloc_var(INT32)

            tx = T.get_thread_binding()
            if t < tokens:
                first = t // queries * keys
                if exact:
                    g.expected[0] = Expected[t]
                if use_lengths != 0:
                    count = T.min(T.max(Lengths[t], 0), slots)

                load_slots(slot, Indices, t, 0, count, tx, threads)
                gather_rows(slot, KV, kv_s, row_s, 0, first, keys, tx, threads)
                load_heads(Q, q_s, t, h0, heads)
                load_heads(GradOut, do_s, t, h0, heads)
                for h in T.Parallel(head_tile):
                    lse_s[h] = T.if_then_else(h0 + h < heads, Lse2[t, h0 + h], T.infinity(FP32))
                    delta_s[h] = T.if_then_else(h0 + h < heads, Delta[t, h0 + h], 0.0)
                    if config.grad_lse:
                        lse_keys_s[h] = T.if_then_else(h0 + h < heads, Lse[t, h0 + h] * LOG2E, T.infinity(FP32))
                        dlse_s[h] = T.if_then_else(h0 + h < heads, GradLse[t, h0 + h], 0.0)
                for part in dq:
                    T.fill(part, 0)

                for b in T.serial(T.ceildiv(count, block)):
                    load_slots(slot, Indices, t, b + 1, count, tx, threads)
                    T.ptx_wait_group(0)
                    publish(config.wgmma)
                    gemm(kv_s[0, :, :], q_s, s, transpose_B=True, clear_accum=True)
                    gemm(kv_s[0, :, 0:value_dim], do_s, dp, transpose_B=True, clear_accum=True)
                    wait(config.wgmma)
                    for i, j in T.Parallel(block, head_tile):
                        s[i, j] = s[i, j] * (scale * LOG2E)
                        dp[i, j] = T.exp2(T.min(s[i, j] - lse_s[j], 0.0)) * (dp[i, j] - delta_s[j])
                        if config.grad_lse:
                            dp[i, j] += T.exp2(T.min(s[i, j] - lse_keys_s[j], 0.0)) * dlse_s[j]
                        s[i, j] = T.exp2(T.min(s[i, j] - lse_s[j], 0.0))
                    for i, j in T.Parallel(block, head_tile):
                        s[i, j] = T.if_then_else(row_s[b % 2, i] >= 0, s[i, j], 0.0)
                        dp[i, j] = T.if_then_else(row_s[b % 2, i] >= 0, dp[i, j] * scale, 0.0)
                    T.copy(s, p_s)
                    T.copy(dp, ds_s)
                    publish(config.wgmma)
                    for part, (start, width) in zip(dq, parts):
                        policy = (
                            T.GemmWarpPolicy.FullRow if width % (2 * threads // 4) == 0 else T.GemmWarpPolicy.Square
                        )
                        gemm(kv_s[0, :, start : start + width], ds_s, part, transpose_A=True, policy=policy)
                    wait(config.wgmma)
                    T.sync_threads()
                    gather_rows(slot, KV, kv_s, row_s, (b + 1) % 2, first, keys, tx, threads)
                    if exact:
                        read_scales(g, g.scale, g.expected[0], row_s, b % 2, first)
                    # reduce_rows wants a warp to hold 16 rows, and each 4 warps a share of the columns: FullRow.
                    for c in T.serial(value_dim // chunk if config.dkv else 0):
                        columns = slice(c * chunk, (c + 1) * chunk)
                        gemm(p_s, do_s[:, columns], dkv, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                        gemm(ds_s, q_s[:, columns], dkv, policy=T.GemmWarpPolicy.FullRow)
                        wait(config.wgmma)
                        add(g, dkv, row_s, b % 2, first, c * chunk + tx // 128 * 64)
                    if config.dkv and dim > value_dim:
                        gemm(ds_s, q_s[:, value_dim:dim], tail, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                        wait(config.wgmma)
                        add(g, tail, row_s, b % 2, first, value_dim + tx // 128 * (8192 // threads))
                T.ptx_wait_group(0)
                if config.dq:
                    T.sync_threads()
                    for part, (start, width) in zip(dq, parts):
                        for i, j in T.Parallel(width, head_tile):
                            q_s[j, start + i] = part[i, j]
                    T.sync_threads()
                    store_heads(q_s, GradQ, t, h0, heads, dim)

    return main
