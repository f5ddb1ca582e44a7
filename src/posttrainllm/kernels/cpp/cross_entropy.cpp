// cross_entropy: the loss of next-token prediction and its gradient.
//
//   forward    lse[n] = log(sum_v exp(z[n,v]));  row_loss[n] = lse[n] - z[n,y[n]], 0 where y[n] < 0
//              loss = inv_count sum_n row_loss[n]
//   derive     d lse[n] / d z[n,v] = exp(z[n,v] - lse[n]);  d z[n,y[n]] / d z[n,v] = [v == y[n]]
//   backward   dz[n,v] = inv_count (exp(z[n,v] - lse[n]) - [v == y[n]]), 0 where y[n] < 0
//
// The row maximum m is subtracted first, so that exp's argument is never positive:
// lse = m + log(sum_v exp(z - m)). A NaN or +infinite logit makes the loss NaN, which the clip op
// turns into a skipped step.
#include "ops.h"
#include "pool.h"
#include "vec.h"

extern "C" {

// Tiles of rows; writes row_loss and lse (lse also where the target is ignored).
void cross_entropy_forward(float* row_loss, float* lse, const float* logits, const i32* targets,
                           i64 N, i64 V, const Work& work) {
  run_rows(work, N, rows_per_tile(V), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      const float* z = logits + n * V;
      vf most = splat(z[0]);
      for_lanes(
          V, [&](i64 v, auto lanes) { most = larger(keep(get(z + v, lanes), most, lanes), most); });
      const float m = max_lanes(most);
      const float sum = row_sum(V, [=](i64 v, auto lanes) {
        return keep(exp(get(z + v, lanes) - splat(m)), splat(0.0f), lanes);
      });
      const float rest = log(splat(sum))[0];
      lse[n] = m + rest;
      row_loss[n] = targets[n] < 0 ? 0.0f : (m - z[targets[n]]) + rest;
    }
  });
}

// Tiles of rows; writes dlogits.
void cross_entropy_backward(float* dlogits, const float* logits, const i32* targets,
                            const float* lse, const float* scalars, i64 N, i64 V,
                            const Work& work) {
  const float inv_count = scalars[INV_COUNT];
  run_rows(work, N, rows_per_tile(V), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      float* dz = dlogits + n * V;
      if (targets[n] < 0) {
        for_lanes(V, [=](i64 v, auto lanes) { put(dz + v, splat(0.0f), lanes); });
        continue;
      }
      const vf shift = splat(lse[n]);
      for_lanes(V, [=](i64 v, auto lanes) {
        put(dz + v, splat(inv_count) * exp(get(logits + n * V + v, lanes) - shift), lanes);
      });
      dz[targets[n]] -= inv_count;
    }
  });
}

// One tile: N additions in float64, exact enough for any N. Writes loss or adds to it.
void loss_sum(float* loss, const float* row_loss, const float* scalars, i64 N, i32 accumulate,
              const Work&) {
  double sum = 0.0;
  for (i64 n = 0; n < N; n++) sum += double(row_loss[n]);
  const float value = float(double(scalars[INV_COUNT]) * sum);
  loss[0] = adds(accumulate, scalars) ? loss[0] + value : value;
}

}  // extern "C"
