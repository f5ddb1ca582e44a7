// vec.h: portable SIMD. One source for AVX-512, AVX2, SSE2, NEON and WebAssembly simd128, written
// with the compiler's vector types; only the number of lanes differs.
//
//   vf, vi        vectors of W floats, of W 32-bit integers; W is 16, 8 or 4
//   load, store   any address that is aligned for one float
//   *_part        the first n lanes only; the others load as 0
//   fma           fused where the hardware has it. Contraction is off, so every fused operation is
//                 written down. On wasm a generic fma would become a scalar call: it is two there
//   exp, log      our own: the C library's are scalar, differ between systems, and wasm has none
#pragma once
#include "call.h"

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

typedef float vf __attribute__((ext_vector_type(W)));
typedef i32 vi __attribute__((ext_vector_type(W)));
typedef bool vb __attribute__((ext_vector_type(W)));
typedef float vf_unaligned __attribute__((ext_vector_type(W), aligned(4), may_alias));
typedef float f4 __attribute__((ext_vector_type(4)));
typedef float f4_unaligned __attribute__((ext_vector_type(4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline f4 load4(const float* p) { return *reinterpret_cast<const f4_unaligned*>(p); }
inline void store4(float* p, f4 x) { *reinterpret_cast<f4_unaligned*>(p) = x; }
inline vf splat(float x) { return vf(x); }

inline vi lane_index() {
  vi lanes;
  for (int i = 0; i < W; i++) lanes[i] = i;
  return lanes;
}

inline vb first_lanes(i64 n) { return __builtin_convertvector(lane_index() < vi(i32(n)), vb); }
inline vf load_part(const float* p, i64 n) {
  return __builtin_masked_load(first_lanes(n), p, vf(0.0f));
}
inline void store_part(float* p, vf x, i64 n) { __builtin_masked_store(first_lanes(n), x, p); }

// A row of C elements is walked by for_lanes(C, body): body(i, Full{}) for whole vectors and once
// body(i, Part{n}) for a rest. The overloads below let one body serve both.
struct Full {};
struct Part {
  i64 n;
};
inline vf get(const float* p, Full) { return load(p); }
inline vf get(const float* p, Part part) { return load_part(p, part.n); }
inline void put(float* p, vf x, Full) { store(p, x); }
inline void put(float* p, vf x, Part part) { store_part(p, x, part.n); }
// x in the lanes of the row, `other` behind its end.
inline vf keep(vf x, vf, Full) { return x; }
inline vf keep(vf x, vf other, Part part) { return lane_index() < vi(i32(part.n)) ? x : other; }

template <class Body>
inline void for_lanes(i64 n, const Body& body) {
  i64 i = 0;
  for (; i + W <= n; i += W) body(i, Full{});
  if (i < n) body(i, Part{n - i});
}

inline vf fma(vf a, vf b, vf c) {
  if constexpr (HAS_FMA) return __builtin_elementwise_fma(a, b, c);
  return a * b + c;
}
inline vf sqrt(vf x) { return __builtin_elementwise_sqrt(x); }
inline float sqrt(float x) { return __builtin_elementwise_sqrt(x); }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Sums and maxima over lanes, in one fixed order: halves are folded onto each other. Compilers turn
// the loops into shuffles; writing those by hand gained nothing.
inline float sum_lanes(vf x) {
  float t[W];
  store(t, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] += t[i + half];
  return t[0];
}
inline float max_lanes(vf x) {
  float t[W];
  store(t, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}

// The sum of body(i, lanes) over a row of n elements. Blocks of 16 vectors are summed on their own,
// so that the error of a long row of like signs stays at a few eps and does not grow with n / W.
template <class Body>
inline float row_sum(i64 n, const Body& body) {
  vf total = splat(0.0f);
  for (i64 start = 0; start < n; start += 16 * W) {
    vf part = splat(0.0f);
    for_lanes(min(16 * W, n - start), [&](i64 i, auto lanes) { part += body(start + i, lanes); });
    total += part;
  }
  return sum_lanes(total);
}

// exp(x): x = n ln2 + r with |r| <= ln2/2 and ln2 in two parts; exp(r) = 1 + r + r^2 p(r) (Cephes'
// polynomial), times 2^n through the exponent bits. Within 1 ulp with FMA, 2 without. Exactly 0
// below -87.33 (no subnormals), constant above 88, NaN for NaN: callers subtract a maximum first.
inline vf exp(vf x) {
  const vf rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves n in the low mantissa bits
  const vf low = splat(-87.3365f), high = splat(88.0f);
  const vf y = x > high ? high : x;
  const vf t = fma(y, splat(1.44269504f), rounder);
  const vf n = t - rounder;
  vf r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const vi power = (__builtin_bit_cast(vi, t) << 23) + vi(127 << 23);
  const vf result = p * __builtin_bit_cast(vf, power);
  return x < low ? splat(0.0f) : result;
}

// log(x) for normal x > 0, NaN for NaN: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and Cephes'
// polynomial in m - 1. Within 1 ulp of the result plus the rounding of n ln2.
inline vf log(vf x) {
  const vi bits = __builtin_bit_cast(vi, x);
  vi n = (bits >> 23) - vi(126);
  vf m = __builtin_bit_cast(vf, (bits & vi(0x007fffff)) | vi(0x3f000000));  // [0.5, 1)
  const vi low = m < splat(0.70710678f);
  m = low ? m + m : m;
  n += low;  // true is -1
  const vf e = __builtin_convertvector(n, vf), f = m - splat(1.0f), z = f * f;
  vf p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  vf y = fma(e, splat(-2.12194440e-4f), f * z * p);
  y = fma(z, splat(-0.5f), y);
  const vf result = fma(e, splat(0.693359375f), f + y);
  return x == x ? result : x;
}

// Writes the transpose of a 4 x 4 block: out[c * out_stride + r] = in[r * in_stride + c].
inline void transpose4(float* out, i64 out_stride, const float* in, i64 in_stride) {
  const f4 a = load4(in), b = load4(in + in_stride), c = load4(in + 2 * in_stride),
           d = load4(in + 3 * in_stride);
  const f4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const f4 ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const f4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const f4 cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store4(out, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
  store4(out + out_stride, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
  store4(out + 2 * out_stride, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
  store4(out + 3 * out_stride, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
}
