"""CUDA helpers of deterministic mode: sums whose order does not matter, because integers add up exactly.

Each query says beforehand how large a part it expects to add, and each row of dkv gets a unit: the sum of what its
queries expect is less than 2^31 units. A part is rounded to whole units; two columns' numbers of them, 32 bits each,
are added at once, as one integer of 64 bits, by the same number of bytes as fp32. A number larger than its query
expected goes into a table of 64-bit integers, in the same units. How good the expectation was decides how many take
that detour and how fine the unit is; the bits depend on an order in neither case.
"""

EXACT_PRELUDE = r"""
namespace slattn {
// expected_part is what a query of which `count` slots count expects of a part; one warp. Of a slot with all of the
// weight a head's is
//   e = sqrt(pi) * mean |dO| * what the sink leaves + |lse_part|
// where sqrt(pi / 2) brings a mean to the root mean square, sqrt(2) adds dS q to P dO, and lse_part is what the
// gradient of lse adds, which no sink makes less. Of all heads it is the larger of max e and, as if those of a group
// were independent, sum e / sqrt(heads * groups). The result is 4 times that, or 2048 times what one of equal slots has
// of it, whichever is less.
__device__ __forceinline__ float expected_part(int count, const float* norm, const float* lse, const float* lse2,
                                               const float* lse_part, bool use_lse_part, int heads, int columns,
                                               int groups) {
  float sum = 0.f, most = 0.f;
  for (int h = threadIdx.x % 32; h < heads; h += 32) {
    const float left = lse[h] < INFINITY ? exp2f(fminf(lse[h] * 1.4426950408889634f - lse2[h], 0.f)) : 0.f;
    float head = norm[h] * 1.7724539f / columns * left;
    if (use_lse_part) head += fabsf(lse_part[h]);
    sum += head;
    most = fmaxf(most, head);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, i);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
  }
  most = fmaxf(most, sum * rsqrtf(static_cast<float>(heads) * groups)) * fminf(2048.f / count, 4.f);
  return fminf(fmaxf(most, 0x1p-96f), 0x1p90f);
}

// for_slots calls f(row in the window, query) for each slot that counts of a share of the queries, a warp a query.
// Before a query's slots it calls g(query, how many count).
template <typename F, typename G>
__device__ __forceinline__ void for_slots(const int* indices, const int* lengths, int from, int to, int64_t low,
                                          int window, int slots, int queries, int keys, bool use_lengths, F f, G g) {
  const int lane = threadIdx.x % 32;
  for (int t = from + threadIdx.x / 32; t < to; t += blockDim.x / 32) {
    const int64_t first = static_cast<int64_t>(t / queries) * keys - low;  // of its batch entry, in the window
    if (first + keys <= 0 || first >= window) continue;
    const int* index = indices + static_cast<int64_t>(t) * slots;
    const int length = use_lengths ? min(max(lengths[t], 0), slots) : slots;
    int count = 0;
    for (int k = lane; k < length; k += 32) count += index[k] >= 0 && index[k] < keys;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) count += __shfl_xor_sync(0xffffffffu, count, i);
    g(t, count);
#pragma unroll 4
    for (int k = lane; k < length; k += 32) {
      const int64_t at = first + index[k];
      if (index[k] >= 0 && index[k] < keys && at >= 0 && at < window) f(at, t);
    }
  }
}

// tally notes what each query expects, and for each row of kv in a window how many parts a share of the queries adds to
// it and the largest that they expect: first in shared memory, [2, window], because atomics there cost a tenth.
__device__ __forceinline__ void tally(const int* indices, const int* lengths, const float* norm, const float* lse,
                                      const float* lse2, const float* lse_part, float* expected, int* size, int* parts,
                                      int* shared, int from, int to, int64_t low, int window, int64_t rows, int slots,
                                      int heads, int queries, int keys, bool use_lengths, bool use_lse_part,
                                      int columns, int groups) {
  for (int i = threadIdx.x; i < 2 * window; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  int largest = 0;
  for_slots(
      indices, lengths, from, to, low, window, slots, queries, keys, use_lengths,
      [&](int64_t at, int) {
        atomicAdd(shared + at, groups);
        if (shared[window + at] < largest) atomicMax(shared + window + at, largest);  // ordered as their bits are
      },
      [&](int t, int count) {
        const int64_t h = static_cast<int64_t>(t) * heads;
        expected[t] = expected_part(count, norm + h, lse + h, lse2 + h, lse_part + h, use_lse_part, heads, columns,
                                    groups);
        largest = __float_as_int(expected[t]);
      });
  __syncthreads();
  for (int i = threadIdx.x; i < window && low + i < rows; i += blockDim.x)
    if (shared[i] != 0) {
      atomicAdd(parts + low + i, shared[i]);
      atomicMax(size + low + i, shared[window + i]);
    }
}

// weigh sums, for each row of kv in a window, what the parts are that a share of the queries adds to it, each as 128ths
// of the largest, rounded up.
__device__ __forceinline__ void weigh(const int* indices, const int* lengths, const float* expected, const int* size,
                                      int64_t* weight, int* shared, int from, int to, int64_t low, int window,
                                      int64_t rows, int slots, int queries, int keys, bool use_lengths, int groups) {
  for (int i = threadIdx.x; i < window; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  for_slots(
      indices, lengths, from, to, low, window, slots, queries, keys, use_lengths,
      [&](int64_t at, int t) {
        const float share = expected[t] / __int_as_float(size[low + at]);
        atomicAdd(shared + at, static_cast<int>(ceilf(fminf(share, 1.f) * 128.f)) * groups);
      },
      [](int, int) {});
  __syncthreads();
  for (int i = threadIdx.x; i < window && low + i < rows; i += blockDim.x)
    if (shared[i] != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(weight) + low + i, static_cast<unsigned long long>(shared[i]));
}

// unit_of makes a row's scale, 1 / its unit, of the largest that is expected of a part, of all in 128ths of it, and of
// how many there are: what is expected of all is 2^31 units, but of a part on average no more than 2^21. How many bits
// that number of parts has stands in the low bits of the scale's mantissa.
__device__ __forceinline__ float unit_of(int size, int64_t weight, int parts) {
  const int bits = 32 - __clz(parts);
  const float all = fmaxf(__int_as_float(size), 0x1p-96f) * (static_cast<float>(weight) / 128.f + 0x1p-7f);
  const float units = fminf(fmaf(-0.5f, static_cast<float>(parts), 0x1.f6p30f), 0x1p21f * static_cast<float>(parts));
  const float scale = __fdiv_rn(fmaxf(units, 1.f), all) * __int_as_float((max(bits - 12, 0) + 127) << 23);
  return __int_as_float((__float_as_int(scale) & ~31) | bits);
}

// limit_of is the size from which on a number takes the detour: what its query expects, less in a row of more than 2^12
// parts, for which the unit would be coarse, and always below 2^21 units, which half of a float's mantissa holds.
__device__ __forceinline__ float limit_of(float expected, float scale) {
  const int bits = __float_as_int(scale), fewer = max(bits % 32 - 12, 0);
  return fminf(__int_as_float(__float_as_int(expected) - (fewer << 23)), __int_as_float((274 - (bits >> 23)) << 23));
}

__device__ __forceinline__ unsigned this_thread() {  // read anew: what comes of it is not kept in registers over a loop
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// scales_of brings the scales of the two rows of an accumulator tile of [64, ..] of which a thread has columns, and
// their limits.
__device__ __forceinline__ void scales_of(float* scale, float expected, const float* scales, const int* rows,
                                          int64_t first) {
  const unsigned t = this_thread();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    scale[half] = __ldg(scales + first + max(rows[t / 32 % 4 * 16 + half * 8 + t % 32 / 4], 0));
    scale[2 + half] = limit_of(expected, scale[half]);
  }
}

__device__ __forceinline__ void add_pair(bool counts, char* to, unsigned low, unsigned high) {
  asm volatile("{.reg .pred p; .reg .b64 two; setp.ne.s32 p, %3, 0; mov.b64 two, {%1, %2};"
               "@p red.relaxed.gpu.global.add.u64 [%0], two;}"
               ::"l"(to), "r"(low), "r"(high), "r"((int)counts) : "memory");
}

__device__ __forceinline__ void add_word(void* to, unsigned long long word) {
  add_pair(true, static_cast<char*>(to), static_cast<unsigned>(word), static_cast<unsigned>(word >> 32));
}

// A number x of units goes as the bits of the float 1.5 * 2^23 + x, which are those of 1.5 * 2^23, plus x: `sum_of`
// takes away what that is for all parts of a row.
constexpr unsigned long long kZero = 0x4b400000;

__device__ __forceinline__ unsigned units_of(float x, float scale) {
  return __float_as_uint(__fmaf_rn(x, scale, 12582912.f));
}

// peel_rows moves, of columns from the kFirst-th on of such a tile of fp32, which stands for the columns of dkv from
// `column` on, the numbers beyond the limit from `table` into the table `whole`. One of more than 2^42 units, or that
// is none, makes the row's scale NaN, and with it the whole row. Seldom called, and short: one number at a time.
template <int kColumns, int kFirst>
__device__ __forceinline__ void peel_rows(const float* tile, const float* scale, float* scales, void* table,
                                          void* whole, const int* rows, int64_t first, int dim, int column) {
  const unsigned t = this_thread();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = rows[t / 32 % 4 * 16 + half * 8 + t % 32 / 4];
    const int64_t number = (first + row) * dim + column + kFirst;
    unsigned beyond = 0;
#pragma unroll
    for (int i = 0; i < kColumns / 4; i++)
      if (!(fabsf(tile[kFirst / 2 + i / 2 * 4 + half * 2 + i % 2]) < scale[2 + half])) beyond |= 1u << i;
    if (row < 0 || !(scale[half] > 0.f)) continue;
#pragma unroll 1
    while (beyond) {
      const int next = 31 - __clz(beyond);
      beyond ^= 1u << next;
      float x = 0.f;
#pragma unroll
      for (int i = 0; i < kColumns / 4; i++)
        if (i == next) x = tile[kFirst / 2 + i / 2 * 4 + half * 2 + i % 2];
      const float units = x * scale[half];
      if (!(fabsf(units) < 0x1p42f)) {  // 2^20 of these fit in 62 bits
        scales[first + row] = NAN;
        break;
      }
      const int word = next / 8 * 16 + next / 2 % 2 * 8 + next / 4 % 2 * 4 + t % 4;  // word_of in collect.py
      add_word(static_cast<int64_t*>(whole) + number + next / 2 * 8 + t % 4 * 2 + next % 2,
               static_cast<unsigned long long>(__float2ll_rn(units)));
      add_word(static_cast<int64_t*>(table) + number / 2 + word, (kZero - units_of(x, scale[half])) << next % 2 * 32);
    }
  }
}

// add_units adds those columns, in units, to the rows of `table`, which keeps every 32 columns as 16 integers of two
// (see `word_of` in collect.py). The quads of two rows exchange half of theirs, so that an instruction of a warp covers
// 4 rows x 64 bytes. Whether a number is beyond its limit is asked last, beside the additions: these can be taken back.
template <int kColumns, int kFirst>
__device__ __forceinline__ void add_units(const float* tile, const float* scale, float* scales, void* table,
                                          void* whole, const int* rows, int64_t first, int dim, int column) {
  const unsigned t = this_thread();
  const bool odd = t & 4;
  auto* to = static_cast<char*>(table) + (first * dim + column + kFirst) * 4 + t % 8 * 8;
  float squares[2] = {0.f, 0.f};  // cheaper than the largest; where limit^2 is no normal float it says nothing
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int2 row = *reinterpret_cast<const int2*>(rows + t / 32 % 4 * 16 + half * 8 + t % 32 / 8 * 2);
    char* even = to + static_cast<int64_t>(row.x) * dim * 4;
    char* uneven = to + static_cast<int64_t>(row.y) * dim * 4;
#pragma unroll
    for (int i = 0; i < kColumns / 16; i++) {
      const float* f = tile + kFirst / 2 + i / 2 * 16 + i % 2 * 4 + half * 2;
      unsigned kept[2], got[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const unsigned low = units_of(f[k], scale[half]), high = units_of(f[8 + k], scale[half]);
        kept[k] = odd ? high : low;
        got[k] = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
        squares[half] = fmaf(f[8 + k], f[8 + k], fmaf(f[k], f[k], squares[half]));
      }
      add_pair(row.x >= 0, even + i * 64, odd ? got[0] : kept[0], odd ? got[1] : kept[1]);
      add_pair(row.y >= 0, uneven + i * 64, odd ? kept[0] : got[0], odd ? kept[1] : got[1]);
    }
  }
  if (__builtin_expect(!(squares[0] < scale[2] * scale[2] && squares[1] < scale[3] * scale[3]), 0))
    peel_rows<kColumns, kFirst>(tile, scale, scales, table, whole, rows, first, dim, column);
}

// sum_of is a column's sum, out of the integer that it shares with another (`high`: its upper half) and its `whole`.
__device__ __forceinline__ float sum_of(int64_t word, int parts, bool high, float scale, int64_t whole) {
  const auto both = static_cast<int64_t>(static_cast<unsigned long long>(word) - parts * (kZero << 32 | kZero));
  const int low = static_cast<int>(both);
  const int64_t sum = whole + (high ? (both - low) >> 32 : low);
  return __fdiv_rn(static_cast<float>(sum), scale);
}
}  // namespace slattn
"""
