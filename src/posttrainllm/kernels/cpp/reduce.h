// reduce.h: sums over rows (bias and layernorm weight gradients) with a result that depends on the
// shape only.
//
// Pass 1: the N rows are cut into at most PARTS ranges by N alone; each range yields one partial
// row. Pass 2 adds the partial rows in order. Besides fixing the order, the two levels keep
// rounding near sqrt(N) instead of N.
#pragma once
#include "pool.h"
#include "vec.h"

constexpr i64 PARTS = 64;

inline i64 rows_per_part(i64 N) { return max(16, ceil_div(N, PARTS)); }
inline i64 part_count(i64 N) { return ceil_div(N, rows_per_part(N)); }

// out[c] = or += the sum over partial rows of partial[part * stride + c].
inline void add_parts(float* out, const float* partial, i64 parts, i64 stride, i64 C, bool add,
                      const Work& work) {
  run_rows(work, C, 256, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 c, auto lanes) {
      const float* column = partial + first + c;
      vf sum = get(column, lanes);
      for (i64 part = 1; part < parts; part++) sum += get(column + part * stride, lanes);
      float* target = out + first + c;
      put(target, add ? get(target, lanes) + sum : sum, lanes);
    });
  });
}
