// attention_decode: attention over a key/value cache, for generating. The formulas are
// attention.cpp's; the keys and values of earlier positions come from the cache instead of being
// computed again.
#include "ops.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr i64 BLOCK = 64, MAX_D = 256;

// One query of one head over cache rows 0 .. last (rows C apart), in blocks of keys with a running
// maximum.
void decode_row(float* out, const float* q, const float* k, const float* v, i64 last, i64 C,
                i64 D) {
  alignas(64) float weights[BLOCK], total[MAX_D];
  const float scale = 1.0f / sqrt(float(D));
  float most = -3.0e38f, sum = 0.0f;
  for (i64 d = 0; d < D; d++) total[d] = 0.0f;
  for (i64 s0 = 0; s0 <= last; s0 += BLOCK) {
    const i64 keys = min(BLOCK, last + 1 - s0);
    float m = most;
    for (i64 s = 0; s < keys; s++) {
      vf dot = splat(0.0f);
      for_lanes(D, [&](i64 d, auto lanes) {
        dot = fma(get(q + d, lanes), get(k + (s0 + s) * C + d, lanes), dot);
      });
      weights[s] = sum_lanes(dot) * scale;
      m = weights[s] > m ? weights[s] : m;
    }
    vf block_sum = splat(0.0f);
    for_lanes(keys, [&](i64 s, auto lanes) {
      const vf p = keep(exp(get(weights + s, lanes) - splat(m)), splat(0.0f), lanes);
      put(weights + s, p, lanes);
      block_sum += p;
    });
    const float shrink = exp(splat(most - m))[0];
    sum = sum * shrink + sum_lanes(block_sum);
    most = m;
    for_lanes(D, [&](i64 d, auto lanes) {
      vf o = get(total + d, lanes) * splat(shrink);
      for (i64 s = 0; s < keys; s++)
        o = fma(splat(weights[s]), get(v + (s0 + s) * C + d, lanes), o);
      put(total + d, o, lanes);
    });
  }
  const vf inverse = splat(1.0f / sum);
  for_lanes(D, [&](i64 d, auto lanes) { put(out + d, get(total + d, lanes) * inverse, lanes); });
}

}  // namespace

extern "C" {

// cache[0, b, positions[b,t]] = k[b,t];  cache[1, b, positions[b,t]] = v[b,t]. Tiles of rows;
// updates cache.
void attention_append(float* cache, const float* qkv, const i32* positions, i64 B, i64 T, i64 C,
                      i64 S, const Work& work) {
  run_rows(work, B * T, rows_per_tile(2 * C), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      const float* row = qkv + n * 3 * C + C;
      float* k = cache + (n / T * S + positions[n]) * C;
      float* v = k + B * S * C;
      for_lanes(C, [=](i64 c, auto lanes) {
        put(k + c, get(row + c, lanes), lanes);
        put(v + c, get(row + C + c, lanes), lanes);
      });
    }
  });
}

// Row (b, t) sees cache positions 0 .. positions[b,t]. Tiles: (b, t, h); writes out.
void attention_decode(float* out, const float* qkv, const float* cache, const i32* positions, i64 B,
                      i64 T, i64 C, i64 S, i64 H, const Work& work) {
  const i64 D = C / H;
  run_tiles(work, B * T * H, [=](i64 tile) {
    const i64 n = tile / H, h = tile % H;
    const float* k = cache + n / T * S * C + h * D;
    decode_row(out + n * C + h * D, qkv + n * 3 * C + h * D, k, k + B * S * C, positions[n], C, D);
  });
}

}  // extern "C"
