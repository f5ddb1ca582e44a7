// pool.cpp: the thread pool behind run_tiles (see pool.h).
//
// One job exists at a time. Its state is one 64-bit word, tiles << 32 | next: a thread claims tile
// `next` by a compare-and-swap that adds one. A successful claim proves that the job is unfinished,
// so its other fields (run, context) cannot change until the claimed tile is done: a thread that
// wakes late finds no tile and touches nothing, and the caller never waits for threads that did
// nothing. Between jobs a worker spins for SPIN_NS and then sleeps on a condition variable, which
// keeps a core free for other processes while the host does something else.
//
// A child after fork has no workers: the pool notices the new process id and starts afresh.
// WebAssembly has pool_wasm.cpp.
#if !defined(__wasm__)
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr u32 MAX_WORKERS = 255;
constexpr size_t STACK_BYTES = 1 << 20;  // kernels keep tiles of up to 128 KiB on the stack
constexpr i64 SPIN_NS = 30000;

struct Pool {
  alignas(64) u64 job;       // tiles << 32 | next
  alignas(64) u32 pending;   // tiles not yet done
  alignas(64) u32 sleepers;  // workers that wait on `work`
  u32 caller_waits;          // the caller waits on `done`
  u32 stop;
  u32 busy;
  void (*run)(const void*, i64);
  const void* context;
  pthread_mutex_t mutex;
  pthread_cond_t work, done;
  pthread_t threads[MAX_WORKERS];
  u32 workers;
  pid_t process;
};

// The threads outlive every call, so the pool cannot live in one; it is the library's only state.
Pool pool;

template <class T>
T get(const T& x) {
  return __atomic_load_n(&x, __ATOMIC_SEQ_CST);
}

template <class T>
void set(T& x, T value) {
  __atomic_store_n(&x, value, __ATOMIC_SEQ_CST);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

i64 now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return i64(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Spins until done() or until SPIN_NS have passed; returns done(). It offers its core every few
// checks: with more threads than free cores, the one it waits for may need this very core. Measured
// on two busy cores: a job costs 1 us more than inline instead of 40.
template <class Done>
bool spin(const Done& done) {
  if (done()) return true;
  const i64 end = now() + SPIN_NS;
  do {
    for (int i = 0; i < 32; i++) {
      if (done()) return true;
      pause();
    }
    sched_yield();
  } while (now() < end);
  return done();
}

bool claimable() { return u32(get(pool.job)) < u32(get(pool.job) >> 32); }

bool claim(i64* tile) {
  u64 job = get(pool.job);
  while (u32(job) < u32(job >> 32)) {
    if (__atomic_compare_exchange_n(&pool.job, &job, job + 1, true, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST)) {
      *tile = u32(job);
      return true;
    }
  }
  return false;
}

void run_claimed_tiles() {
  i64 tile;
  while (claim(&tile)) {
    pool.run(pool.context, tile);
    // Both sides publish first and look second, so one of them sees the other.
    if (__atomic_sub_fetch(&pool.pending, 1u, __ATOMIC_SEQ_CST) == 0 && get(pool.caller_waits)) {
      pthread_mutex_lock(&pool.mutex);
      pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.mutex);
    }
  }
}

void* worker(void*) {
  for (;;) {
    if (!spin([] { return claimable() || get(pool.stop); })) {
      pthread_mutex_lock(&pool.mutex);
      set(pool.sleepers, pool.sleepers + 1);
      while (!claimable() && !get(pool.stop)) pthread_cond_wait(&pool.work, &pool.mutex);
      set(pool.sleepers, pool.sleepers - 1);
      pthread_mutex_unlock(&pool.mutex);
    }
    if (get(pool.stop)) return nullptr;
    run_claimed_tiles();
  }
}

void stop_workers() {
  pthread_mutex_lock(&pool.mutex);
  set(pool.stop, 1u);
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.mutex);
  for (u32 i = 0; i < pool.workers; i++) pthread_join(pool.threads[i], nullptr);
  pool.workers = 0;
  set(pool.stop, 0u);
}

// Fewer workers than wanted (a limit on processes) is no error: the tiles run on those there are.
void start_workers(u32 count) {
#if !defined(_WIN32)
  sigset_t all, before;  // signals belong to the host's threads, never to a worker
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  while (pool.workers < count &&
         pthread_create(&pool.threads[pool.workers], &attributes, worker, nullptr) == 0) {
    pool.workers++;
  }
  pthread_attr_destroy(&attributes);
#if !defined(_WIN32)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

// Puts the pool into its initial state in a new process: after fork the locks may be held and the
// counters may be mid-job, by threads that do not exist here.
void adopt_process() {
  const pid_t process = getpid();
  if (pool.process == process) return;
  pool.job = 0;
  pool.pending = pool.sleepers = pool.caller_waits = pool.stop = pool.workers = pool.busy = 0;
  pthread_mutex_init(&pool.mutex, nullptr);
  pthread_cond_init(&pool.work, nullptr);
  pthread_cond_init(&pool.done, nullptr);
  pool.process = process;
}

}  // namespace

u32 pool_begin(u32 threads) {
  if (threads <= 1) return 1;
  if (threads > MAX_WORKERS + 1) threads = MAX_WORKERS + 1;
  static u32 starting;  // two threads may make the first call at once
  u32 expected = 0;
  if (!__atomic_compare_exchange_n(&starting, &expected, 1u, false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST)) {
    return 1;
  }
  adopt_process();
  const bool taken = pool.busy;
  pool.busy = 1;
  __atomic_store_n(&starting, 0u, __ATOMIC_SEQ_CST);
  if (taken) return 1;
  if (pool.workers != threads - 1) {
    stop_workers();
    start_workers(threads - 1);
  }
  return threads;
}

void pool_end(u32 threads) {
  if (threads > 1) set(pool.busy, 0u);
}

void pool_run(u32, i64 tiles, void (*run)(const void*, i64), const void* context) {
  pool.run = run;
  pool.context = context;
  set(pool.pending, u32(tiles));
  set(pool.job, u64(tiles) << 32);
  if (get(pool.sleepers)) {
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
  }
  run_claimed_tiles();
  const auto finished = [] { return get(pool.pending) == 0; };
  if (spin(finished)) return;
  pthread_mutex_lock(&pool.mutex);
  set(pool.caller_waits, 1u);
  while (!finished()) pthread_cond_wait(&pool.done, &pool.mutex);
  set(pool.caller_waits, 0u);
  pthread_mutex_unlock(&pool.mutex);
}

#endif
