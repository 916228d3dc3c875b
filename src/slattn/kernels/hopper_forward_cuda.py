"""CUDA helpers of the Hopper forward, on the tensor core's registers as they lie.

A thread holds two rows of every accumulator of its warpgroup, `row` and `row + 8`, and of them 2 neighbouring columns
of every 8; the four lanes of a quad share these rows. Arrays of two are one value for each row.

A tile is 64 rows of 64 columns of bf16, 8 KB, in the 128-byte swizzle; wider matrices are tiles one after the other.
"""

from typing import Any

import tilelang.language as T

from slattn.kernels.device import INT32

FORWARD_PRELUDE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
namespace slattn {
constexpr float kLog2e = 1.4426950408889634f;

// arrive arrives at a barrier of TileLang's, several times at once.
template <class Barrier>
__device__ __forceinline__ void arrive(const Barrier& barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}

// What one group tells another of a block, and of rows, by a warp's or a quad's first lane, which arrives at the
// barriers that order it: for its own accesses, since compute-sanitizer's racecheck credits no lane with another's.
// TileLang's barriers keep asm volatile in its place, but not the compiler's own loads and stores: hence these, and
// volatile below.
__device__ __forceinline__ void describe(int* block, int what, int flags, int t, int h0) {
  asm volatile("" ::: "memory");
  block[0] = what, block[1] = flags, block[2] = t, block[3] = h0;
  asm volatile("" ::: "memory");
}

__device__ __forceinline__ int field(const int* block, int index) {
  int what = 0;
  if (threadIdx.x % 32 == 0) what = static_cast<const volatile int*>(block)[index];
  return __shfl_sync(0xffffffffu, what, 0);
}

__device__ __forceinline__ int quad_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

__device__ __forceinline__ void put_rows(float* shared, const float* rows) {
  if (threadIdx.x % 4 == 0) shared[quad_row()] = rows[0], shared[quad_row() + 8] = rows[1];
}

__device__ __forceinline__ void get_rows(const float* shared, float* rows) {
  const volatile float* from = shared + quad_row();
  if (threadIdx.x % 4 == 0) rows[0] = from[0], rows[1] = from[8];
#pragma unroll
  for (int half = 0; half < 2; half++) rows[half] = __shfl_sync(0xffffffffu, rows[half], 0, 4);
}

// hold_query reads tiles of Q as fragments of the left operand, 32 registers for each 128 columns.
template <int kColumns>
__device__ __forceinline__ void hold_query(uint32_t* q, const void* tiles) {
  asm volatile("" ::: "memory");
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const unsigned from = shared_address(tiles) + row * 128;
#pragma unroll
  for (int i = 0; i < kColumns / 16; i++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q[i * 4]), "=r"(q[i * 4 + 1]), "=r"(q[i * 4 + 2]), "=r"(q[i * 4 + 3])
                 : "r"(from + i / 4 * 8192 + ((i % 4 * 2 + lane / 16) ^ (row & 7)) * 16) : "memory");
}

// keep_query copies tiles of Q to where they stay; before it no thread of the group reads what was there, after it all
// have read what they copy.
template <int kTiles>
__device__ __forceinline__ void keep_query(void* to, const void* from) {
  sync_group(2);
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    uint4 q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = static_cast<const uint4*>(from)[threadIdx.x % 128 + (tile * 4 + i) * 128];
#pragma unroll
    for (int i = 0; i < 4; i++) static_cast<uint4*>(to)[threadIdx.x % 128 + (tile * 4 + i) * 128] = q[i];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_group(2);
}

// A tile as the tensor core reads it along its rows: 16 columns on are 2 further, a tile 512. kStride: between tiles,
// where it reads along the columns.
template <int kStride>
__device__ __forceinline__ tl::GmmaDescriptor descriptor(const void* tile) {
  tl::GmmaDescriptor d;
  tl::initialize_wgmma_descriptor<1, kStride, 64>(d, static_cast<__nv_bfloat16*>(const_cast<void*>(tile)));
  return d;
}

__host__ __device__ constexpr int step_16(int k) { return k / 4 * 512 + k % 4 * 2; }

template <int kSteps>
__device__ __forceinline__ void score_held(float* s, const uint32_t* q, uint64_t keys, bool first) {
  constexpr auto k16 = tl::DataType::kBFloat16;
#pragma unroll
  for (int k = 0; k < kSteps; k++)
    tl::wgmma_rs<k16, k16, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
        q + k * 4, keys + step_16(k), reinterpret_cast<uint32_t*>(s), k > 0 || !first);
}

template <int kSteps>
__device__ __forceinline__ void score_kept(float* s, uint64_t kept, uint64_t keys) {
  constexpr auto k16 = tl::DataType::kBFloat16;
#pragma unroll
  for (int k = 0; k < kSteps; k++)
    tl::wgmma_ss<k16, k16, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
        kept + step_16(k), keys + step_16(k), reinterpret_cast<uint32_t*>(s), true);
}

// score_keys starts adding to the scores of a block: of the left 256 columns and the tail, of the right 256, or of all.
// q holds 384 columns; the other 128 and the tail are kept. The keys came by the generic proxy, the tensor core reads
// by the other: a fence has to stand between.
template <bool kLeft, bool kRight, bool kTail>
__device__ __forceinline__ void score_keys(float* s, uint32_t* q, const void* kept, const void* left, const void* tail,
                                           const void* right) {
  const uint64_t rest = uint64_t(descriptor<1>(kept));
  tl::warpgroup_fence_operand(q, 96);
  tl::warpgroup_fence_operand(s, 32);
  tl::warpgroup_arrive();
  if (kLeft) {
    score_held<16>(s, q, uint64_t(descriptor<1>(left)), true);
    if (kTail) score_kept<4>(s, rest + step_16(8), uint64_t(descriptor<1>(tail)));
  }
  if (kRight) {
    const uint64_t keys = uint64_t(descriptor<1>(right));
    score_held<8>(s, q + 64, keys, false);
    score_kept<8>(s, rest, keys + step_16(8));
  }
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(s, 32);
  tl::warpgroup_fence_operand(q, 96);
}

__device__ __forceinline__ void wait_scores(float* s) {
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(s, 32);
}

template <bool kNatural>
__device__ __forceinline__ float power(float x) {
  return kNatural ? __expf(x) : exp2f(x);
}

// The four lanes' sum, the same bits in each of them.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// softmax_block turns the scores of a block into P, in a tile, and leaves for the rows' accumulators the factor that
// their maxima's growth asks for. Maxima follow at once: the largest weights are then exactly 1, which bf16 holds.
template <bool kNatural>
__device__ __forceinline__ void softmax_block(float* s, float* top, float* sum, float scale, int count, bool fresh,
                                              void* tile, float* factors) {
  constexpr float kLowest = kNatural ? -1e30f : -3.4028234e38f;
  const int lane = threadIdx.x % 32;
  if (scale < 0) {
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = -s[i];
    scale = -scale;
  }
  scale = fmaxf(scale, 1.2e-38f);  // a masked score of -inf times nothing would be no number
  if (count < 64) {
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= count) s[i] = -__int_as_float(0x7f800000);
  }
  float best[2], factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) best[half] = fmaxf(s[half * 2], s[half * 2 + 1]);
#pragma unroll
  for (int i = 1; i < 8; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      best[half] = fmaxf(best[half], fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int half = 0; half < 2; half++) best[half] = fmaxf(best[half], __shfl_xor_sync(0xffffffffu, best[half], bit));
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float last = fresh ? kLowest : top[half];
    top[half] = fmaxf(__fmul_rn(best[half], scale), last);
    factor[half] = fresh ? 1.0f : power<kNatural>(last - top[half]);
    sum[half] = fresh ? 0.0f : __fmul_rn(sum[half], factor[half]);
  }
  put_rows(factors, factor);
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float shift = top[i / 2 % 2];
    s[i] = power<kNatural>(kNatural ? __fmul_rn(s[i], scale) - shift : __fmaf_rn(s[i], scale, -shift));
  }
  const int thread = again(threadIdx.x), to = thread / 32 % 4 * 16 + thread % 16;
  const unsigned address = shared_address(tile) + to * 128;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    unsigned p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = bf16_pair(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
    store_matrices(address + (((k * 2 + thread / 16 % 2) ^ (to & 7)) * 16), p);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float part[8];
#pragma unroll
    for (int i = 0; i < 8; i++) part[i] = s[i * 4 + half * 2] + s[i * 4 + half * 2 + 1];
    sum[half] += ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  }
}

// close_rows makes of a query's sums what its accumulators are to be multiplied with, and writes the lse.
template <bool kNatural>
__device__ __forceinline__ void close_rows(const float* top, const float* total, float* inverses, const float* sink,
                                           bool use_sink, float* lse, int rows) {
  float inverse[2], sinks[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {  // both at once
    const int row = quad_row() + half * 8;
    sinks[half] = use_sink && row < rows ? __ldg(sink + row) : -__int_as_float(0x7f800000);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = quad_row() + half * 8;
    const float sum = quad_sum(total[half]);
    inverse[half] = sum + power<kNatural>(sinks[half] * (kNatural ? 1.0f : kLog2e) - top[half]);
    if (row < rows && threadIdx.x % 4 == 0)
      lse[row] = sum == 0.0f ? __int_as_float(0x7f800000)
                             : (kNatural ? top[half] * kLog2e + log2f(sum) : top[half] + log2f(sum)) / kLog2e;
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / inverse[half];
  }
  put_rows(inverses, inverse);
}

// empty_rows writes the results of a query without keys.
template <int kColumns>
__device__ __forceinline__ void empty_rows(void* bf16, float* lse, int rows) {
  const int thread = threadIdx.x % 128;
  for (int i = thread; i < rows * (kColumns / 8); i += 128) static_cast<uint4*>(bf16)[i] = make_uint4(0, 0, 0, 0);
  if (thread < rows) lse[thread] = __int_as_float(0x7f800000);
}

// hear_block reads of which block P is, and the factors of two rows, in one go: busy memory answers late.
__device__ __forceinline__ void hear_block(const int* block, const float* factors, int* what, float* factor) {
  asm volatile("{.reg .pred p, q; setp.eq.u32 p, %6, 0; setp.eq.u32 q, %7, 0;"
               "@p ld.volatile.shared.v2.s32 {%0, %1}, [%4];"
               "@q ld.volatile.shared.f32 %2, [%5]; @q ld.volatile.shared.f32 %3, [%5 + 32];}"
               : "=&r"(what[0]), "=&r"(what[1]), "=&f"(factor[0]), "=&f"(factor[1])
               : "r"(shared_address(block)), "r"(shared_address(factors + quad_row())), "r"(threadIdx.x % 32),
                 "r"(threadIdx.x % 4) : "memory");
#pragma unroll
  for (int half = 0; half < 2; half++) {
    what[half] = __shfl_sync(0xffffffffu, what[half], 0);
    factor[half] = __shfl_sync(0xffffffffu, factor[half], 0, 4);
  }
}

// rescale multiplies the rows of an accumulator that need it: each growth counts, most rows do not grow, and lanes that
// rest save power.
__device__ __forceinline__ void rescale(float* acc, const float* factor) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (factor[half] != 1.0f) {
#pragma unroll
      for (int i = 0; i < 64; i++) acc[i / 2 * 4 + half * 2 + i % 2] *= factor[half];
    }
  }
  __syncwarp();
}

// multiply_block adds P V, of 64 keys and 256 columns, to an accumulator.
__device__ __forceinline__ void multiply_block(float* acc, const void* p, const void* v, bool fresh) {
  constexpr auto k16 = tl::DataType::kBFloat16;
  const tl::GmmaDescriptor a = descriptor<1>(p), b = descriptor<512>(v);
  tl::warpgroup_fence_operand(acc, 128);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      tl::wgmma_ss<k16, k16, tl::DataType::kFloat32, 64, 128, 16, false, true, 1, 1>(
          uint64_t(a + k * 2), uint64_t(b + k * 128 + i * 1024), reinterpret_cast<uint32_t*>(acc + i * 64),
          k > 0 || !fresh);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 128);
}

__device__ __forceinline__ void finish_rows(float* acc, const float* inverse, void* bf16, int rows, int stride) {
#pragma unroll
  for (int i = 0; i < 128; i++) acc[i] *= inverse[i / 2 % 2];
  store_rows<256>(acc, bf16, rows, stride);
}
}  // namespace slattn
"""


def call(name: str, *arguments: Any, dtype: str = "handle") -> Any:
    """A call of one of these helpers."""
    return T.call_extern(dtype, f"slattn::{name}", *arguments)


def describe(table: Any, index: Any, *what: Any) -> Any:
    """Write an entry of four numbers."""
    return call("describe", T.access_ptr(table[index, 0], "w", 4), *what)


def field(table: Any, index: Any, item: int) -> Any:
    """One of them."""
    return call("field", T.access_ptr(table[index, 0], "r", 4), item, dtype=INT32)


def at_head(mode: str, tensor: Any, t: Any, h0: Any, *column: int) -> Any:
    """Where a token's heads from h0 on begin in a tensor, from a column on if it has columns."""
    place = (t, h0, *column)
    return T.access_ptr(tensor[place], mode)


def at_sink(sink: Any, use_sink: Any, h0: Any) -> Any:
    """Where the sinks of the heads from h0 on begin; without sinks, something that is there."""
    return T.access_ptr(sink[T.if_then_else(use_sink != 0, h0, 0)], "r")


@T.macro
def release(barriers: Any, index: Any, lanes: int = 32, count: int = 1):
    """After all that a warp's lanes did, arrive `count` times by one of each `lanes`."""
    T.call_extern("handle", "__syncwarp")
    if T.get_thread_binding() % lanes == 0:
        call("arrive", barriers[index], count)
