// int8: the matrix products of decoding, from weights that stay eight bits wide in memory.
//
//   forward    out[n,o] = scale[o] * sum_i x[n,i] q[i,o] + bias[o]
//              with transposed = 1, q is (O, I): the token table as the head
//
// A token is one row, so a product reads every weight once and does little with it: decoding takes
// as long as its weights take to come from memory, and these are a quarter of the float ones. Each
// int8 becomes a float in the register it is loaded into. There is no backward pass.
//
// Parallel over tiles of outputs, which no thread shares; a tile's sums run over i in one fixed
// order, so results do not depend on the number of threads. Blocks of DEPTH terms are summed on
// their own, so that the error of a long sum of like signs does not grow with its length. Up to four
// rows share one read of the weights; more are taken in groups. Writes out.
#include "ops.h"
#include "pool.h"
#include "vec.h"

namespace {

typedef signed char i8;
typedef i8 i8v __attribute__((ext_vector_type(W), aligned(1), may_alias));

constexpr i64 DEPTH = 256;

inline vf widen(const i8* q) {
  return __builtin_convertvector(*reinterpret_cast<const i8v*>(q), vf);
}

// Columns first .. first + V * W of N rows: weight rows are streamed, sums stay in registers.
template <int N, int V>
inline void columns(float* out, const float* x, const i8* q, const float* scale, const float* bias,
                    i64 I, i64 O, i64 first) {
  vf total[N][V];
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) total[n][v] = splat(0.0f);
  for (i64 start = 0; start < I; start += DEPTH) {
    vf sum[N][V];
    for (int n = 0; n < N; n++)
      for (int v = 0; v < V; v++) sum[n][v] = splat(0.0f);
    for (i64 i = start; i < min(I, start + DEPTH); i++) {
      for (int v = 0; v < V; v++) {
        const vf w = widen(q + i * O + first + v * W);
        for (int n = 0; n < N; n++) sum[n][v] = fma(splat(x[n * I + i]), w, sum[n][v]);
      }
    }
    for (int n = 0; n < N; n++)
      for (int v = 0; v < V; v++) total[n][v] += sum[n][v];
  }
  for (int v = 0; v < V; v++) {
    const i64 o = first + v * W;
    const vf s = load(scale + o), b = bias ? load(bias + o) : splat(0.0f);
    for (int n = 0; n < N; n++) store(out + n * O + o, fma(total[n][v], s, b));
  }
}

// One output of one row, where no vector fits: terms `stride` apart.
inline float one(const float* x, const i8* q, i64 I, i64 stride) {
  float total = 0.0f;
  for (i64 start = 0; start < I; start += DEPTH) {
    float sum = 0.0f;
    for (i64 i = start; i < min(I, start + DEPTH); i++) sum += x[i] * float(q[i * stride]);
    total += sum;
  }
  return total;
}

// q (I, O): tiles of 4 vectors of columns; the last tile's rest by single vectors and columns.
template <int N>
void plain(float* out, const float* x, const i8* q, const float* scale, const float* bias, i64 I,
           i64 O, const Work& work) {
  constexpr int V = 4;
  run_rows(work, O, V * W, [=](i64 first, i64 last) {
    if (last - first == V * W) return columns<N, V>(out, x, q, scale, bias, I, O, first);
    i64 o = first;
    for (; o + W <= last; o += W) columns<N, 1>(out, x, q, scale, bias, I, O, o);
    for (; o < last; o++) {
      for (int n = 0; n < N; n++)
        out[n * O + o] = one(x + n * I, q + o, I, O) * scale[o] + (bias ? bias[o] : 0.0f);
    }
  });
}

// q (O, I): every output is a dot product of two rows.
template <int N>
void transposed_rows(float* out, const float* x, const i8* q, const float* scale, const float* bias,
                     i64 I, i64 O, const Work& work) {
  run_rows(work, O, 32, [=](i64 first, i64 last) {
    for (i64 o = first; o < last; o++) {
      const i8* row = q + o * I;
      const i64 whole = I / W * W;
      vf total[N];
      for (int n = 0; n < N; n++) total[n] = splat(0.0f);
      for (i64 start = 0; start < whole; start += DEPTH * W) {
        vf sum[N];
        for (int n = 0; n < N; n++) sum[n] = splat(0.0f);
        for (i64 i = start; i < min(whole, start + DEPTH * W); i += W) {
          const vf w = widen(row + i);
          for (int n = 0; n < N; n++) sum[n] = fma(load(x + n * I + i), w, sum[n]);
        }
        for (int n = 0; n < N; n++) total[n] += sum[n];
      }
      for (int n = 0; n < N; n++) {
        const float rest = one(x + n * I + whole, row + whole, I - whole, 1);
        out[n * O + o] = (sum_lanes(total[n]) + rest) * scale[o] + (bias ? bias[o] : 0.0f);
      }
    }
  });
}

template <int N>
void rows(float* out, const float* x, const i8* q, const float* scale, const float* bias, i64 I,
          i64 O, i32 transposed, const Work& work) {
  if (transposed) return transposed_rows<N>(out, x, q, scale, bias, I, O, work);
  plain<N>(out, x, q, scale, bias, I, O, work);
}

}  // namespace

extern "C" {

// Writes out. weight holds four int8 in each i32, the first in its lowest byte: the int8 matrix as
// it lies in memory.
void int8_forward(float* out, const float* x, const i32* weight, const float* scale,
                  const float* bias, i64 N, i64 I, i64 O, i32 transposed, const Work& work) {
  const i8* q = reinterpret_cast<const i8*>(weight);
  i64 n = 0;
  for (; n + 4 <= N; n += 4)
    rows<4>(out + n * O, x + n * I, q, scale, bias, I, O, transposed, work);
  float* to = out + n * O;
  const float* from = x + n * I;
  if (N - n == 3) rows<3>(to, from, q, scale, bias, I, O, transposed, work);
  if (N - n == 2) rows<2>(to, from, q, scale, bias, I, O, transposed, work);
  if (N - n == 1) rows<1>(to, from, q, scale, bias, I, O, transposed, work);
}

}  // extern "C"
