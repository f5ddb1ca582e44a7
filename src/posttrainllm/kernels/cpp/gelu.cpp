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
#include "gelu.h"

#include "ops.h"
#include "pool.h"

namespace {

template <bool ERF>
void forward(float* out, const float* x, i64 size, const Work& work) {
  run_rows(work, size, 8192, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      put(out + first + i, gelu::value<ERF>(get(x + first + i, lanes)), lanes);
    });
  });
}

template <bool ERF>
void backward(float* dx, const float* dout, const float* x, i64 size, const Work& work) {
  run_rows(work, size, 8192, [=](i64 first, i64 last) {
    for_lanes(last - first, [=](i64 i, auto lanes) {
      const vf slope = gelu::derivative<ERF>(get(x + first + i, lanes));
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
