// add: the residual connection.
//
//   forward    out = a + b
//   backward   da = db = dout: the program passes dout on, or lets the next op add to it, so there
//              is no backward op
//
// One addition an element, bit-exact on every engine. Tiles of 8192 elements; writes out.
#include "ops.h"
#include "pool.h"
#include "vec.h"

extern "C" void add_forward(float* out, const float* a, const float* b, i64 N, i64 C,
                            const Work& work) {
  run_rows(work, N * C, 8192, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      put(out + first + i, get(a + first + i, lanes) + get(b + first + i, lanes), lanes);
    });
  });
}
