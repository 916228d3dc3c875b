"""CUDA helpers of the Hopper forward's gatherer: a row's slots, and the rows of Q and of keys copied to shared memory.

It has 32 registers a thread, and its time is that of its instructions: numbers that are the same in all threads have to
stay in uniform registers, the others are made where they are used.
"""

GATHER_PRELUDE = r"""
namespace slattn {
__device__ __forceinline__ const void* at(const void* bf16, int64_t index) {
  return static_cast<const __nv_bfloat16*>(bf16) + index;
}

__device__ __forceinline__ void sync_group(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

// again keeps the compiler from making what comes of a thread's number before a loop, in registers that are not there.
__device__ __forceinline__ int again(int thread) {
  asm volatile("mov.u32 %0, %0;" : "+r"(thread));
  return thread;
}

// A block's 64 rows are copied by 128 threads, 8 to a row, each 16 bytes of every 128: thread t has rows t / 8,
// t / 8 + 16, + 32 and + 48. find_rows finds them: Q's lie one after the other, keys' numbers are in a ring.
__device__ __forceinline__ void find_rows(int* source, bool query, int first, const int* ring, int size, int used,
                                          int left, int thread) {
  const int row = again(thread) / 8 % 16;
#pragma unroll
  for (int r = 0; r < 4; r++) source[r] = ring[(used + r * 16 + row) & (size - 1)];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const int i = r * 16 + row;
    source[r] = first + (i < left ? (query ? i : source[r]) : 0);
  }
}

// copy_rows starts copying kTiles tiles of the columns from kColumn on of Q or of keys; zeros for rows from `left` on,
// of which nothing is read.
template <int kTiles, int kDim, int kColumn>
__device__ __forceinline__ void copy_rows(void* tiles, const void* q, const void* kv, bool query, const int* source,
                                          int left, int thread) {
  thread = again(thread);
  const int row = thread / 8 % 16;
  const unsigned to = shared_address(tiles) + row * 128 + ((thread ^ row) & 7) * 16;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const void* from = at(query ? q : kv, static_cast<int64_t>(again(source[r])) * kDim + kColumn + thread % 8 * 8);
#pragma unroll
    for (int i = 0; i < kTiles; i++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + r * 2048 + i * 8192),
                   "l"(at(from, i * 64)), "r"(r * 16 + row < left ? 16 : 0) : "memory");
  }
}

// No branches here: what a branch of some lanes joins, the compiler no longer takes for the same in all of them, and
// keeps it in as many registers.
__device__ __forceinline__ void prefetch(const void* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p prefetch.global.L2 [%0];}" ::"l"(from), "r"((int)wanted));
}

__device__ __forceinline__ void prefetch_query(const void* from, int bytes, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.bulk.prefetch.L2.global [%0], %1;}" ::"l"(from),
               "r"(bytes), "r"((int)wanted) : "memory");
}

// load_slots loads a stretch of a row's slots, each warp its own quarter first; -1 from the row's end on.
template <int kStretch>
__device__ __forceinline__ void load_slots(int* slots, const int* row, int from, int end, int thread) {
  thread = again(thread);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int k = from + (thread / 32 + i) % 4 * (kStretch / 4) + thread % 32;
    slots[i] = k < end ? __ldg(row + k) : -1;
  }
}

// scan adds to the ring, in their order, the slots of a stretch that name a key; every warp counts them all and writes
// its own quarter. Returns how many there are, once all are written. The ring holds two stretches.
template <int kStretch>
__device__ __forceinline__ int scan(const int* slots, int keys, int* ring, int filled, int thread) {
  thread = again(thread);
  const int warp = thread / 32 % 4, lane = thread % 32;
  int before = 0, found = 0, own = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned vote = __ballot_sync(0xffffffffu, static_cast<unsigned>(slots[i]) < static_cast<unsigned>(keys));
    if (i == 0) own = __popc(vote & ((1u << lane) - 1));
    if (i >= 4 - warp) before += __popc(vote);
    found += __popc(vote);
  }
  sync_group(1);  // all have read what is overwritten
  if (static_cast<unsigned>(slots[0]) < static_cast<unsigned>(keys))
    ring[(filled + before + own) & (2 * kStretch - 1)] = slots[0];
  sync_group(1);
  return found;
}
}  // namespace slattn
"""
