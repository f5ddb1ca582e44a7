// attention: causal self-attention over packed segments, and its key/value cache for generating.
// Row (b, t) sees the keys s with segment_start[b,t] <= s <= t.
//
//   forward    S[t,s] = a q[t].k[s], a = 1 / sqrt(D);  lse[t] = log(sum_s exp(S[t,s]))
//              P[t,s] = exp(S[t,s] - lse[t]);  out[t] = sum_s P[t,s] v[s]
//   derive     dP[t,s] = dout[t].v[s];  softmax: dS[t,s] = P[t,s] (dP[t,s] - r[t]) with
//              r[t] = sum_s P[t,s] dP[t,s] = dout[t].out[t], a row sum that needs no P
//   backward   dv[s] = sum_t P[t,s] dout[t];  dk[s] = a sum_t dS[t,s] q[t]
//              dq[t] = a sum_s dS[t,s] k[s]
//
// FlashAttention-2's loops over blocks of BLOCK queries and BLOCK keys: nothing of size T x T is
// kept beyond one block. Forward keeps a running maximum and sum a row, and rescales out when the
// maximum grows; it saves lse, from which backward recomputes P. Blocks of keys behind the queries
// or before every segment are skipped; in a diagonal block, bands of ROWS rows stop at their last
// key. A first pass packs k (backward: also v) transposed, so that keys lie in the lanes.
#include "attention.h"
#include "ops.h"
#include "pool.h"

namespace {

constexpr i64 BLOCK = 64;  // queries, keys: two tiles of 16 KiB beside q, k, v in the L1 cache

struct Shape {
  i64 B, T, C, H, D, blocks;
  float scale;

  Shape(i64 B, i64 T, i64 C, i64 H)
      : B(B),
        T(T),
        C(C),
        H(H),
        D(C / H),
        blocks(ceil_div(T, BLOCK)),
        scale(1.0f / sqrt(float(C / H))) {}
  i64 packed_floats() const { return B * H * blocks * BLOCK * D; }
};

// The block of keys where the first visible key of the queries [q0, q1) lies.
i64 first_block(const i32* segment_start, i64 q0, i64 q1) {
  i64 least = segment_start[q0];
  for (i64 t = q0 + 1; t < q1; t++) least = min(least, segment_start[t]);
  return max(0, least) / BLOCK;
}

// out[d * BLOCK + s] = x[s * stride + d], zeros behind the last of `keys` rows.
void pack_transposed(float* out, const float* x, i64 stride, i64 keys, i64 D) {
  i64 s = 0;
  for (; s + 4 <= keys; s += 4) {
    i64 d = 0;
    for (; d + 4 <= D; d += 4) transpose4(out + d * BLOCK + s, BLOCK, x + s * stride + d, stride);
    for (; d < D; d++)
      for (i64 i = 0; i < 4; i++) out[d * BLOCK + s + i] = x[(s + i) * stride + d];
  }
  for (; s < BLOCK; s++)
    for (i64 d = 0; d < D; d++) out[d * BLOCK + s] = s < keys ? x[s * stride + d] : 0.0f;
}

// Keys of the block at k0 that the band of rows up to (not including) row `end` may see.
i64 visible(i64 k0, i64 end) { return min(BLOCK, end - k0); }

// The mask of row t as a range of lanes of the block at k0.
struct Range {
  vi low, high;
  Range(i64 segment_start, i64 t, i64 k0)
      : low(i32(max(segment_start - k0, 0))), high(i32(min(t - k0, BLOCK))) {}
  vf keep(vf x, vf other, i64 s) const {
    const vi lane = lane_index() + vi(i32(s));
    return ((lane >= low) & (lane <= high)) ? x : other;
  }
};

constexpr float NEVER = -3.0e38f;  // the score of a key that is not visible

// Turns a row of products q.k into exp(score - m), m the row's maximum so far; updates the running
// maximum and sum. Returns what earlier sums and outputs must be multiplied by.
float softmax_row(float* row, i64 width, const Range& range, float scale, float* most, float* sum) {
  vf top = splat(*most);
  for (i64 s = 0; s < width; s += W) {
    const vf score = range.keep(load(row + s) * splat(scale), splat(NEVER), s);
    store(row + s, score);
    top = larger(score, top);
  }
  const float m = max_lanes(top);
  const vf shift = splat(m == NEVER ? 0.0f : m);  // no key seen yet: all weights are exp(NEVER) = 0
  vf total = splat(0.0f);
  for (i64 s = 0; s < width; s += W) {
    const vf p = exp(load(row + s) - shift);
    store(row + s, p);
    total += p;
  }
  const float shrink = m == *most ? 1.0f : *most == NEVER ? 0.0f : exp(splat(*most) - shift)[0];
  *sum = *sum * shrink + sum_lanes(total);
  *most = m;
  return shrink;
}

// One block of queries: all its blocks of keys, then the division by the sums.
void forward_block(float* out, float* lse, const float* qkv, const i32* segment_start,
                   const float* keys_transposed, const Shape& a, i64 b, i64 h, i64 i) {
  alignas(64) float band[ROWS * BLOCK], most[BLOCK], sum[BLOCK];
  const i64 q0 = i * BLOCK, q1 = min(a.T, q0 + BLOCK), stride = 3 * a.C;
  const float* q = qkv + b * a.T * stride + h * a.D;
  const float* v = q + 2 * a.C;
  out += b * a.T * a.C + h * a.D;
  segment_start += b * a.T;
  for (i64 t = 0; t < BLOCK; t++) {
    most[t] = NEVER;
    sum[t] = 0.0f;
  }
  const i64 j0 = first_block(segment_start, q0, q1);
  for (i64 j = j0; j <= i; j++) {
    const i64 k0 = j * BLOCK;
    const float* keys = keys_transposed + k0 * a.D;
    for (i64 t0 = q0; t0 < q1; t0 += ROWS) {
      const i64 t1 = min(q1, t0 + ROWS), seen = visible(k0, t1), width = round_up(seen, W);
      product(band, BLOCK, q + t0 * stride, stride, 1, keys, BLOCK, t1 - t0, width, a.D, false);
      for (i64 t = t0; t < t1; t++) {
        const float shrink = softmax_row(band + (t - t0) * BLOCK, width, {segment_start[t], t, k0},
                                         a.scale, most + (t - q0), sum + (t - q0));
        if (j == j0 || shrink == 1.0f) continue;
        float* o = out + t * a.C;
        for_lanes(a.D,
                  [=](i64 d, auto lanes) { put(o + d, get(o + d, lanes) * splat(shrink), lanes); });
      }
      product(out + t0 * a.C, a.C, band, BLOCK, 1, v + k0 * stride, stride, t1 - t0, a.D, seen,
              j > j0);
    }
  }
  for (i64 t = q0; t < q1; t++) {
    const vf inverse = splat(1.0f / sum[t - q0]);
    float* o = out + t * a.C;
    for_lanes(a.D, [=](i64 d, auto lanes) { put(o + d, get(o + d, lanes) * inverse, lanes); });
  }
  float* saved = lse + (b * a.H + h) * a.T + q0;
  for_lanes(q1 - q0,
            [&](i64 t, auto lanes) { put(saved + t, load(most + t) + log(load(sum + t)), lanes); });
}

struct Backward {
  float* dqkv;
  const float *dout, *qkv, *lse;
  const i32* segment_start;
  const float *keys_transposed, *values_transposed, *row_sums;  // of one (b, h) at its own offset
};

// Block (i, j) of P and dS, and what follows from it: dk and dv of the keys, dq of the queries. dq
// is written by its first block of keys, dk and dv by their first block of queries, and added to by
// the later ones.
template <bool KEYS, bool QUERIES>
void backward_block(const Backward& x, const Shape& a, i64 b, i64 h, i64 i, i64 j) {
  alignas(64) float P[BLOCK * BLOCK], dS[BLOCK * BLOCK];
  const i64 q0 = i * BLOCK, q1 = min(a.T, q0 + BLOCK), k0 = j * BLOCK, stride = 3 * a.C;
  const i32* segment_start = x.segment_start + b * a.T;
  const i64 j0 = first_block(segment_start, q0, q1);
  if (j < j0) return;
  const float* q = x.qkv + b * a.T * stride + h * a.D;
  const float *k = q + a.C, *dout = x.dout + b * a.T * a.C + h * a.D;
  float* dq = x.dqkv + b * a.T * stride + h * a.D;
  const i64 head = b * a.H + h, packed = (head * a.blocks + j) * BLOCK * a.D;
  for (i64 t0 = q0; t0 < q1; t0 += ROWS) {
    const i64 t1 = min(q1, t0 + ROWS), seen = visible(k0, t1), width = round_up(seen, W);
    float *p_band = P + (t0 - q0) * BLOCK, *s_band = dS + (t0 - q0) * BLOCK;
    product(p_band, BLOCK, q + t0 * stride, stride, 1, x.keys_transposed + packed, BLOCK, t1 - t0,
            width, a.D, false);
    product(s_band, BLOCK, dout + t0 * a.C, a.C, 1, x.values_transposed + packed, BLOCK, t1 - t0,
            width, a.D, false);
    for (i64 t = t0; t < t1; t++) {
      float *p_row = p_band + (t - t0) * BLOCK, *s_row = s_band + (t - t0) * BLOCK;
      const Range range(segment_start[t], t, k0);
      const vf lse = splat(x.lse[head * a.T + t]), row_sum = splat(x.row_sums[head * a.T + t]);
      for (i64 s = 0; s < width; s += W) {
        const vf score = range.keep(load(p_row + s) * splat(a.scale), splat(NEVER), s);
        const vf p = exp(score - lse);
        store(p_row + s, p);
        store(s_row + s, p * (load(s_row + s) - row_sum) * splat(a.scale));
      }
    }
    if constexpr (QUERIES) {
      product(dq + t0 * stride, stride, s_band, BLOCK, 1, k + k0 * stride, stride, t1 - t0, a.D,
              seen, j > j0);
    }
  }
  if constexpr (KEYS) {
    const i64 keys = min(BLOCK, a.T - k0);
    for (i64 s = 0; s < keys; s += ROWS) {
      const i64 count = min(ROWS, keys - s),
                t = i == j ? q0 + s : q0;  // on the diagonal: queries from s on
      const i64 at = (t - q0) * BLOCK + s;
      float* dk = dq + a.C + (k0 + s) * stride;
      product(dk, stride, dS + at, 1, BLOCK, q + t * stride, stride, count, a.D, q1 - t, i > j);
      product(dk + a.C, stride, P + at, 1, BLOCK, dout + t * a.C, a.C, count, a.D, q1 - t, i > j);
    }
  }
}

// One query of one head over cache rows 0 .. last (rows C apart), in blocks of keys with a running
// maximum.
void decode_row(float* out, const float* q, const float* k, const float* v, i64 last, i64 C,
                i64 D) {
  alignas(64) float weights[BLOCK], total[MAX_HEAD_SIZE];
  const float scale = 1.0f / sqrt(float(D));
  float most = NEVER, sum = 0.0f;
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

// Pass 1 tiles: blocks of keys. Pass 2 tiles: blocks of queries. Writes out and lse.
void attention_forward(float* out, float* lse, const float* qkv, const i32* segment_start, i64 B,
                       i64 T, i64 C, i64 H, const Work& work) {
  const Shape a(B, T, C, H);
  float* packed = static_cast<float*>(work.scratch);
  run_tiles(work, B * H * a.blocks, [=](i64 tile) {
    const i64 j = tile % a.blocks, h = tile / a.blocks % H, b = tile / a.blocks / H;
    pack_transposed(packed + tile * BLOCK * a.D, qkv + (b * T + j * BLOCK) * 3 * C + C + h * a.D,
                    3 * C, min(BLOCK, T - j * BLOCK), a.D);
  });
  run_tiles(work, B * H * a.blocks, [=](i64 tile) {  // the longest (last) blocks first
    const i64 i = a.blocks - 1 - tile / (B * H), head = tile % (B * H);
    forward_block(out, lse, qkv, segment_start, packed + head * a.blocks * BLOCK * a.D, a, head / H,
                  head % H, i);
  });
}

// With enough (b, h) for all threads a tile is one of them and every block is computed once.
// Otherwise two passes, tiles being blocks of keys (dk, dv) and then of queries (dq): two fifths
// more arithmetic, but parallel for any batch. Both add the same numbers in the same order, hence
// the same bits. Writes dqkv.
void attention_backward(float* dqkv, const float* dout, const float* qkv, const float* out,
                        const float* lse, const i32* segment_start, i64 B, i64 T, i64 C, i64 H,
                        const Work& work) {
  const Shape a(B, T, C, H);
  float* keys = static_cast<float*>(work.scratch);
  float *values = keys + a.packed_floats(), *row_sums = values + a.packed_floats();
  run_tiles(work, B * H * a.blocks, [=](i64 tile) {
    const i64 j = tile % a.blocks, h = tile / a.blocks % H, b = tile / a.blocks / H;
    const i64 first = b * T + j * BLOCK, count = min(BLOCK, T - j * BLOCK);
    const float* key = qkv + first * 3 * C + C + h * a.D;
    pack_transposed(keys + tile * BLOCK * a.D, key, 3 * C, count, a.D);
    pack_transposed(values + tile * BLOCK * a.D, key + C, 3 * C, count, a.D);
    for (i64 t = 0; t < count; t++) {
      const i64 at = (first + t) * C + h * a.D;
      vf sum = splat(0.0f);
      for_lanes(a.D, [&](i64 d, auto lanes) {
        sum = fma(get(dout + at + d, lanes), get(out + at + d, lanes), sum);
      });
      row_sums[(b * H + h) * T + j * BLOCK + t] = sum_lanes(sum);
    }
  });
  const Backward x = {dqkv, dout, qkv, lse, segment_start, keys, values, row_sums};
  if (B * H >= 2 * i64(work.threads)) {
    run_tiles(work, B * H, [=](i64 head) {
      for (i64 j = 0; j < a.blocks; j++)
        for (i64 i = j; i < a.blocks; i++)
          backward_block<true, true>(x, a, head / H, head % H, i, j);
    });
    return;
  }
  run_tiles(work, B * H * a.blocks, [=](i64 tile) {
    const i64 j = tile / (B * H), head = tile % (B * H);
    for (i64 i = j; i < a.blocks; i++) backward_block<true, false>(x, a, head / H, head % H, i, j);
  });
  run_tiles(work, B * H * a.blocks, [=](i64 tile) {
    const i64 i = a.blocks - 1 - tile / (B * H), head = tile % (B * H);
    for (i64 j = 0; j <= i; j++) backward_block<false, true>(x, a, head / H, head % H, i, j);
  });
}

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

u64 attention_forward_workspace(i64 B, i64 T, i64 C, i64 H) {
  return u64(Shape(B, T, C, H).packed_floats()) * sizeof(float);
}
u64 attention_backward_workspace(i64 B, i64 T, i64 C, i64 H) {
  return u64(2 * Shape(B, T, C, H).packed_floats() + B * H * T) * sizeof(float);
}
