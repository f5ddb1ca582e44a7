// gemm.h: one matrix product for all linear ops: C = A B (+ bias), or C += A B, for A and B with
// any strides, C dense and row-major (M, N).
//
// The scheme is Goto's. Pass 1 packs a block of B (at most PACK floats) into panels of NR columns,
// so that the inner loop reads it in order, whatever the strides were. Pass 2 cuts C into tiles; a
// tile packs its rows of A into panels of MR rows on the stack and runs the microkernel: an MR x NR
// block of C stays in registers while k runs over KC values. Edges are padded with zeros in the
// packed panels, only the store is partial.
//
// Each element of C is summed in k order inside blocks of kc and the blocks are added in order. All
// blocks and tiles follow from (M, N, K), so the result does not depend on the number of threads.
#pragma once
#include "pool.h"
#include "vec.h"

// MR x NR accumulators must leave registers for NV vectors of B and one broadcast of A.
#if defined(__AVX512F__)
constexpr int MR = 8, NV = 3;
#elif defined(__AVX__)
constexpr int MR = 6, NV = 2;
#elif defined(__aarch64__)
constexpr int MR = 8, NV = 2;  // by the register count; not measured
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr i64 NR = NV * W;
constexpr i64 KC = 256;           // a panel of B (KC x NR) stays in the first-level cache
constexpr i64 MC = 64 / MR * MR;  // a block of A (MC x KC, 64 KiB) in the second-level cache
constexpr i64 PACK = 1 << 18;     // floats of packed B at a time
constexpr i64 ENOUGH_TILES = 16;  // tiles of C to cut even a small product into
constexpr i64 FEW_ROWS = 4;       // products of no more rows are not packed: see linear.cpp

// Values of k a block, by K alone.
inline i64 block_depth(i64 K) { return round_up(ceil_div(K, ceil_div(K, KC)), 4); }

struct Gemm {
  i64 M, N, K;
  const float* a;
  i64 a_row, a_col;  // a(m, k) = a[m * a_row + k * a_col]; one of the two is 1
  const float* b;
  i64 b_row, b_col;  // b(k, n) = b[k * b_row + n * b_col]; one of the two is 1
  float* c;
  const float* bias;  // (N) or null
  bool add;
  const float* residual = nullptr;  // (M, N) or null: added to the finished product
};

struct Blocking {
  i64 kc, ks, nc, mc, panels;

  // kc: columns of A a block; ks: rows of B packed at a time (whole blocks); nc: columns of B
  // packed at a time; mc and panels: rows and panels of B in a tile of C.
  Blocking(i64 M, i64 N, i64 K) {
    kc = block_depth(K);
    const i64 most = PACK / kc / NR * NR;
    nc = N <= most ? N : round_up(ceil_div(N, ceil_div(N, most)), NR);
    ks = kc * min(ceil_div(K, kc), max(1, PACK / (kc * round_up(nc, W))));
    mc = min(MC, round_up(ceil_div(M, ENOUGH_TILES), MR));
    const i64 bands = ceil_div(M, mc);
    panels = max(1, ceil_div(nc, NR) / max(1, ENOUGH_TILES / bands));
  }
  i64 packed_floats() const { return ks * round_up(nc, W); }
};

inline u64 gemm_workspace(i64 M, i64 N, i64 K) {
  return u64(Blocking(M, N, K).packed_floats()) * sizeof(float);
}

// out[k * width + n] = b(k, n) for n < cols, 0 up to width; b points to the panel's first element.
inline void pack_b(float* out, i64 width, const float* b, i64 b_row, i64 b_col, i64 K, i64 cols) {
  if (b_col == 1) {
    for (i64 k = 0; k < K; k++) {
      for (i64 n = 0; n < width; n += W) {
        const float* from = b + k * b_row + n;
        store(out + k * width + n, n + W <= cols ? load(from) : load_part(from, cols - n));
      }
    }
    return;
  }
  i64 n = 0;
  for (; n + 4 <= cols; n += 4) {
    const float* from = b + n * b_col;
    i64 k = 0;
    for (; k + 4 <= K; k += 4) transpose4(out + k * width + n, width, from + k, b_col);
    for (; k < K; k++)
      for (i64 i = 0; i < 4; i++) out[k * width + n + i] = from[i * b_col + k];
  }
  for (; n < width; n++)
    for (i64 k = 0; k < K; k++) out[k * width + n] = n < cols ? b[n * b_col + k * b_row] : 0.0f;
}

inline void copy_group(float* out, const float* from) {
  int m = 0;
  for (; m + 4 <= MR; m += 4) store4(out + m, load4(from + m));
  for (; m < MR; m++) out[m] = from[m];
}

// Panels of MR rows: out[(m / MR) * MR * K + k * MR + m % MR] = a(m, k) for m < rows, 0 behind.
inline void pack_a(float* out, const float* a, i64 a_row, i64 a_col, i64 K, i64 rows) {
  if (a_row == 1) {
    // k outside, so that each line of a is read once although rows of a lie far apart
    const i64 whole = rows / MR * MR;
    for (i64 k = 0; k < K; k++) {
      const float* from = a + k * a_col;
      for (i64 m = 0; m < whole; m += MR) copy_group(out + m * K + k * MR, from + m);
      if (whole < rows) {
        for (i64 m = whole; m < whole + MR; m++)
          out[whole * K + k * MR + m - whole] = m < rows ? from[m] : 0.0f;
      }
    }
    return;
  }
  for (i64 m0 = 0; m0 < rows; m0 += MR) {
    float* panel = out + m0 * K;
    i64 m = 0;
    for (; m + 4 <= MR && m0 + m + 4 <= rows; m += 4) {
      const float* from = a + (m0 + m) * a_row;
      i64 k = 0;
      for (; k + 4 <= K; k += 4) transpose4(panel + k * MR + m, MR, from + k, a_row);
      for (; k < K; k++)
        for (i64 i = 0; i < 4; i++) panel[k * MR + m + i] = from[i * a_row + k];
    }
    for (; m < MR; m++)
      for (i64 k = 0; k < K; k++)
        panel[k * MR + m] = m0 + m < rows ? a[(m0 + m) * a_row + k] : 0.0f;
  }
}

// c (rows x cols, at most MR x VECTORS * W) = a panel of A times a panel of B (+ bias), or += .
template <int VECTORS>
void microkernel(i64 K, const float* a, const float* b, float* c, i64 ldc, i64 rows, i64 cols,
                 const float* bias, bool add, const float* residual) {
  vf sum[MR][VECTORS];
#pragma clang loop unroll(full)
  for (int m = 0; m < MR; m++)
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) sum[m][v] = splat(0.0f);
  for (i64 k = 0; k < K; k++) {
    vf column[VECTORS];
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) column[v] = load(b + k * VECTORS * W + v * W);
#pragma clang loop unroll(full)
    for (int m = 0; m < MR; m++) {
      const vf factor = splat(a[k * MR + m]);
#pragma clang loop unroll(full)
      for (int v = 0; v < VECTORS; v++) sum[m][v] = fma(factor, column[v], sum[m][v]);
    }
  }
  if (rows == MR && cols == VECTORS * W) {
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
      const vf shift = bias ? load(bias + v * W) : splat(0.0f);
#pragma clang loop unroll(full)
      for (int m = 0; m < MR; m++) {
        float* target = c + m * ldc + v * W;
        vf value = sum[m][v] + shift;
        if (add) value = load(target) + value;
        store(target, residual ? load(residual + m * ldc + v * W) + value : value);
      }
    }
    return;
  }
  float edge[MR * VECTORS * W];
#pragma clang loop unroll(full)
  for (int m = 0; m < MR; m++)
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) store(edge + (m * VECTORS + v) * W, sum[m][v]);
  for (i64 m = 0; m < rows; m++) {
    for_lanes(cols, [&](i64 n, auto lanes) {
      float* target = c + m * ldc + n;
      const vf shift = bias ? get(bias + n, lanes) : splat(0.0f);
      vf value = load(edge + m * VECTORS * W + n) + shift;
      if (add) value = get(target, lanes) + value;
      put(target, residual ? get(residual + m * ldc + n, lanes) + value : value, lanes);
    });
  }
}

inline void microkernel(i64 width, i64 K, const float* a, const float* b, float* c, i64 ldc,
                        i64 rows, i64 cols, const float* bias, bool add, const float* residual) {
  if (width == NR) return microkernel<NV>(K, a, b, c, ldc, rows, cols, bias, add, residual);
  if constexpr (NV > 2) {
    if (width == 2 * W) return microkernel<2>(K, a, b, c, ldc, rows, cols, bias, add, residual);
  }
  microkernel<1>(K, a, b, c, ldc, rows, cols, bias, add, residual);
}

// What a caller may do along the way, on data that the caches still hold. Both run inside tiles,
// hence on several threads, and each is called once for every piece:
//   packed(k, n, panel, width, rows, cols)   rows x cols of B from (k, n) on, `width` floats a row
//   done(m, n, rows, cols)                   rows x cols of C from (m, n) on, complete
struct NoHook {
  void operator()(i64, i64, const float*, i64, i64, i64) const {}
  void operator()(i64, i64, i64, i64) const {}
};

template <class Packed = NoHook, class Done = NoHook>
inline void gemm(const Gemm& g, const Work& work, const Packed& on_packed = {},
                 const Done& on_done = {}) {
  const Blocking blocking(g.M, g.N, g.K);
  const i64 kc = blocking.kc, mc = blocking.mc;
  float* packed = static_cast<float*>(work.scratch);
  for (i64 n0 = 0; n0 < g.N; n0 += blocking.nc) {
    const i64 nc = min(blocking.nc, g.N - n0), padded = round_up(nc, W);
    const i64 panels = ceil_div(nc, NR);
    for (i64 k0 = 0; k0 < g.K; k0 += blocking.ks) {
      const i64 ks = min(blocking.ks, g.K - k0), blocks = ceil_div(ks, kc);
      run_tiles(work, blocks * panels, [=](i64 tile) {
        const i64 k = tile / panels * kc, n = tile % panels * NR;
        const i64 rows = min(kc, ks - k), cols = min(NR, nc - n);
        float* panel = packed + k * padded + n * rows;
        pack_b(panel, round_up(cols, W), g.b + (k0 + k) * g.b_row + (n0 + n) * g.b_col, g.b_row,
               g.b_col, rows, cols);
        on_packed(k0 + k, n0 + n, panel, round_up(cols, W), rows, cols);
      });
      const i64 bands = ceil_div(g.M, mc), stripes = ceil_div(panels, blocking.panels);
      run_tiles(work, bands * stripes, [=](i64 tile) {
        alignas(64) float block[MC * KC];
        const i64 m0 = tile / stripes * mc, rows = min(mc, g.M - m0);
        const i64 p0 = tile % stripes * blocking.panels, p1 = min(panels, p0 + blocking.panels);
        for (i64 k = 0; k < ks; k += kc) {
          const i64 depth = min(kc, ks - k);
          pack_a(block, g.a + m0 * g.a_row + (k0 + k) * g.a_col, g.a_row, g.a_col, depth, rows);
          const bool start = k0 + k == 0, end = k0 + k + depth == g.K;
          for (i64 p = p0; p < p1; p++) {
            const i64 n = p * NR, cols = min(NR, nc - n);
            const float* bias = start && g.bias ? g.bias + n0 + n : nullptr;
            for (i64 m = 0; m < rows; m += MR) {
              const i64 at = (m0 + m) * g.N + n0 + n;
              microkernel(round_up(cols, W), depth, block + m * depth,
                          packed + k * padded + n * depth, g.c + at, g.N, min(MR, rows - m), cols,
                          bias, !start || g.add, end && g.residual ? g.residual + at : nullptr);
            }
          }
          if (end) on_done(m0, n0 + p0 * NR, rows, min(p1 * NR, nc) - p0 * NR);
        }
      });
    }
  }
}
