// gelu.h: the value and the derivative of gelu on vectors. gelu.cpp derives them; fused.cpp uses
// them on tiles of a product.
#pragma once
#include "vec.h"

namespace gelu {

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

struct Both {
  vf value, derivative;
};

// x is clamped in the derivative only; beyond the clamp z is at its own limit, so that one
// exponential serves both, and each has the bits that it has alone.
template <bool ERF>
inline Both both(vf x) {
  if constexpr (ERF) {
    const vf bell = exp(splat(-0.5f) * (x * x)), f = normal_distribution(x, bell);
    return {x * f, fma(x * bell, splat(INV_SQRT_2PI), f)};
  }
  const vf y = clamp(x, 12.0f), square = y * y, e = exp_minus_z(y, square);
  const vf one_e = splat(1.0f) + e, s = splat(1.0f) / one_e;
  const vf dz = fma(square, splat(3.0f * SQRT_8_OVER_PI * CUBIC), splat(SQRT_8_OVER_PI));
  return {x / one_e, fma(y * s * (e * s), dz, s)};
}

template <bool ERF>
inline vf derivative(vf x) {
  return both<ERF>(x).derivative;
}

}  // namespace gelu
