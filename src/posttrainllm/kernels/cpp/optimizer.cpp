// optimizer: the gradient's norm, clipping and AdamW.
//
//   sum_squares     out = sum_p x[p]^2
//   gradient_clip   norm = sqrt(decayed + plain)
//                   scale = clip_norm / norm where norm > clip_norm > 0, else 1
//                   nonfinite = 1 once norm was infinite or NaN; only the host clears it
//   adamw_step      g = grad scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//                   param -= lr (m / correction1 / (sqrt(v / correction2) + eps)
//                                + weight_decay param)
//                   nothing at all while nonfinite is set: a NaN never reaches the weights
//
// The corrections 1 - beta^t, lr and scale are data, so one recorded step serves every t.
#include "ops.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr i64 CHUNK = 16384;

typedef double vd __attribute__((ext_vector_type(W)));

}  // namespace

extern "C" {

// Pass 1: one float64 partial sum for every CHUNK elements; pass 2 adds them in order. Float64
// costs nothing here, as memory is the limit, and keeps the norm of 5e8 elements exact to float
// precision. Writes out.
void sum_squares(float* out, const float* x, i64 P, const Work& work) {
  double* partial = static_cast<double*>(work.scratch);
  run_rows(work, P, CHUNK, [=](i64 first, i64 last) {
    vd sum = vd(0.0);
    for_lanes(last - first, [&](i64 i, auto lanes) {
      const vd wide = __builtin_convertvector(get(x + first + i, lanes), vd);
      sum += wide * wide;
    });
    double total = 0.0;
    for (int lane = 0; lane < W; lane++) total += sum[lane];
    partial[first / CHUNK] = total;
  });
  double total = 0.0;
  for (i64 i = 0; i < ceil_div(P, CHUNK); i++) total += partial[i];
  out[0] = float(total);
}

// One tile. Writes norm and scale, sets nonfinite.
void gradient_clip(float* clip, const float* decayed, const float* plain, float clip_norm,
                   const Work&) {
  const float norm = sqrt(decayed[0] + plain[0]);
  clip[NORM] = norm;
  clip[SCALE] = norm > clip_norm && clip_norm > 0.0f ? clip_norm / norm : 1.0f;
  if (!__builtin_isfinite(norm)) clip[NONFINITE] = 1.0f;
}

// Elementwise, tiles of CHUNK elements; updates param, m and v in place.
void adamw_step(float* param, float* m, float* v, const float* grad, const float* clip,
                const float* scalars, i64 P, double beta1, double beta2, double eps,
                double weight_decay, const Work& work) {
  if (clip[NONFINITE] != 0.0f) return;
  const vf b1 = splat(float(beta1)), c1 = splat(float(1.0 - beta1));
  const vf b2 = splat(float(beta2)), c2 = splat(float(1.0 - beta2));
  const vf scale = splat(clip[SCALE]), lr = splat(scalars[LR]), small = splat(float(eps));
  const vf unbias1 = splat(1.0f / scalars[CORRECTION1]);
  const vf unbias2 = splat(1.0f / scalars[CORRECTION2]);
  const vf decay = splat(float(weight_decay));
  run_rows(work, P, CHUNK, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      const i64 p = first + i;
      const vf g = get(grad + p, lanes) * scale;
      const vf m_new = fma(b1, get(m + p, lanes), c1 * g);
      const vf v_new = fma(b2, get(v + p, lanes), c2 * g * g);
      const vf old = get(param + p, lanes);
      const vf step = m_new * unbias1 / (sqrt(v_new * unbias2) + small);
      put(m + p, m_new, lanes);
      put(v + p, v_new, lanes);
      put(param + p, old - lr * fma(decay, old, step), lanes);
    });
  });
}

}  // extern "C"

u64 sum_squares_workspace(i64 P) { return u64(ceil_div(P, CHUNK)) * sizeof(double); }
