// attention.h: the small matrix product of the attention kernels. Its operands are read where they
// lie, as blocks of at most 64 x 64 x 256 are used too few times to be packed again.
#pragma once
#include "vec.h"

#if defined(__AVX512F__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = 4;
#endif

// c[m, 0 .. VECTORS * W) = or += sum_k a[m * a_row + k * a_col] b[k * b_row + n], M rows.
template <int M, int VECTORS, class Lanes>
inline void product_block(float* c, i64 c_row, const float* a, i64 a_row, i64 a_col, const float* b,
                          i64 b_row, i64 K, bool add, Lanes lanes) {
  vf sum[M][VECTORS];
#pragma clang loop unroll(full)
  for (int m = 0; m < M; m++)
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) sum[m][v] = splat(0.0f);
  for (i64 k = 0; k < K; k++) {
    vf column[VECTORS];
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) column[v] = get(b + k * b_row + v * W, lanes);
#pragma clang loop unroll(full)
    for (int m = 0; m < M; m++) {
      const vf factor = splat(a[m * a_row + k * a_col]);
#pragma clang loop unroll(full)
      for (int v = 0; v < VECTORS; v++) sum[m][v] = fma(factor, column[v], sum[m][v]);
    }
  }
#pragma clang loop unroll(full)
  for (int m = 0; m < M; m++)
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
      float* target = c + m * c_row + v * W;
      put(target, add ? get(target, lanes) + sum[m][v] : sum[m][v], lanes);
    }
}

template <int M>
inline void product_rows(float* c, i64 c_row, const float* a, i64 a_row, i64 a_col, const float* b,
                         i64 b_row, i64 N, i64 K, bool add) {
  i64 n = 0;
  for (; n + 2 * W <= N; n += 2 * W)
    product_block<M, 2>(c + n, c_row, a, a_row, a_col, b + n, b_row, K, add, Full{});
  for (; n + W <= N; n += W)
    product_block<M, 1>(c + n, c_row, a, a_row, a_col, b + n, b_row, K, add, Full{});
  if (n < N) product_block<M, 1>(c + n, c_row, a, a_row, a_col, b + n, b_row, K, add, Part{N - n});
}

// c (M, N) = or += a b for M <= ROWS; c and b have rows of adjacent elements, a has any strides.
inline void product(float* c, i64 c_row, const float* a, i64 a_row, i64 a_col, const float* b,
                    i64 b_row, i64 M, i64 N, i64 K, bool add) {
  if (M == ROWS) return product_rows<ROWS>(c, c_row, a, a_row, a_col, b, b_row, N, K, add);
  for (i64 m = 0; m < M; m++)
    product_rows<1>(c + m * c_row, c_row, a + m * a_row, a_row, a_col, b, b_row, N, K, add);
}
