// fused: products that finish their tiles while the cache still holds them.
//
//   linear_gelu_forward          fc = x W + bias;  out = gelu(fc)
//   linear_residual_forward      out = residual + (x W + bias)
//   gelu_linear_backward_input   of out = gelu(fc) W + bias:
//                                dfc = (dout W^T) gelu'(fc), and act = gelu(fc) once more
//
// gemm.h adds the residual where it stores the last block of k, and hands over every tile that is
// complete, at most 64 rows of it; what follows costs no pass over memory of its own. The
// arithmetic is that of the plain ops on the same numbers in the same order, so the results have
// the same bits. Backward computes act again from fc, whose exponential it needs anyhow: keeping
// act from the forward pass on would cost N * I floats a layer. All outputs are written, nothing is
// accumulated.
#include "gelu.h"
#include "gemm.h"
#include "ops.h"

namespace {

// body(offset in C, lanes) over a piece of C, row by row.
template <class Body>
inline void over_piece(i64 m, i64 n, i64 rows, i64 cols, i64 width, const Body& body) {
  for (i64 i = m; i < m + rows; i++) {
    const i64 start = i * width + n;
    for_lanes(cols, [&](i64 j, auto lanes) { body(start + j, lanes); });
  }
}

template <bool ERF>
void linear_gelu(float* out, float* fc, const float* x, const float* weight, const float* bias,
                 i64 N, i64 I, i64 O, const Work& work) {
  gemm({N, O, I, x, I, 1, weight, O, 1, fc, bias, false}, work, NoHook{},
       [=](i64 m, i64 n, i64 rows, i64 cols) {
         over_piece(m, n, rows, cols, O, [=](i64 at, auto lanes) {
           put(out + at, gelu::value<ERF>(get(fc + at, lanes)), lanes);
         });
       });
}

template <bool ERF>
void gelu_linear(float* dfc, float* act, const float* dout, const float* weight, const float* fc,
                 i64 N, i64 I, i64 O, const Work& work) {
  gemm({N, I, O, dout, O, 1, weight, 1, O, dfc, nullptr, false}, work, NoHook{},
       [=](i64 m, i64 n, i64 rows, i64 cols) {
         over_piece(m, n, rows, cols, I, [=](i64 at, auto lanes) {
           const gelu::Both of = gelu::both<ERF>(get(fc + at, lanes));
           put(dfc + at, get(dfc + at, lanes) * of.derivative, lanes);
           put(act + at, of.value, lanes);
         });
       });
}

}  // namespace

extern "C" {

void linear_gelu_forward(float* out, float* fc, const float* x, const float* weight,
                         const float* bias, i64 N, i64 I, i64 O, i32 erf, const Work& work) {
  if (N <= FEW_ROWS) {
    linear_forward(fc, x, weight, bias, N, I, O, 0, work);
    gelu_forward(out, fc, N, O, erf, work);
    return;
  }
  (erf ? linear_gelu<true> : linear_gelu<false>)(out, fc, x, weight, bias, N, I, O, work);
}

void linear_residual_forward(float* out, const float* residual, const float* x, const float* weight,
                             const float* bias, i64 N, i64 I, i64 O, const Work& work) {
  if (N <= FEW_ROWS) {
    linear_forward(out, x, weight, bias, N, I, O, 0, work);
    over_piece(0, 0, N, O, O, [=](i64 at, auto lanes) {
      put(out + at, get(residual + at, lanes) + get(out + at, lanes), lanes);
    });
    return;
  }
  gemm({N, O, I, x, I, 1, weight, O, 1, out, bias, false, residual}, work);
}

void gelu_linear_backward_input(float* dfc, float* act, const float* dout, const float* weight,
                                const float* fc, i64 N, i64 I, i64 O, i32 erf, const Work& work) {
  (erf ? gelu_linear<true> : gelu_linear<false>)(dfc, act, dout, weight, fc, N, I, O, work);
}

}  // extern "C"
