// pool.cpp: the thread pool behind run_tiles (see pool.h; pool_job.h says how tiles are taken).
//
// Between jobs a worker spins for SPIN_NS and then sleeps on a condition variable, which keeps a core
// free for other processes while the host does something else.
//
// A child after fork has no workers: the pool notices the new process id and starts afresh.
// WebAssembly has pool_wasm.cpp.
#if !defined(__wasm__)
#include "pool.h"
#include "pool_job.h"

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
  Job job;
  alignas(64) u32 sleepers;  // workers that wait on `work`
  u32 caller_waits;          // the caller waits on `done`
  u32 stop;
  pid_t owner;  // the process of which a thread uses the pool, or 0; after fork it is another one's
  pthread_mutex_t mutex;
  pthread_cond_t work, done;
  pthread_t threads[MAX_WORKERS];
  u32 workers;
  pid_t process;  // whose workers these are
};

// The threads outlive every call, so the pool cannot live in one; it is the library's only state.
Pool pool;

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

// Both sides publish first and look second, so one of them sees the other.
void wake_caller() {
  if (!get(pool.caller_waits)) return;
  pthread_mutex_lock(&pool.mutex);
  pthread_cond_signal(&pool.done);
  pthread_mutex_unlock(&pool.mutex);
}

void* worker(void*) {
  for (;;) {
    if (!spin([] { return claimable(pool.job) || get(pool.stop); })) {
      pthread_mutex_lock(&pool.mutex);
      set(pool.sleepers, pool.sleepers + 1);
      while (!claimable(pool.job) && !get(pool.stop)) pthread_cond_wait(&pool.work, &pool.mutex);
      set(pool.sleepers, pool.sleepers - 1);
      pthread_mutex_unlock(&pool.mutex);
    }
    if (get(pool.stop)) return nullptr;
    run_claimed_tiles(pool.job, wake_caller);
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
void adopt_process(pid_t process) {
  if (pool.process == process) return;
  pool.job = {};
  pool.sleepers = pool.caller_waits = pool.stop = pool.workers = 0;
  pthread_mutex_init(&pool.mutex, nullptr);
  pthread_cond_init(&pool.work, nullptr);
  pthread_cond_init(&pool.done, nullptr);
  pool.process = process;
}

}  // namespace

u32 pool_begin(u32 threads) {
  if (threads <= 1) return 1;
  if (threads > MAX_WORKERS + 1) threads = MAX_WORKERS + 1;
  const pid_t process = getpid();
  pid_t owner = get(pool.owner);
  if (owner == process || !__atomic_compare_exchange_n(&pool.owner, &owner, process, false,
                                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    return 1;
  }
  adopt_process(process);
  if (pool.workers != threads - 1) {
    stop_workers();
    start_workers(threads - 1);
  }
  return threads;
}

void pool_end(u32 threads) {
  if (threads > 1) set(pool.owner, pid_t(0));
}

void pool_run(i64 tiles, void (*run)(const void*, i64), const void* context) {
  publish(pool.job, tiles, run, context);
  if (get(pool.sleepers)) {
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
  }
  run_claimed_tiles(pool.job, wake_caller);
  const auto finished = [] { return get(pool.job.pending) == 0; };
  if (spin(finished)) return;
  pthread_mutex_lock(&pool.mutex);
  set(pool.caller_waits, 1u);
  while (!finished()) pthread_cond_wait(&pool.done, &pool.mutex);
  set(pool.caller_waits, 0u);
  pthread_mutex_unlock(&pool.mutex);
}

#endif
