// gather: picks rows, such as the last position of every sequence before the head.
//
//   forward    out[b] = x[rows[b]]
//   backward   none: only programs that generate use it
// A copy, bit-exact. Tiles of rows; writes out.
#include "ops.h"
#include "pool.h"
#include "vec.h"

extern "C" void gather_forward(float* out, const float* x, const i32* rows, i64 B, i64 N, i64 C,
                               const Work& work) {
  (void)N;  // the host has checked rows against it
  run_rows(work, B, rows_per_tile(C), [=](i64 first, i64 last) {
    for (i64 b = first; b < last; b++) {
      const float* row = x + i64(rows[b]) * C;
      for_lanes(C, [=](i64 c, auto lanes) { put(out + b * C + c, get(row + c, lanes), lanes); });
    }
  });
}
