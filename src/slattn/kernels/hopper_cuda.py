"""CUDA helpers of the Hopper backward and of the small programs around it, and what TileLang needs to call one."""

from typing import Any

import tilelang.language as T

from slattn.kernels.device import PRELUDE

HOPPER_PRELUDE = (
    PRELUDE
    + r"""
#include <cuda_fp16.h>
namespace slattn {
// thread is threadIdx.x, read anew each time: what is computed from it is not kept in registers over a loop.
__device__ __forceinline__ unsigned thread() {
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// A block's 64 key rows are copied by 128 threads, 8 to a row, each 16 bytes of every 128: thread t has the rows t / 8,
// t / 8 + 16, + 32 and + 48. key_rows reads their numbers, and says where in the table (of `dim` columns) it reads.
__device__ __forceinline__ void key_rows(const int* rows, int dim, int* row, int64_t* source) {
  const unsigned t = thread();
#pragma unroll
  for (int r = 0; r < 4; r++) {
    row[r] = rows[t / 8 + r * 16];
    source[r] = static_cast<int64_t>(max(row[r], 0)) * dim + t % 8 * 8;
  }
}

// gather_columns starts copying kPieces pieces of 64 columns of those rows, from the kFirst-th on, into a tile that the
// tensor core reads in its 128-byte swizzle; zeros for the row -1, and nothing is read.
template <int kPieces, int kFirst>
__device__ __forceinline__ void gather_columns(void* tile, const void* table, const int* row, const int64_t* source) {
  const unsigned t = thread();
  const unsigned to = shared_address(tile) + t / 8 * 128 + ((t ^ t / 8) & 7) * 16 + kFirst * 8192;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const auto* from = static_cast<const __nv_bfloat16*>(table) + source[r] + kFirst * 64;
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + r * 2048 + i * 8192),
                   "l"(from + i * 64), "r"(row[r] >= 0 ? 16 : 0) : "memory");
  }
}

// The two halves of a block's softmax gradient, on [64 heads, 64 slots] fp32 accumulators. Between them P is kept in
// fp16, at 2^15 times its value, for half of the registers: 11 bits are 8 times finer than the bf16 of the products.
// Weights below 2^-29 have fewer, in steps of 2^-39.
// stats is, of the heads, [64] each: lse over the keys alone, base 2; what the sink leaves of P; that times delta, less
// the gradient of lse.
constexpr float kUnit = 32768.f;

// pack_probabilities makes P = exp2(s * scale - lse) of the first `left` slots, zeros for the others.
__device__ __forceinline__ void pack_probabilities(const float* s, unsigned* packed, const float* stats, float scale,
                                                   int left) {
  const unsigned t = thread();
  const float* lse = stats + t / 32 % 4 * 16 + t % 32 / 4;
  const float shift[2] = {15.f - lse[0], 15.f - lse[8]};
  left -= t % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float p = exp2f(fminf(fmaf(s[i * 2], scale, shift[i % 2]), 15.f));
    const float q = exp2f(fminf(fmaf(s[i * 2 + 1], scale, shift[i % 2]), 15.f));
    const __half2 two = __floats2half2_rn(i / 2 * 8 < left ? p : 0.f, i / 2 * 8 + 1 < left ? q : 0.f);
    packed[i] = *reinterpret_cast<const unsigned*>(&two);
  }
}

__device__ __forceinline__ unsigned bf16_pair(float x, float y) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&two);
}

__device__ __forceinline__ void store_matrices(unsigned to, const unsigned* pairs) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
#endif
}

// store_gradients writes P and dS as bf16, in the tensor core's 128-byte swizzle. Where the row is empty, dS is 0
// whatever dP is.
__device__ __forceinline__ void store_gradients(const unsigned* packed, const float* dp, const float* stats,
                                                float scale, bool counts, void* p_tile, void* ds_tile) {
  const unsigned t = thread();
  const float* left = stats + 64 + t / 32 % 4 * 16 + t % 32 / 4;
  const float unit[2] = {left[0] / kUnit, left[8] / kUnit}, factor[2] = {unit[0] * scale, unit[1] * scale};
  const float shift[2] = {-left[64] * (scale / kUnit), -left[72] * (scale / kUnit)};
  const unsigned at = t % 16 * 128 + t / 32 % 4 * 2048 + ((t / 16 ^ t) & 1) * 16 + (t & 6) * 16;
  const unsigned p_to = shared_address(p_tile) + at, ds_to = shared_address(ds_tile) + at;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned p[4], ds[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&packed[i * 4 + j]));
      p[j] = bf16_pair(two.x * unit[j % 2], two.y * unit[j % 2]);
      ds[j] = bf16_pair(two.x * fmaf(dp[i * 8 + j * 2], factor[j % 2], shift[j % 2]),
                        two.y * fmaf(dp[i * 8 + j * 2 + 1], factor[j % 2], shift[j % 2]));
      ds[j] = counts ? ds[j] : 0;
    }
    store_matrices(p_to ^ i * 32, p);
    store_matrices(ds_to ^ i * 32, ds);
  }
}

__device__ __forceinline__ void copy_16(void* tile, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::
               "r"(shared_address(tile)), "l"(from) : "memory");
}

// compact_row writes the numbers of the keys that a query's slots name, in their order, then -1 up to a multiple of 64
// and at least 64. One warp.
__device__ __forceinline__ void compact_row(const int* indices, int slots, int keys, int first, int* rows,
                                            int* count) {
  const int lane = threadIdx.x % 32;
  int written = 0;
  for (int k = 0; k < slots; k += 128) {
    int index[4];
#pragma unroll
    for (int i = 0; i < 4; i++) index[i] = k + i * 32 + lane < slots ? indices[k + i * 32 + lane] : -1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool counts = index[i] >= 0 && index[i] < keys;
      const unsigned all = __ballot_sync(0xffffffffu, counts);
      if (counts) rows[written + __popc(all & ((1u << lane) - 1))] = first + index[i];
      written += __popc(all);
    }
  }
  for (int i = written + lane; i < max((written + 63) / 64 * 64, 64); i += 32) rows[i] = -1;
  if (lane == 0) *count = written;
}

// add_rows adds 32 or 64 columns, from the kFirst-th on, of a [64, 64] fp32 accumulator tile to columns of a table from
// the kColumn-th on, where the rows are not -1. The table keeps every 32 columns in an order of its own,
// `column_in_table` of collect.py: 4 columns that a lane holds stand together, so that the quads of two rows need only
// exchange half of their values for an instruction of a warp to cover 4 rows x 128 bytes.
template <int kColumns, int kFirst, int kColumn, int kDim>
__device__ __forceinline__ void add_rows(const float* tile, float* table, const int* rows) {
  const unsigned t = thread();
  const bool odd = t & 4;
  table += kColumn + t % 8 * 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int2 row = *reinterpret_cast<const int2*>(rows + t / 32 % 4 * 16 + half * 8 + t % 32 / 8 * 2);
#pragma unroll
    for (int group = 0; group < kColumns / 32; group++) {
      float kept[4], got[4], even[4], uneven[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* f = tile + kFirst / 2 + group * 16 + half * 2 + i / 2 * 4 + i % 2;
        kept[i] = odd ? f[8] : f[0];
        got[i] = __shfl_xor_sync(0xffffffffu, odd ? f[0] : f[8], 4);
        even[i] = odd ? got[i] : kept[i];
        uneven[i] = odd ? kept[i] : got[i];
      }
      reduce4(row.x >= 0, table + static_cast<int64_t>(row.x) * kDim + group * 32, even);
      reduce4(row.y >= 0, table + static_cast<int64_t>(row.y) * kDim + group * 32, uneven);
    }
  }
}

// store_rows writes a [64, 32k] fp32 accumulator tile as bf16 rows in global memory. The 4 lanes of a quad, which hold
// 2 neighbouring columns of every 8, exchange so that each ends with 8 neighbouring columns: stores of 16 bytes, and
// not of 4.
template <int kColumns>
__device__ __forceinline__ void store_rows(const float* tile, void* bf16, int rows, int stride) {
  auto* to = static_cast<__nv_bfloat16*>(bf16);
  const int warp = thread() / 32 % 4, lane = thread() % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int group = 0; group < kColumns / 32; group++) {
      unsigned pair[4];  // of this row: the columns that this lane holds of 4 pieces of 8
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* f = tile + group * 16 + i * 4 + half * 2;
        __nv_bfloat162 two = __floats2bfloat162_rn(f[0], f[1]);
        pair[i] = *reinterpret_cast<unsigned*>(&two);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {  // transpose the quad's 4 x 4 pairs, a bit of the lane at a time
        const bool high = lane & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i & bit) continue;
          const unsigned other = __shfl_xor_sync(0xffffffffu, high ? pair[i] : pair[i + bit], bit);
          if (high) pair[i] = other; else pair[i + bit] = other;
        }
      }
      if (row < rows)
        *reinterpret_cast<uint4*>(to + (int64_t)row * stride + group * 32 + lane % 4 * 8) =
            make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
}
}  // namespace slattn
"""
)


@T.macro
def store_rows(tile: Any, target: Any, t: Any, h0: Any, heads: Any, column: int):
    """target[t, h0 : h0 + 64, column:] = an accumulator [64, columns] that 4 warps hold, nothing past the last head."""
    T.call_extern(
        "handle",
        f"slattn::store_rows<{tile.shape[1]}>",
        tile.data,
        T.access_ptr(target[t, h0, column], "w"),
        heads - h0,
        target.shape[2],
    )
