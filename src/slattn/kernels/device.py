"""Pieces that the programs share: the gather of key rows, and how an accumulator is added to rows of dkv.

A block's slots are loaded by 8 threads a row: thread `tx` holds the slots of rows `tx // 8`, `tx // 8 + threads / 8`
and so on, and copies 16 bytes of every 128-byte piece of its rows.
"""

from typing import Any

import tilelang.language as T

# reduce_rows adds a [64, 32k] fp32 accumulator tile, as the tensor core leaves it (rows of a warp: 8 quads; a quad's
# lane holds 2 neighbouring columns of every 8), to rows of a table in global memory. Between the two quads that hold
# an even and the next odd row, lanes exchange pairs of columns so that each ends with 4 neighbouring columns of both
# rows and one instruction of a warp covers 4 rows x 128 bytes: an H200 reduces that shape at 3.75 TB/s, and the
# accumulator's own, 8 rows x 32 bytes, at 2.3.
PRELUDE = r"""
#include <cuda_bf16.h>
namespace slattn {
__device__ __forceinline__ void reduce4(bool counts, float* to, const float* v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0;"
               "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};}"
               ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"((int)counts) : "memory");
#else
  if (counts)
    for (int i = 0; i < 4; i++) atomicAdd(to + i, v[i]);
#endif
}

template <int kColumns>  // columns of the tile that one warp holds
__device__ __forceinline__ void reduce_rows(const float* tile, float* table, const int* rows, int64_t first, int dim,
                                            int column) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool odd = lane & 4, right = lane & 1;
  float even[kColumns / 32][2][4], uneven[kColumns / 32][2][4];  // 4 columns of an even row and of the next
#pragma unroll
  for (int group = 0; group < kColumns / 32; group++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float own[2], side[2], over[2], across[2];  // my pair, and what lanes ^1, ^4 and ^5 give
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* f = tile + group * 16 + half * 2 + i;
        const float keep_l = odd ? f[8] : f[0], keep_r = odd ? f[12] : f[4];
        const float give_l = odd ? f[0] : f[8], give_r = odd ? f[4] : f[12];
        own[i] = right ? keep_r : keep_l;
        side[i] = __shfl_xor_sync(0xffffffffu, right ? keep_l : keep_r, 1);
        over[i] = __shfl_xor_sync(0xffffffffu, right ? give_r : give_l, 4);
        across[i] = __shfl_xor_sync(0xffffffffu, right ? give_l : give_r, 5);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float mine_l = right ? side[i] : own[i], mine_r = right ? own[i] : side[i];
        const float their_l = right ? across[i] : over[i], their_r = right ? over[i] : across[i];
        even[group][half][i] = odd ? their_l : mine_l;
        even[group][half][2 + i] = odd ? their_r : mine_r;
        uneven[group][half][i] = odd ? mine_l : their_l;
        uneven[group][half][2 + i] = odd ? mine_r : their_r;
      }
    }
  }
  // All exchanges come before the first reduction, so that their latencies overlap.
  table += first * dim + column + (lane & 2) * 2 + (odd ? 16 : 0) + (right ? 8 : 0);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int2 row = *reinterpret_cast<const int2*>(rows + warp * 16 + half * 8 + lane / 8 * 2);
#pragma unroll
    for (int group = 0; group < kColumns / 32; group++) {
      reduce4(row.x >= 0, table + (int64_t)row.x * dim + group * 32, even[group][half]);
      reduce4(row.y >= 0, table + (int64_t)row.y * dim + group * 32, uneven[group][half]);
    }
  }
}

}  // namespace slattn
"""


BF16, FP32, INT32 = "bfloat16", "float32", "int32"
GRID_TOKENS = 32768  # queries along the grid's y axis, which ends at 65,535; the rest go along z


def grid(tokens: Any, heads: Any, head_tile: int) -> tuple[Any, Any, Any]:
    """Blocks of a launch: head groups fastest, so that those of one query, which read the same keys, run together."""
    return T.ceildiv(heads, head_tile), T.min(tokens, GRID_TOKENS), T.ceildiv(tokens, GRID_TOKENS)


@T.macro
def publish(wgmma: bool):
    """Make what every thread wrote into shared memory visible to all of them, and to the tensor cores."""
    if wgmma:
        T.fence_proxy_async()
    T.sync_threads()


@T.macro
def wait(wgmma: bool):
    """Wait for the products issued so far; where they are synchronous there is nothing to wait for."""
    if wgmma:
        T.wait_wgmma(0)


@T.macro
def load_heads(source: Any, tile: Any, t: Any, h0: Any, heads: Any):
    """tile = source[t, h0 : h0 + rows], zeros past the last head."""
    for i, j in T.Parallel(tile.shape[0], tile.shape[1]):
        tile[i, j] = T.if_then_else(h0 + i < heads, source[t, h0 + i, j], T.cast(0, BF16))


@T.macro
def store_heads(tile: Any, target: Any, t: Any, h0: Any, heads: Any, columns: int):
    """target[t, h0 : h0 + rows] = the first columns of tile, nothing past the last head."""
    for i, j in T.Parallel(tile.shape[0], columns):
        if h0 + i < heads:
            target[t, h0 + i, j] = tile[i, j]


@T.macro
def load_slots(slot: Any, indices: Any, t: Any, block_id: Any, count: Any, tx: Any, threads: int):
    """slot[r] = the index in this thread's r-th row of the block, -1 past the end of the row of slots."""
    for r in T.unroll(slot.shape[0]):
        k = block_id * (slot.shape[0] * threads // 8) + r * (threads // 8) + tx // 8
        slot[r] = -1
        if k < count:
            slot[r] = indices[t, k]


@T.macro
def gather_rows(slot: Any, kv: Any, tile: Any, rows: Any, buffer: Any, first: Any, keys: Any, tx: Any, threads: int):
    """Start copying the rows of kv that `slot` names into `tile[buffer % its buffers]`, as one asynchronous group.

    A slot that names no key becomes -1, in `rows[buffer]` too; its row of the tile is filled with zeros, and
    nothing is read for it.
    """
    for r in T.unroll(slot.shape[0]):
        if slot[r] >= keys or slot[r] < 0:
            slot[r] = -1
        if tx % 8 == 0:
            rows[buffer, r * (threads // 8) + tx // 8] = slot[r]
        for c in T.unroll(tile.shape[2] // 64):
            T.ptx_cp_async(
                T.access_ptr(tile[buffer % tile.shape[0], r * (threads // 8) + tx // 8, c * 64 + tx % 8 * 8], "w", 8),
                T.access_ptr(kv[first + T.max(slot[r], 0), c * 64 + tx % 8 * 8], "r", 8),
                8,
                slot[r] >= 0,
            )
    T.ptx_commit_group()


@T.macro
def reduce_rows(tile: Any, table: Any, rows: Any, buffer: Any, first: Any, column: Any, warps: int):
    """Add rows of an accumulator to table[first + rows[buffer], column:], where rows are not -1.

    Each 4 of the `warps` that hold `tile` [64, columns] have their share of its columns; `column` is where the
    calling thread's share begins.
    """
    T.call_extern(
        "handle",
        f"slattn::reduce_rows<{tile.shape[1] * 4 // warps}>",
        tile.data,
        T.access_ptr(table, "rw"),
        T.access_ptr(rows[buffer, 0], "r", tile.shape[0]),
        first,
        table.shape[1],
        column,
    )


@T.macro
def read_scales(g: Any, scale: Any, expected: Any, rows: Any, buffer: Any, first: Any):
    """scale[0:2] = those of the two rows of a block that a thread has in an accumulator, scale[2:4] their limits."""
    T.call_extern(
        "handle",
        "slattn::scales_of",
        scale.data,
        expected,
        T.access_ptr(g.scales, "r"),
        T.access_ptr(rows[buffer, 0], "r", rows.shape[1]),
        T.cast(first, "int64"),
    )


@T.macro
def add_exactly(
    g: Any, tile: Any, scale: Any, rows: Any, buffer: Any, first: Any, column: Any, part: tuple[int, int], dim: int
):
    """Add columns of an accumulator, `part`: how many and from which on, in the units of their rows."""
    T.call_extern(
        "handle",
        f"slattn::add_units<{part[0]}, {part[1]}>",
        tile.data,
        scale.data,
        T.access_ptr(g.scales, "rw"),
        T.access_ptr(g.grad_kv, "rw"),
        T.access_ptr(g.whole, "rw"),
        T.access_ptr(rows[buffer, 0], "r", rows.shape[1]),
        T.cast(first, "int64"),
        dim,
        column,
    )
