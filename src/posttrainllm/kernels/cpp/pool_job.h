// pool_job.h: the one job of a thread pool, and how threads take its tiles. pool.cpp and pool_wasm.cpp
// differ in where threads come from and in how they sleep.
//
// The state of a job is one 64-bit word, tiles << 32 | next: a thread claims tile `next` by a
// compare-and-swap that adds one. A successful claim proves that the job is unfinished, so its other
// fields (run, context) cannot change until the claimed tile is done: a thread that wakes late finds
// no tile and touches nothing, and the caller never waits for threads that did nothing.
#pragma once
#include "call.h"

struct Job {
  alignas(64) u64 claims;   // tiles << 32 | next
  alignas(64) u32 pending;  // tiles not yet done
  void (*run)(const void* context, i64 tile);
  const void* context;
};

template <class T>
inline T get(const T& x) {
  return __atomic_load_n(&x, __ATOMIC_SEQ_CST);
}

template <class T>
inline void set(T& x, T value) {
  __atomic_store_n(&x, value, __ATOMIC_SEQ_CST);
}

inline bool claimable(const Job& job) {
  const u64 claims = get(job.claims);
  return u32(claims) < u32(claims >> 32);
}

inline bool claim(Job& job, i64* tile) {
  u64 claims = get(job.claims);
  while (u32(claims) < u32(claims >> 32)) {
    if (__atomic_compare_exchange_n(&job.claims, &claims, claims + 1, true, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST)) {
      *tile = u32(claims);
      return true;
    }
  }
  return false;
}

// Only while no tile of the job before is left.
inline void publish(Job& job, i64 tiles, void (*run)(const void*, i64), const void* context) {
  job.run = run;
  job.context = context;
  set(job.pending, u32(tiles));
  set(job.claims, u64(tiles) << 32);
}

// Runs tiles until none is left to claim; last() is called behind the one that was done last.
template <class Last>
inline void run_claimed_tiles(Job& job, const Last& last) {
  i64 tile;
  while (claim(job, &tile)) {
    job.run(job.context, tile);
    if (__atomic_sub_fetch(&job.pending, 1u, __ATOMIC_SEQ_CST) == 0) last();
  }
}
