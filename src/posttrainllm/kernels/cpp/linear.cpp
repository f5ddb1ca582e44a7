// linear: the matrix products of the model. W is (I, O) as in GPT-2's checkpoints; with
// transposed = 1 it is (O, I), which is how the tied head uses the token table.
//
//   forward    out[n,o] = sum_i x[n,i] W[i,o] + bias[o]
//   derive     d out[n,o] / d x[n,i] = W[i,o];  d out[n,o] / d W[i,o] = x[n,i];
//              d out[n,o] / d bias[o] = 1
//   backward   dx = dout W^T;  dW = x^T dout (transposed: dW = dout^T x);  dbias = sum_n dout
//
// All are one product with other strides (gemm.h), and packing takes the difference away.
#include "gemm.h"
#include "ops.h"
#include "reduce.h"

namespace {

// Up to FEW_ROWS rows the weights are read once, not packed: decoding is bound by memory.
//
// out for W (I, O): tiles of columns; weight rows are streamed, sums stay in registers.
template <int N>
void few_rows_plain(float* out, const float* x, const float* weight, const float* bias, i64 I,
                    i64 O, const Work& work) {
  constexpr int VECTORS = 4;
  run_rows(work, O, VECTORS * W, [=](i64 first, i64 last) {
    if (last - first == VECTORS * W) {
      vf sum[N][VECTORS];
      for (int v = 0; v < VECTORS; v++)
        for (int n = 0; n < N; n++) sum[n][v] = bias ? load(bias + first + v * W) : splat(0.0f);
      for (i64 i = 0; i < I; i++) {
        for (int v = 0; v < VECTORS; v++) {
          const vf w = load(weight + i * O + first + v * W);
          for (int n = 0; n < N; n++) sum[n][v] = fma(splat(x[n * I + i]), w, sum[n][v]);
        }
      }
      for (int n = 0; n < N; n++)
        for (int v = 0; v < VECTORS; v++) store(out + n * O + first + v * W, sum[n][v]);
      return;
    }
    for_lanes(last - first, [=](i64 j, auto lanes) {
      const i64 o = first + j;
      vf sum[N];
      for (int n = 0; n < N; n++) sum[n] = bias ? get(bias + o, lanes) : splat(0.0f);
      for (i64 i = 0; i < I; i++) {
        const vf w = get(weight + i * O + o, lanes);
        for (int n = 0; n < N; n++) sum[n] = fma(splat(x[n * I + i]), w, sum[n]);
      }
      for (int n = 0; n < N; n++) put(out + n * O + o, sum[n], lanes);
    });
  });
}

// The same for W (O, I): every output is a dot product of two rows.
template <int N>
void few_rows_transposed(float* out, const float* x, const float* weight, const float* bias, i64 I,
                         i64 O, const Work& work) {
  run_rows(work, O, 32, [=](i64 first, i64 last) {
    for (i64 o = first; o < last; o++) {
      vf sum[N];
      for (int n = 0; n < N; n++) sum[n] = splat(0.0f);
      for_lanes(I, [&](i64 i, auto lanes) {
        const vf w = get(weight + o * I + i, lanes);
        for (int n = 0; n < N; n++) sum[n] = fma(get(x + n * I + i, lanes), w, sum[n]);
      });
      for (int n = 0; n < N; n++) out[n * O + o] = sum_lanes(sum[n]) + (bias ? bias[o] : 0.0f);
    }
  });
}

// out[o] = the sum of a column of `rows` rows, in four chains that run side by side.
inline void column_sums(float* out, const float* from, i64 stride, i64 rows, i64 cols) {
  for_lanes(cols, [=](i64 c, auto lanes) {
    vf sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    i64 n = 0;
    for (; n + 4 <= rows; n += 4)
      for (int i = 0; i < 4; i++) sum[i] += get(from + (n + i) * stride + c, lanes);
    for (; n < rows; n++) sum[0] += get(from + n * stride + c, lanes);
    put(out + c, (sum[0] + sum[1]) + (sum[2] + sum[3]), lanes);
  });
}

template <int N>
void few_rows(float* out, const float* x, const float* weight, const float* bias, i64 I, i64 O,
              i32 transposed, const Work& work) {
  if (transposed) return few_rows_transposed<N>(out, x, weight, bias, I, O, work);
  few_rows_plain<N>(out, x, weight, bias, I, O, work);
}

}  // namespace

extern "C" {

// Writes out. N <= 4 has its own order of additions, so a row's bits depend on N (never on
// threads).
void linear_forward(float* out, const float* x, const float* weight, const float* bias, i64 N,
                    i64 I, i64 O, i32 transposed, const Work& work) {
  static_assert(FEW_ROWS == 4, "a case each");
  switch (N) {
    case 1:
      return few_rows<1>(out, x, weight, bias, I, O, transposed, work);
    case 2:
      return few_rows<2>(out, x, weight, bias, I, O, transposed, work);
    case 3:
      return few_rows<3>(out, x, weight, bias, I, O, transposed, work);
    case 4:
      return few_rows<4>(out, x, weight, bias, I, O, transposed, work);
  }
  gemm({N, O, I, x, I, 1, weight, transposed ? 1 : O, transposed ? I : 1, out, bias, false}, work);
}

// Writes dx or adds to it.
void linear_backward_input(float* dx, const float* dout, const float* weight, i64 N, i64 I, i64 O,
                           i32 transposed, i32 accumulate, const Work& work) {
  gemm({N, I, O, dout, O, 1, weight, transposed ? I : 1, transposed ? 1 : O, dx, nullptr,
        accumulate == ADD},
       work);
}

// Writes dweight or adds to it.
void linear_backward_weight(float* dweight, const float* x, const float* dout, const float* scalars,
                            i64 N, i64 I, i64 O, i32 transposed, i32 accumulate, const Work& work) {
  const bool add = adds(accumulate, scalars);
  if (transposed) {
    gemm({O, I, N, dout, 1, O, x, I, 1, dweight, nullptr, add}, work);
  } else {
    gemm({I, O, N, x, 1, I, dout, O, 1, dweight, nullptr, add}, work);
  }
}

// Two passes: partial sums over the blocks of rows that a product over N has (gemm.h), then their
// sum in order; so it has the bits of linear_backward_weight_bias. Writes dbias or adds to it.
void linear_backward_bias(float* dbias, const float* dout, const float* scalars, i64 N, i64 O,
                          i32 accumulate, const Work& work) {
  constexpr i64 STRIPE = 64;
  float* partial = static_cast<float*>(work.scratch);
  const i64 depth = block_depth(N), blocks = ceil_div(N, depth), stripes = ceil_div(O, STRIPE);
  run_tiles(work, blocks * stripes, [=](i64 tile) {
    const i64 n = tile / stripes * depth, o = tile % stripes * STRIPE;
    column_sums(partial + n / depth * O + o, dout + n * O + o, O, min(depth, N - n),
                min(STRIPE, O - o));
  });
  add_parts(dbias, partial, blocks, O, O, adds(accumulate, scalars), work);
}

// Both gradients from one read of dout: its columns are summed while the product packs them. Writes
// both or adds to both.
void linear_backward_weight_bias(float* dweight, float* dbias, const float* x, const float* dout,
                                 const float* scalars, i64 N, i64 I, i64 O, i32 accumulate,
                                 const Work& work) {
  const bool add = adds(accumulate, scalars);
  const i64 depth = block_depth(N);
  float* partial = static_cast<float*>(work.scratch);
  const u64 sums = linear_backward_bias_workspace(N, O);
  const Work rest = {partial + sums / sizeof(float), work.threads};
  gemm({I, O, N, x, 1, I, dout, O, 1, dweight, nullptr, add}, rest,
       [=](i64 n, i64 o, const float* panel, i64 width, i64 rows, i64 cols) {
         column_sums(partial + n / depth * O + o, panel, width, rows, cols);
       });
  add_parts(dbias, partial, ceil_div(N, depth), O, O, add, work);
}

}  // extern "C"

u64 linear_forward_workspace(i64 N, i64 I, i64 O) {
  return N <= FEW_ROWS ? 0 : gemm_workspace(N, O, I);
}
u64 linear_backward_input_workspace(i64 N, i64 I, i64 O) { return gemm_workspace(N, I, O); }
u64 linear_backward_weight_workspace(i64 N, i64 I, i64 O, i32 transposed) {
  return transposed ? gemm_workspace(O, I, N) : gemm_workspace(I, O, N);
}
u64 linear_backward_bias_workspace(i64 N, i64 O) {
  return u64(ceil_div(N, block_depth(N))) * round_up(O, W) * sizeof(float);
}
u64 linear_backward_weight_bias_workspace(i64 N, i64 I, i64 O) {
  return linear_backward_bias_workspace(N, O) + gemm_workspace(I, O, N);
}
