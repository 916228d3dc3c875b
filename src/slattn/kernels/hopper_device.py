"""CUDA helpers of the Hopper forward, on the tensor core's registers as they lie.

A thread holds two rows of every accumulator of its warpgroup, `row` and `row + 8`, and of them 2 neighbouring columns
of every 8; the four lanes of a quad share these rows. Arrays of two are one value for each row.

What a group publishes of a block beside P is 64 maxima and, for each row, the four lanes' sums of P.
"""

FORWARD_PRELUDE = r"""
namespace slattn {
__device__ __forceinline__ const void* at(const void* bf16, int64_t index) {
  return static_cast<const __nv_bfloat16*>(bf16) + index;
}

// copy_row starts copying 16 bytes of each of kPieces pieces of 64 columns, from `piece` on, of one row into a tile of
// 64 rows that the tensor core reads in its 128-byte swizzle; zeros where the row does not count, and nothing is read.
template <int kPieces>
__device__ __forceinline__ void copy_row(void* tile, const void* row, int index, int lane, int piece, bool counts) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + index * 128 + ((lane ^ index) & 7) * 16;
#pragma unroll
  for (int i = 0; i < kPieces; i++)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (piece + i) * 8192),
                 "l"(static_cast<const char*>(row) + (piece + i) * 128), "r"(counts ? 16 : 0) : "memory");
}

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ int quad_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

template <bool kNatural>
__device__ __forceinline__ float power(float x) {
  return kNatural ? __expf(x) : exp2f(x);
}

// The four lanes' sum, the same bits in each of them.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// scan adds to the ring, in their order, the slots of a stretch of 256 that name a key; every warp counts them all and
// writes its own 64. Returns how many there are, once all are written.
__device__ __forceinline__ int scan(const int* slots, int from, int count, int keys, int* ring, int filled) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int found = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const bool counts = from + i * 32 + lane < count && static_cast<unsigned>(slots[i]) < static_cast<unsigned>(keys);
    const unsigned vote = __ballot_sync(0xffffffffu, counts);
    if (counts && i / 2 == warp) ring[(filled + found + __popc(vote & ((1u << lane) - 1))) & 511] = slots[i];
    found += __popc(vote);
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  return found;
}

// What the gatherer says of a block: how many keys, flags, the query's number among those with keys, token, first head.
// TileLang's barriers keep asm volatile in its place, but not the compiler's own loads and stores: hence these.
__device__ __forceinline__ void describe(int* block, int count, int flags, int query, int t, int h0) {
  asm volatile("" ::: "memory");
  block[0] = count, block[1] = flags, block[2] = query, block[3] = t, block[4] = h0;
  asm volatile("" ::: "memory");
}

__device__ __forceinline__ int field(const int* block, int index) {
  return static_cast<const volatile int*>(block)[index];
}

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// empty_rows writes the results of a query without keys.
template <int kColumns>
__device__ __forceinline__ void empty_rows(void* bf16, float* lse, int rows) {
  const int thread = threadIdx.x % 128;
  for (int i = thread; i < rows * (kColumns / 8); i += 128) static_cast<uint4*>(bf16)[i] = make_uint4(0, 0, 0, 0);
  if (thread < rows) lse[thread] = __int_as_float(0x7f800000);
}

// softmax_block turns the scores of a block into P, in registers and in a tile in the tensor core's swizzle, and
// publishes maxima and sums. `factor` is what accumulators need where a row's maximum has grown. Each growth counts: to
// wait until one exceeds 2^8 saves a twentieth of the time, but the largest weights are then not exactly 1, and the
// error of the output is 4% larger.
template <bool kNatural>
__device__ __forceinline__ void softmax_block(float* s, void* bf16, float* top, float* sum, float* rest, float* factor,
                                              float scale, int count, bool fresh, void* tile, float* shared) {
  constexpr float kLowest = kNatural ? -1e30f : -3.4028234e38f;
  const int lane = threadIdx.x % 32, row = quad_row();
  unsigned* p = static_cast<unsigned*>(bf16);
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
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float best = fmaxf(s[half * 2], s[half * 2 + 1]);
#pragma unroll
    for (int i = 1; i < 8; i++) best = fmaxf(best, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2)) * scale;
    const float last = fresh ? kLowest : top[half];
    top[half] = fmaxf(best, last);
    factor[half] = fresh ? 1.0f : power<kNatural>(last - top[half]);
    sum[half] = fresh ? 0.0f : __fmul_rn(sum[half], factor[half]);
    rest[half] = fresh ? 0.0f : __fmul_rn(rest[half], factor[half]);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int half = i % 2;
    float e[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float x = s[i * 2 + j];
      e[j] = power<kNatural>(kNatural ? __fmul_rn(x, scale) - top[half] : __fmaf_rn(x, scale, -top[half]));
      sum[half] += e[j];
    }
    const __nv_bfloat162 two = __floats2bfloat162_rn(e[0], e[1]);
    p[i] = *reinterpret_cast<const unsigned*>(&two);
  }
  const int to = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + to * 128;
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address + (((i * 2 + lane / 16) ^ (to & 7)) * 16)),
                 "r"(p[i * 4]), "r"(p[i * 4 + 1]), "r"(p[i * 4 + 2]), "r"(p[i * 4 + 3]) : "memory");
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (lane % 4 == 0) shared[row + half * 8] = top[half];
    shared[64 + (row + half * 8) * 4 + lane % 4] = sum[half];
  }
}

// rescale_rows multiplies the rows of an accumulator of 2 * kColumns values a row, where any needs it.
template <int kColumns>
__device__ __forceinline__ void rescale_rows(float* tile, const float* factor) {
  if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) tile[i] *= factor[i / 2 % 2];
  }
}

// adopt_block takes over the maxima of a block of the other group, whose P comes next, and its sums: `rest` becomes
// the other group's sum, or, after a query's last block, the sum of both.
template <int kColumns, bool kNatural>
__device__ __forceinline__ void adopt_block(float* tile, float* top, float* sum, float* rest, const float* shared,
                                            bool fresh, bool last) {
  asm volatile("" ::: "memory");  // nothing is read before the barrier that says it is there
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = quad_row() + half * 8;
    const float next = shared[row];
    const float4 part = *reinterpret_cast<const float4*>(shared + 64 + row * 4);
    factor[half] = fresh ? 1.0f : power<kNatural>(top[half] - next);
    top[half] = next;
    rest[half] = (part.x + part.y) + (part.z + part.w);
    if (last && !fresh) rest[half] += __fmul_rn(quad_sum(sum[half]), factor[half]);
    sum[half] = fresh ? 0.0f : __fmul_rn(sum[half], factor[half]);
  }
  rescale_rows<kColumns>(tile, factor);
}

// close_rows makes of a query's sums what its accumulator is to be multiplied with, and writes the lse where asked.
template <bool kNatural>
__device__ __forceinline__ void close_rows(const float* top, const float* total, float* inverse, const float* sink,
                                           bool use_sink, float* lse, bool write, int rows) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = quad_row() + half * 8;
    const float sum = total[half];
    inverse[half] = sum;
    if (row < rows) {
      if (use_sink) inverse[half] += power<kNatural>(kNatural ? sink[row] - top[half] : sink[row] * kLog2e - top[half]);
      if (write && threadIdx.x % 4 == 0)
        lse[row] = sum == 0.0f ? __int_as_float(0x7f800000)
                               : (kNatural ? top[half] * kLog2e + log2f(sum) : top[half] + log2f(sum)) / kLog2e;
    }
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / inverse[half];
  }
}

template <int kColumns>
__device__ __forceinline__ void finish_rows(float* tile, const float* inverse, void* bf16, int rows, int stride) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) tile[i] *= inverse[i / 2 % 2];
  store_rows<kColumns>(tile, bf16, rows, stride);
}
}  // namespace slattn
"""
