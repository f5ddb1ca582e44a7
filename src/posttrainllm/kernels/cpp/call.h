// call.h: the call table that a host writes and run.cpp executes, and what every op is handed.
//
// A host binds a program to memory, writes one 256-byte record a call and starts the whole list
// with one call of posttrain_run. One layout serves native code, wasm32 and wasm64 (little endian).
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int32_t i32;
typedef int64_t i64;
typedef uint32_t u32;
typedef uint64_t u64;

struct Call {
  u32 op;  // index of the op in ops.OPS
  u32 pad;
  u64 buf[10];     // byte offsets from the base: outputs, then inputs; ABSENT for an optional one
  i64 size[8];     // the letters of op.sizes, in order
  double attr[8];  // op.attrs, in order
  u64 pad2[5];
};
static_assert(sizeof(Call) == 256, "the hosts write records of 256 bytes");

constexpr u64 ABSENT = UINT64_MAX;

// How an output that may accumulate is written. BETA asks the scalars buffer at run time.
enum Accumulate : i32 { WRITE = 0, ADD = 1, BETA = 2 };

// Slots of the scalars buffer and of the clip buffer.
enum Scalar { INV_COUNT = 0, BETA_SLOT = 1, LR = 2, CORRECTION1 = 3, CORRECTION2 = 4 };
enum Clip { NORM = 0, SCALE = 1, NONFINITE = 2 };

// Means an op works with: scratch memory (64-byte aligned, as large as <op>_workspace states) and
// the number of threads. Results never depend on the latter.
struct Work {
  void* scratch;
  u32 threads;
};

// True when new values are added to the old ones. Under BETA with beta == 0 the old value must
// never be read, as it may be anything, NaN included.
inline bool adds(i32 accumulate, const float* scalars) {
  return accumulate == ADD || (accumulate == BETA && scalars[BETA_SLOT] != 0.0f);
}

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
inline i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }
