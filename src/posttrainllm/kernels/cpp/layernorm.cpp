// layernorm: normalizes every row, then scales and shifts it.
//
//   forward    mean = sum_c x / C;  rstd = 1 / sqrt(sum_c (x - mean)^2 / C + eps)
//              xhat = (x - mean) rstd;  out = xhat weight + bias
//   derive     d mean / d x[c] = 1 / C;  d rstd / d x[c] = -rstd^2 xhat[c] / C
//   backward   with g = dout weight:  dx = rstd (g - mean_c(g) - xhat mean_c(g xhat))
//              dweight = sum_n dout xhat;  dbias = sum_n dout
//
// The variance is taken around the mean in a second pass: the one-pass form cancels when |mean| is
// large. The mean itself is corrected by the mean of x - mean: in a nearly constant row rstd
// multiplies its error by up to 1 / sqrt(eps) = 316. mean and rstd are saved; xhat is recomputed,
// as an (N, C) copy costs more to read.
#include "ops.h"
#include "reduce.h"

namespace {

// dx of row n. use(c, value, dout, xhat, lanes) is handed every vector of it.
template <class Use>
inline void backward_row(i64 n, i64 C, const float* dout, const float* x, const float* weight,
                         const float* mean, const float* rstd, const Use& use) {
  const vf mu = splat(mean[n]), r = splat(rstd[n]);
  const float *d = dout + n * C, *row = x + n * C;
  const auto g_at = [=](i64 c, auto lanes) {  // 0 behind the end of the row
    return get(d + c, lanes) * get(weight + c, lanes);
  };
  const auto gx_at = [=](i64 c, auto lanes) {
    return g_at(c, lanes) * ((get(row + c, lanes) - mu) * r);
  };
  const vf mean_g = splat(row_sum(C, g_at) / float(C));
  const vf mean_gx = splat(row_sum(C, gx_at) / float(C));
  for_lanes(C, [=, &use](i64 c, auto lanes) {
    const vf g = g_at(c, lanes), xhat = (get(row + c, lanes) - mu) * r;
    use(c, r * (g - fma(xhat, mean_gx, mean_g)), get(d + c, lanes), xhat, lanes);
  });
}

}  // namespace

extern "C" {

// Tiles of rows; writes out, mean, rstd.
void layernorm_forward(float* out, float* mean, float* rstd, const float* x, const float* weight,
                       const float* bias, i64 N, i64 C, float eps, const Work& work) {
  run_rows(work, N, rows_per_tile(C), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      const float* row = x + n * C;
      float mu = row_sum(C, [=](i64 c, auto lanes) { return get(row + c, lanes); }) / float(C);
      const auto centred = [&](i64 c, auto lanes) {
        return keep(get(row + c, lanes) - splat(mu), splat(0.0f), lanes);
      };
      mu += row_sum(C, centred) / float(C);  // the rounding of the first sum
      const float squares = row_sum(C, [&](i64 c, auto lanes) {
        const vf d = centred(c, lanes);
        return d * d;
      });
      const float r = 1.0f / sqrt(squares / float(C) + eps);
      for_lanes(C, [=](i64 c, auto lanes) {
        const vf xhat = (get(row + c, lanes) - splat(mu)) * splat(r);
        put(out + n * C + c, fma(xhat, get(weight + c, lanes), get(bias + c, lanes)), lanes);
      });
      mean[n] = mu;
      rstd[n] = r;
    }
  });
}

// Tiles of rows; writes dx or adds to it (the residual branch's gradient is there already).
void layernorm_backward_input(float* dx, const float* dout, const float* x, const float* weight,
                              const float* mean, const float* rstd, i64 N, i64 C, i32 accumulate,
                              const Work& work) {
  const bool add = accumulate == ADD;
  run_rows(work, N, rows_per_tile(C), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      backward_row(n, C, dout, x, weight, mean, rstd, [=](i64 c, vf value, vf, vf, auto lanes) {
        float* target = dx + n * C + c;
        put(target, add ? get(target, lanes) + value : value, lanes);
      });
    }
  });
}

// Two passes as reduce.h says; a tile of pass 1 is one range of rows, its partial row holds C
// weight sums and then C bias sums. One op for both gradients: a second one would read dout again.
// Writes both or adds to both.
void layernorm_backward_weight(float* dweight, float* dbias, const float* dout, const float* x,
                               const float* mean, const float* rstd, const float* scalars, i64 N,
                               i64 C, i32 accumulate, const Work& work) {
  const bool add = adds(accumulate, scalars);
  float* partial = static_cast<float*>(work.scratch);
  run_rows(work, N, rows_per_part(N), [=](i64 first, i64 last) {
    float* sums = partial + first / rows_per_part(N) * 2 * C;
    for_lanes(C, [=](i64 c, auto lanes) {
      vf w = splat(0.0f), b = splat(0.0f);
      for (i64 n = first; n < last; n++) {
        const vf g = get(dout + n * C + c, lanes);
        w = fma(g, (get(x + n * C + c, lanes) - splat(mean[n])) * splat(rstd[n]), w);
        b += g;
      }
      put(sums + c, w, lanes);
      put(sums + C + c, b, lanes);
    });
  });
  add_parts(dweight, partial, part_count(N), 2 * C, C, add, work);
  add_parts(dbias, partial + C, part_count(N), 2 * C, C, add, work);
}

// The two above from one read of dout and x, with their bits. Adds to dx; writes dweight and dbias or
// adds to them.
void layernorm_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x,
                        const float* weight, const float* mean, const float* rstd,
                        const float* scalars, i64 N, i64 C, i32 accumulate, const Work& work) {
  const bool add = adds(accumulate, scalars);
  float* partial = static_cast<float*>(work.scratch);
  run_rows(work, N, rows_per_part(N), [=](i64 first, i64 last) {
    float* sums = partial + first / rows_per_part(N) * 2 * C;
    for_lanes(2 * C, [=](i64 c, auto lanes) { put(sums + c, splat(0.0f), lanes); });
    for (i64 n = first; n < last; n++) {
      backward_row(n, C, dout, x, weight, mean, rstd,
                   [=](i64 c, vf value, vf d, vf xhat, auto lanes) {
                     float *target = dx + n * C + c, *w = sums + c, *b = sums + C + c;
                     put(target, get(target, lanes) + value, lanes);
                     put(w, fma(d, xhat, get(w, lanes)), lanes);
                     put(b, get(b, lanes) + d, lanes);
                   });
    }
  });
  add_parts(dweight, partial, part_count(N), 2 * C, C, add, work);
  add_parts(dbias, partial + C, part_count(N), 2 * C, C, add, work);
}

}  // extern "C"

u64 layernorm_backward_weight_workspace(i64 N, i64 C) {
  return u64(part_count(N)) * 2 * C * sizeof(float);
}
