// gelu: the activation of the MLP, in GPT-2's form (erf = 0) and in the exact one (erf = 1).
//
//   forward    erf = 0:  out = x s(z),  s(z) = 1 / (1 + exp(-z)),  z = a (x + 0.044715 x^3),
//                        a = 2 sqrt(2/pi): the same as 0.5 x (1 + tanh(z / 2)), without a tanh
//              erf = 1:  out = x F(x),  F(x) = (1 + erf(x / sqrt 2)) / 2
//   derive     s' = s (1 - s) and dz/dx = a (1 + 3 * 0.044715 x^2), so
//              d out/dx = s + x s (1 - s) dz/dx;   F' = exp(-x^2 / 2) / sqrt(2 pi), so
//              d out/dx = F + x F'
//   backward   dx = dout * d out/dx
//
// z is clamped to +-80, where s is 0 or 1 to float precision, so that exp cannot overflow and a NaN
// stays one. In the derivative x is clamped to +-12 as well, because dz/dx grows as x^2; and 1 - s
// is computed as exp(-z) s: the subtraction costs 17 eps near x = 5, where x dz/dx is 34.
// For F, with t = 1 / (1 + 0.33 |x|):  F(-|x|) = exp(-x^2 / 2) p(t), p of degree 7 without a
// constant term, fitted to an absolute error of 8e-9 (0.07 eps);  F(|x|) = 1 - F(-|x|).
// Elementwise; tiles of 8192 elements. gelu_forward writes out, gelu_backward writes dx.
#include "ops.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr float SQRT_8_OVER_PI = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f;
constexpr float INV_SQRT_2PI = 0.3989422804014327f;

inline vf clamp(vf x, float limit) {
  x = x > splat(limit) ? splat(limit) : x;
  return x < splat(-limit) ? splat(-limit) : x;
}

// exp(-z)
inline vf exp_minus_z(vf x, vf square) {
  const vf z = x * fma(square, splat(SQRT_8_OVER_PI * CUBIC), splat(SQRT_8_OVER_PI));
  return exp(-clamp(z, 80.0f));
}

// F(x); bell = exp(-x^2 / 2).
inline vf normal_distribution(vf x, vf bell) {
  const vf magnitude = x < splat(0.0f) ? -x : x;
  const vf t = splat(1.0f) / fma(magnitude, splat(0.33f), splat(1.0f));
  vf p = splat(0.0423951706f);
  p = fma(p, t, splat(-0.206072736f));
  p = fma(p, t, splat(0.303711395f));
  p = fma(p, t, splat(-0.0618128739f));
  p = fma(p, t, splat(0.165813746f));
  p = fma(p, t, splat(0.123873375f));
  p = fma(p, t, splat(0.132091916f));
  const vf tail = bell * p * t;
  return x < splat(0.0f) ? tail : splat(1.0f) - tail;
}

template <bool ERF>
inline vf value(vf x) {
  const vf square = x * x;
  if constexpr (ERF) return x * normal_distribution(x, exp(splat(-0.5f) * square));
  return x / (splat(1.0f) + exp_minus_z(x, square));
}

template <bool ERF>
inline vf derivative(vf x) {
  vf square = x * x;
  if constexpr (ERF) {
    const vf bell = exp(splat(-0.5f) * square);
    return fma(x * bell, splat(INV_SQRT_2PI), normal_distribution(x, bell));
  }
  x = clamp(x, 12.0f);
  square = x * x;
  const vf e = exp_minus_z(x, square), s = splat(1.0f) / (splat(1.0f) + e);
  const vf dz = fma(square, splat(3.0f * SQRT_8_OVER_PI * CUBIC), splat(SQRT_8_OVER_PI));
  return fma(x * s * (e * s), dz, s);
}

template <bool ERF>
void forward(float* out, const float* x, i64 size, const Work& work) {
  run_rows(work, size, 8192, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      put(out + first + i, value<ERF>(get(x + first + i, lanes)), lanes);
    });
  });
}

template <bool ERF>
void backward(float* dx, const float* dout, const float* x, i64 size, const Work& work) {
  run_rows(work, size, 8192, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      const vf slope = derivative<ERF>(get(x + first + i, lanes));
      put(dx + first + i, get(dout + first + i, lanes) * slope, lanes);
    });
  });
}

}  // namespace

extern "C" {

void gelu_forward(float* out, const float* x, i64 N, i64 C, i32 erf, const Work& work) {
  (erf ? forward<true> : forward<false>)(out, x, N * C, work);
}

void gelu_backward(float* dx, const float* dout, const float* x, i64 N, i64 C, i32 erf,
                   const Work& work) {
  (erf ? backward<true> : backward<false>)(dx, dout, x, N * C, work);
}

}  // extern "C"
