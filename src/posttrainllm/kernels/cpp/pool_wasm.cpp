// pool_wasm.cpp: the thread pool of pool.h for WebAssembly.
//
// A module cannot start threads. The host starts workers (Web Workers, node's worker threads), gives
// each an instance of this module over the same shared memory and a stack of its own, and calls
// posttrain_worker there, which returns when the host calls posttrain_stop. Tiles are taken as
// pool_job.h says; threads sleep by atomic wait and notify.
//
// A worker that dies (a trap, a tab out of memory) may hold a tile that nobody will finish. Its host
// tells so with posttrain_worker_failed where it can; where it cannot, a job without any progress
// for STALL_S seconds means the same. Either way the caller traps and posttrain_failed says why,
// so that the host can go on with one thread. Builds without threads run the tiles in the caller.
#if defined(__wasm__)
#include "pool.h"
#include "pool_job.h"

#if !defined(__wasm_atomics__)

u32 pool_begin(u32) { return 1; }
void pool_end(u32) {}
void pool_run(i64 tiles, void (*run)(const void*, i64), const void* context) {
  for (i64 tile = 0; tile < tiles; tile++) run(context, tile);
}

#else

namespace {

constexpr int SPINS = 4000;  // 10 to 30 us: what a worker waits before it sleeps
constexpr i64 SECOND = 1000000000;
constexpr int STALL_S = 10;

struct Pool {
  Job job;                   // the caller waits on its `pending`
  alignas(64) u32 signal;    // counts jobs; sleeping workers wait on it
  alignas(64) u32 sleepers;  // workers that wait on `signal`
  u32 caller_waits;
  u32 workers;
  u32 stop;
  u32 failed;
};

Pool pool;

void sleep_while(u32& x, u32 value, i64 nanoseconds) {
  __builtin_wasm_memory_atomic_wait32(reinterpret_cast<int*>(&x), int(value), nanoseconds);
}

void wake(u32& x) { __builtin_wasm_memory_atomic_notify(reinterpret_cast<int*>(&x), ~0u); }

template <class Done>
bool spin(const Done& done) {
  for (int i = 0; i < SPINS; i++) {
    if (done()) return true;
  }
  return false;
}

void wake_caller() {
  if (get(pool.caller_waits)) wake(pool.job.pending);
}

void wait_for_tiles() {
  if (spin([] { return get(pool.job.pending) == 0; })) return;
  set(pool.caller_waits, 1u);
  u32 before = get(pool.job.pending);
  for (int still = 0; before != 0;) {
    sleep_while(pool.job.pending, before, SECOND);
    const u32 now = get(pool.job.pending);
    still = now == before ? still + 1 : 0;
    before = now;
    if (still >= STALL_S) set(pool.failed, 1u);
    if (now != 0 && get(pool.failed)) __builtin_trap();
  }
  set(pool.caller_waits, 0u);
}

}  // namespace

u32 pool_begin(u32 threads) {
  if (get(pool.failed)) __builtin_trap();
  return u32(min(threads, get(pool.workers) + 1));
}

void pool_end(u32) {}

void pool_run(i64 tiles, void (*run)(const void*, i64), const void* context) {
  publish(pool.job, tiles, run, context);
  __atomic_add_fetch(&pool.signal, 1u, __ATOMIC_SEQ_CST);
  if (get(pool.sleepers)) wake(pool.signal);
  run_claimed_tiles(pool.job, wake_caller);
  wait_for_tiles();
}

#pragma GCC visibility push(default)
extern "C" {

// What a worker of the host runs, from its start to posttrain_stop.
void posttrain_worker() {
  __atomic_add_fetch(&pool.workers, 1u, __ATOMIC_SEQ_CST);
  while (!get(pool.stop)) {
    const u32 seen = get(pool.signal);
    if (spin([] { return claimable(pool.job) || get(pool.stop); })) {
      run_claimed_tiles(pool.job, wake_caller);
      continue;
    }
    __atomic_add_fetch(&pool.sleepers, 1u, __ATOMIC_SEQ_CST);
    // Both sides publish first and look second: a job that came just now changed `signal`.
    if (!claimable(pool.job) && !get(pool.stop)) sleep_while(pool.signal, seen, -1);
    __atomic_sub_fetch(&pool.sleepers, 1u, __ATOMIC_SEQ_CST);
  }
  __atomic_sub_fetch(&pool.workers, 1u, __ATOMIC_SEQ_CST);
}

// Workers inside posttrain_worker now.
u32 posttrain_workers() { return get(pool.workers); }

// Sends the workers home. The pool cannot be used again.
void posttrain_stop() {
  set(pool.stop, 1u);
  __atomic_add_fetch(&pool.signal, 1u, __ATOMIC_SEQ_CST);
  wake(pool.signal);
}

// For the host of a worker that trapped: ends the caller's wait with a trap.
void posttrain_worker_failed() {
  set(pool.failed, 1u);
  wake(pool.job.pending);
}

// Whether a worker was lost.
u32 posttrain_failed() { return get(pool.failed); }

}  // extern "C"
#pragma GCC visibility pop

#endif  // __wasm_atomics__
#endif  // __wasm__
