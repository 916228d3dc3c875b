// Runs the helpers of slattn/kernels/exact_cuda.py, which test_exact_cuda.py leaves in prelude.h, with a host's threads
// taking turns in place of a GPU's. Prints what is wrong; nothing where nothing is.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

using std::max;
using std::min;
#define __device__
#define __forceinline__ inline
struct int2 { int x, y; };
struct { unsigned x; } threadIdx, blockDim;

template <class To, class From> To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
float __int_as_float(int x) { return bits<float>(x); }
int __float_as_int(float x) { return bits<int>(x); }
float __uint_as_float(unsigned x) { return bits<float>(x); }
unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
float rsqrtf(float x) { return 1 / std::sqrt(x); }
int __clz(int x) { return x ? __builtin_clz(x) : 32; }
int __clzll(int64_t x) { return x ? __builtin_clzll(x) : 64; }
float __ldg(const float* p) { return *p; }
float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
float __fdiv_rn(float a, float b) { return a / b; }
long long __float2ll_rn(float x) { return fabsf(x) < 0x1p63f ? llrintf(x) : INT64_MAX; }
template <class T, class U> void atomicAdd(T* p, U x) { *p += x; }
void atomicMax(int* p, int x) { *p = max(*p, x); }

const int kMost = 128;
ucontext_t host, threads[kMost];
std::vector<char> stacks[kMost];
std::function<void()> work;
uint32_t given[2][kMost];
int count, arrived, generation, shuffles[kMost];
bool done[kMost];

unsigned thread_now() { return threadIdx.x; }
void next_thread() { swapcontext(&threads[threadIdx.x], &host); }
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  const int t = threadIdx.x, side = shuffles[t]++ % 2;
  given[side][t] = bits<uint32_t>(x);
  next_thread();
  return bits<T>(given[side][t ^ mask]);
}
void __syncthreads() {
  const int now = generation;
  if (++arrived == count) arrived = 0, generation++;
  while (generation == now) next_thread();
}
void entry() {
  work();
  done[threadIdx.x] = true;
  next_thread();
}
void launch(int n, std::function<void()> f) {
  work = f, count = blockDim.x = n;
  for (int t = 0; t < n; t++) {
    stacks[t].resize(1 << 16);
    done[t] = false, shuffles[t] = 0;
    getcontext(&threads[t]);
    threads[t].uc_stack.ss_sp = stacks[t].data();
    threads[t].uc_stack.ss_size = stacks[t].size();
    makecontext(&threads[t], entry, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (int t = 0; t < n; t++)
      if (!done[t]) threadIdx.x = t, any = true, swapcontext(&host, &threads[t]);
  }
}

#include "prelude.h"
using namespace slattn;

std::mt19937 random_bits(1);
int draw(int from, int to) { return from + static_cast<int>(random_bits() % unsigned(to - from + 1)); }
#define CHECK(condition, ...) ((condition) ? 0 : (printf("%s: ", #condition), printf(__VA_ARGS__), puts("")))

// The numbers of units that a row's queries may add at most sum up to less than 2^31, whatever they expect.
void check_units() {
  for (int trial = 0; trial < 200000; trial++) {
    const int kinds = draw(1, 4), shift = draw(-60, 90);
    std::vector<std::pair<int64_t, float>> queries;  // how many, and what each expects
    for (int i = 0; i < kinds; i++)
      queries.push_back({draw(1, 1 << draw(0, 24)), fminf(exp2f(max(shift - draw(0, 20), -60)) * draw(1 << 20, (1 << 21) - 1) * 0x1p-20f, 0x1p90f)});
    int64_t parts = 0, weight = 0;
    float largest = 0;
    for (auto [n, expected] : queries) parts += n, largest = max(largest, expected);
    for (auto [n, expected] : queries) weight += n * int64_t(ceilf(fminf(expected / largest, 1.f) * 128.f));
    const float scale = unit_of(__float_as_int(largest), weight, int(parts));
    int64_t units = 0;
    for (auto [n, expected] : queries) {
      const float limit = limit_of(expected, scale);
      CHECK(limit > 0 && limit <= expected && std::isnormal(scale) && std::isnormal(1 / scale), "limit %g", limit);
      const int64_t most = int(__float_as_uint(fmaf(limit, scale, 12582912.f)) - 0x4b400000u);
      CHECK(most < 1 << 22, "%lld units", (long long)most);
      units += n * most;
    }
    CHECK(units < 1ll << 31, "%lld units of %lld parts", (long long)units, (long long)parts);
  }
}

float part_of(int kind, float limit) {
  const float sign = draw(0, 1) ? 1 : -1;
  if (kind == 0) return sign * limit * draw(0, 1 << 20) * 0x1p-20f;
  if (kind == 1) return limit;
  if (kind == 2) return -limit;
  if (kind == 3) return nextafterf(sign * draw(0, 9) * limit, draw(0, 1) ? INFINITY : -INFINITY);
  return sign * draw(1 << 20, 1 << 21) * limit * exp2f(draw(-42, -2));
}

// A row's sum is that of its parts' whole units, whatever the parts are.
template <int kColumns, int kFirst> void check_sums(int kind, int dim, int column, int blocks, int size) {
  const int first = 3, keys = 7, all = first + keys;
  std::vector<unsigned long long> table(all * dim / 2), whole(all * dim);
  std::vector<int> parts(all);
  std::vector<float> scales(all);
  std::vector<int2> rows(blocks * 32);
  int* row = &rows[0].x;
  for (int i = 0; i < blocks * 64; i++) {
    row[i] = draw(-1, keys - 1);
    if (row[i] >= 0) parts[first + row[i]]++;
  }
  const float largest = fminf(fmaxf(__int_as_float(size), 0x1p-96f), 0x1p90f);
  for (int n = 0; n < all; n++) scales[n] = unit_of(__float_as_int(largest), parts[n] * 128ll, parts[n]);
  const auto before = scales;
  std::map<int, int64_t> units;
  for (int b = 0; b < blocks; b++, row += 64) {
    std::vector<float> tile(128 * 32);
    const float expected = fmaxf(largest * exp2f(-draw(0, 9)), 0x1p-96f);
    for (int t = 0; t < 128; t++)
      for (int i = 0; i < 32; i++) {
        const int r = row[t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4], c = i / 4 * 8 + t % 4 * 2 + i % 2;
        if (r < 0) continue;
        const float scale = scales[first + r], limit = limit_of(expected, scale);
        const float x = tile[t * 32 + i] = part_of(kind, limit);
        if (c < kFirst || c >= kFirst + kColumns) continue;
        // beyond the limit the product is rounded to fp32 first; below it the sum with 1.5 * 2^23 is exact before
        const double many = fabsf(x) >= limit ? double(x * scale) : double(x) * scale;
        units[(first + r) * dim + column + c] += int64_t(nearbyint(many));
      }
    launch(128, [&] {
      float scale[4];
      scales_of(scale, expected, scales.data(), row, first);
      add_units<kColumns, kFirst>(&tile[threadIdx.x * 32], scale, scales.data(), table.data(), whole.data(), row, first,
                                  dim, column);
    });
  }
  CHECK(scales == before, "kind %d: a row became NaN", kind);
  for (int n = 0; n < all; n++)
    for (int c = column + kFirst; c < column + kFirst + kColumns; c++) {
      const int at = n * dim + c, word = c % 32 / 8 % 2 * 8 + c % 32 / 16 * 4 + c % 8 / 2;  // word_of in collect.py
      const float got = sum_of(table[n * dim / 2 + c / 32 * 16 + word], parts[n], c % 2, scales[n], whole[at]);
      const float want = float(units[at]) / scales[n];
      CHECK(got == want, "kind %d row %d column %d: %g, not %g", kind, n, c, got, want);
    }
}

float expected(int slots, const float* norm, const float* lse, const float* lse2, const float* lse_part, bool use_lse_part,
               int heads, int groups) {
  float all[32];
  launch(32, [&] { all[thread_now()] = expected_part(slots, norm, lse, lse2, lse_part, use_lse_part, heads, 64, groups); });
  return all[0];
}

// Every window and share counts what a loop over all slots counts.
void check_tally() {
  const int batch = draw(1, 4), queries = draw(1, 6), keys = draw(1, 50), slots = draw(1, 70), window = draw(1, 64);
  const int heads = draw(1, 100), groups = draw(1, 4), shares = draw(1, 9), tokens = batch * queries;
  const bool use_lengths = draw(0, 1), use_lse_part = draw(0, 1);
  std::vector<int> index(tokens * slots), length(tokens), size(batch * keys), parts(size), shared(2 * window);
  std::vector<float> norm(tokens * heads), lse(norm), lse2(norm), lse_part(norm), expect(tokens);
  std::vector<int64_t> weight(batch * keys);
  for (int& i : index) i = draw(0, 9) ? draw(-9, keys + 9) : draw(0, 1) ? INT32_MAX : INT32_MIN;
  for (int& n : length) n = draw(0, 9) ? draw(-2, slots + 2) : draw(0, 1) ? INT32_MAX : INT32_MIN;
  for (int i = 0; i < tokens * heads; i++) {
    norm[i] = draw(0, 999), lse_part[i] = draw(-9, 9), lse[i] = draw(-50, 50);
    lse2[i] = lse[i] * 1.442695f + draw(0, 30);
  }
  const int share = (tokens + shares - 1) / shares;
  for (int64_t low = 0; low < batch * keys; low += window)
    for (int i = 0; i < shares; i++)
      launch(64, [&] {
        tally(index.data(), length.data(), norm.data(), lse.data(), lse2.data(), lse_part.data(), expect.data(),
              size.data(), parts.data(), shared.data(), i * share, min(i * share + share, tokens), low, window, batch * keys, slots,
              heads, queries, keys, use_lengths, use_lse_part, 64, groups);
      });
  for (int64_t low = 0; low < batch * keys; low += window)
    for (int i = 0; i < shares; i++)
      launch(64, [&] {
        weigh(index.data(), length.data(), expect.data(), size.data(), weight.data(), shared.data(), i * share,
              min(i * share + share, tokens), low, window, batch * keys, slots, queries, keys, use_lengths, groups);
      });
  std::vector<int> want_parts(batch * keys), want_size(batch * keys);
  std::vector<int64_t> want_weight(batch * keys);
  std::vector<std::pair<int, float>> parts_of;  // row, expected
  for (int t = 0; t < tokens; t++) {
    std::vector<int> named;
    for (int k = 0; k < (use_lengths ? min(length[t], slots) : slots); k++)
      if (index[t * slots + k] >= 0 && index[t * slots + k] < keys) named.push_back(index[t * slots + k]);
    const int h = t * heads;
    const float most = expected(named.size(), &norm[h], &lse[h], &lse2[h], &lse_part[h], use_lse_part, heads, groups);
    for (int n : named) {
      want_parts[t / queries * keys + n] += groups;
      want_size[t / queries * keys + n] = max(want_size[t / queries * keys + n], bits<int>(most));
      parts_of.push_back({t / queries * keys + n, most});
    }
  }
  for (auto [n, most] : parts_of) want_weight[n] += int(ceilf(fminf(most / bits<float>(want_size[n]), 1.f) * 128.f)) * groups;
  CHECK(parts == want_parts && size == want_size && weight == want_weight, "%d keys, %d slots, window %d", keys, slots, window);
}

// lse is over the keys alone: what its gradient adds to dkv does not get smaller with the sink's weight.
void check_sinks() {
  const float norm[2] = {64, 64}, lse[2] = {5, 5}, lse_part[2] = {1, -1};
  const float without = expected(9, norm, lse, lse, lse_part, false, 2, 1);
  for (float lse2 : {40.f, 100.f, 1e9f, INFINITY}) {
    const float sinks[2] = {lse2, lse2};
    CHECK(expected(9, norm, lse, sinks, lse_part, false, 2, 1) < without * 1e-9f, "base-2 lse %g", lse2);
    CHECK(expected(9, norm, lse, sinks, lse_part, true, 2, 1) >= 4.f, "base-2 lse %g", lse2);
  }
}

// Gradients of 1e-25 have units as fine as others.
void check_faint() {
  const float lse[2] = {5, 5}, loud[2] = {64, 64}, faint[2] = {64e-25f, 64e-25f};
  const float most = expected(9, loud, lse, lse, nullptr, false, 2, 1), least = expected(9, faint, lse, lse, nullptr, false, 2, 1);
  CHECK(fabsf(least / most * 1e25f - 1.f) < 1e-5f, "%g and %g", most, least);
  for (int parts : {1, 4096, 1 << 20}) {
    const float ratio = unit_of(bits<int>(least), parts * 128ll, parts) / unit_of(bits<int>(most), parts * 128ll, parts);
    CHECK(fabsf(ratio * 1e-25f - 1.f) < 1e-4f, "%d parts: %g", parts, ratio);
  }
}

int main() {
  check_units();
  check_faint();
  for (int kind = 0; kind < 5; kind++) {
    for (int size : {0, 0x10000000, 0x3f812345}) check_sums<64, 0>(kind, 64, 0, 3, size);
    check_sums<64, 0>(kind, 128, 64, 150, 0x3fffffff);
    check_sums<32, 0>(kind, 576, 512, 5, 0x3f800000);
    check_sums<32, 32>(kind, 576, 512, 5, 0x3f800000);
  }
  for (int i = 0; i < 60; i++) check_tally();
  check_sinks();
}
