"""CUDA helpers that Hopper's programs share, and those of its backward, and what TileLang needs to call one."""

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

// zero is 0, which the compiler does not know: descriptors of the tensor core's that are made with it are not those of
// an earlier product, which it would keep in 10 registers.
__device__ __forceinline__ int zero() {
  int x;
  asm volatile("mov.u32 %0, 0;" : "=r"(x));
  return x;
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// arrive_warp arrives at a barrier of TileLang's once for a warp, after all that its lanes did.
template <class Barrier>
__device__ __forceinline__ void arrive_warp(const Barrier& barrier) {
  __syncwarp();
  asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}"
               ::"r"(shared_address(&barrier)), "r"(thread() % 32) : "memory");
}

__device__ __forceinline__ int noted(const int* notes, int index) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(shared_address(notes) + index * 4) : "memory");
  return x;
}

// A block's 64 key rows are copied by 128 threads, 8 to a row, each 16 bytes of every 128: thread t has the rows t / 8,
// t / 8 + 16, + 32 and + 48. key_rows reads their numbers.
__device__ __forceinline__ void key_rows(const int* rows, int* row) {
#pragma unroll
  for (int r = 0; r < 4; r++) row[r] = rows[thread() / 8 + r * 16];
}

// gather_columns starts copying kPieces pieces of 64 columns of those rows, from the kFirst-th on, into a tile that the
// tensor core reads in its 128-byte swizzle; zeros for the row -1, and nothing is read.
template <int kPieces, int kFirst, int kDim>
__device__ __forceinline__ void gather_columns(void* tile, const void* table, const int* rows) {
  const unsigned t = thread();
  const unsigned to = shared_address(tile) + t / 8 * 128 + ((t ^ t / 8) & 7) * 16 + kFirst * 8192;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    int row = rows[r];
    asm volatile("mov.u32 %0, %0;" : "+r"(row));  // else its place, in 64 bits, would be kept from piece to piece
    const auto* from = static_cast<const __nv_bfloat16*>(table) + static_cast<int64_t>(max(row, 0)) * kDim +
                       kFirst * 64 + t % 8 * 8;
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + r * 2048 + i * 8192),
                   "l"(from + i * 64), "r"(row >= 0 ? 16 : 0) : "memory");
  }
}

// copy_numbers starts copying the numbers of a block's 64 key rows.
__device__ __forceinline__ void copy_numbers(int* to, const int* from) {
  const unsigned t = thread();
  asm volatile("{.reg .pred p; setp.lt.u32 p, %2, 16; @p cp.async.ca.shared.global [%0], [%1], 16;}"
               ::"r"(shared_address(to + t * 4)), "l"(from + t * 4), "r"(t) : "memory");
}

// load_heads brings what 64 heads, of which `heads` are left, have: [64] each the lse over the keys alone, base 2; what
// the sink leaves of P; that times delta, less the gradient of lse. P is made without the sink, and what that leaves of
// it is multiplied in later: a gradient of lse acts on it so, and where a sink has nearly all of the weight fp16 holds
// nothing else. Without `use_delta`, add_deltas follows.
__device__ __forceinline__ void load_heads(float* stats, const float* lse, const float* lse2, const float* delta,
                                           const float* grad_lse, bool use_delta, bool use_grad_lse, int heads) {
  const int t = thread(), h = min(t % 64, heads - 1);
  const bool counts = t < heads;
  const float keys = counts ? lse[h] * 1.4426950408889634f : INFINITY;
  const float left = keys < INFINITY ? exp2f(fminf(keys - lse2[h], 0.f)) : 0.f;
  const float shift = (use_delta ? left * delta[h] : 0.f) - (use_grad_lse ? grad_lse[h] : 0.f);
  asm volatile("{.reg .pred p; setp.lt.s32 p, %1, 64; @p st.shared.f32 [%0], %2; @p st.shared.f32 [%0 + 256], %3;"
               "@p st.shared.f32 [%0 + 512], %4;}"
               ::"r"(shared_address(stats + t)), "r"(t), "f"(keys), "f"(left), "f"(counts ? shift : 0.f) : "memory");
}

// add_product adds that of two pairs of bf16, each the upper half of a float's bits.
__device__ __forceinline__ void add_product(float& sum, unsigned x, unsigned y) {
  sum = fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), sum);
  sum = fmaf(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u), sum);
}

// add_deltas makes delta = <out, dO> of a task's heads, a warp a head: kWarps at a time, of those the `from`-th to the
// `to`-th. What the task's note says is read anew for each, and there is no branch of some lanes, after which the
// compiler would keep in as many registers what is the same in all of them: the gatherer has none left.
template <int kWarps, int kColumns, int kUnroll>
__device__ __forceinline__ void add_deltas(float* stats, float* delta, const void* out, const void* grad_out,
                                           const volatile int* note, int from, int to, int heads) {
#pragma unroll 1
  for (int i = from; i < to; i++) {
    const int left = min(heads - note[1], 64), mine = i * kWarps + thread() / 32, h = min(mine, left - 1);
    const int64_t row = static_cast<int64_t>(note[0]) * heads + note[1] + h;
    float sum = 0.f;
#pragma unroll kUnroll
    for (int c = 0; c < kColumns; c += 256) {
      const int64_t at = row * (kColumns / 8) + (c / 8 + thread() % 32);
      const uint4 os = static_cast<const uint4*>(out)[at], gs = static_cast<const uint4*>(grad_out)[at];
      add_product(sum, os.x, gs.x), add_product(sum, os.y, gs.y);
      add_product(sum, os.z, gs.z), add_product(sum, os.w, gs.w);
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    sum = stats[mine] < INFINITY ? sum : 0.f;
    const float shift = fmaf(stats[64 + mine], sum, stats[128 + mine]);
    __syncwarp();  // all lanes have read what one writes
    const int counts = thread() % 32 == 0 && mine < left;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %4, 0; @p st.global.f32 [%0], %1; @p st.shared.f32 [%2], %3;}"
                 ::"l"(delta + row), "f"(sum), "r"(shared_address(stats + 128 + mine)), "f"(shift), "r"(counts)
                 : "memory");
  }
}

// The two halves of a block's softmax gradient, on [64 heads, 64 slots] fp32 accumulators. Between them P is kept in
// fp16, at 2^15 times its value, for half of the registers: 11 bits are 8 times finer than the bf16 of the products.
// Weights below 2^-29 have fewer, in steps of 2^-39.
// stats is what load_heads makes.
constexpr float kUnit = 32768.f;

// pack_probabilities makes P = exp2(s * scale - lse) of the first `left` slots, zeros for the others; of a thread's 16
// pairs those from kFrom to kTo.
template <int kFrom, int kTo>
__device__ __forceinline__ void pack_probabilities(const float* s, unsigned* packed, const float* stats, float scale,
                                                   int left) {
  const unsigned t = thread();
  const float* lse = stats + t / 32 % 4 * 16 + t % 32 / 4;
  const float shift[2] = {15.f - lse[0], 15.f - lse[8]};
  left -= t % 4 * 2;
#pragma unroll
  for (int i = kFrom; i < kTo; i++) {
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
        pair[i] = bf16_pair(f[0], f[1]);
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
