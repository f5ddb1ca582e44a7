// embedding: token and position embeddings, and the gradient of their tables.
//
//   forward    out[n] = token_table[tokens[n]] + position_table[positions[n]]
//   derive     out[n,c] contains table[k,c] once where index[n] == k, and not at all elsewhere
//   backward   dtable[k] = sum of dout[n] over the n with index[n] == k
#include "ops.h"
#include "pool.h"
#include "vec.h"

extern "C" {

// One addition an element, hence bit-exact on every engine. Tiles of rows; writes out.
void embedding_forward(float* out, const i32* tokens, const i32* positions,
                       const float* token_table, const float* position_table, i64 N, i64 C,
                       const Work& work) {
  run_rows(work, N, rows_per_tile(C), [=](i64 first, i64 last) {
    for (i64 n = first; n < last; n++) {
      const float* token = token_table + i64(tokens[n]) * C;
      const float* position = position_table + i64(positions[n]) * C;
      for_lanes(C, [=](i64 c, auto lanes) {
        put(out + n * C + c, get(token + c, lanes) + get(position + c, lanes), lanes);
      });
    }
  });
}

// The host sorts the indices once a batch: table row rows[j] is used by positions order[starts[j]]
// to order[starts[j + 1] - 1], the last range ends at N, and unused places of rows hold -1. So each
// table row has one writer and a fixed order of additions, without atomics. Under WRITE (and BETA
// with beta == 0) a first pass zeroes the table, as the index does not list unused rows.
// Tiles: (8 entries of rows) x (columns). Writes dtable or adds to it.
void embedding_backward_weight(float* dtable, const float* dout, const i32* rows, const i32* starts,
                               const i32* order, const float* scalars, i64 N, i64 C, i64 K,
                               i32 accumulate, const Work& work) {
  const bool add = adds(accumulate, scalars);
  if (!add) {
    run_rows(work, K * C, 65536, [=](i64 first, i64 last) {
      for_lanes(last - first,
                [=](i64 i, auto lanes) { put(dtable + first + i, splat(0.0f), lanes); });
    });
  }
  constexpr i64 ENTRIES = 8, COLUMNS = 4 * W;
  const i64 column_tiles = ceil_div(C, COLUMNS);
  run_tiles(work, ceil_div(N, ENTRIES) * column_tiles, [=](i64 tile) {
    const i64 j0 = tile / column_tiles * ENTRIES, j1 = min(N, j0 + ENTRIES);
    const i64 c0 = tile % column_tiles * COLUMNS, width = min(COLUMNS, C - c0);
    for (i64 j = j0; j < j1; j++) {
      if (rows[j] < 0) continue;
      const i64 first = starts[j], last = j + 1 < N ? starts[j + 1] : N;
      for_lanes(width, [=](i64 c, auto lanes) {
        vf sum = splat(0.0f);
        for (i64 s = first; s < last; s++) sum += get(dout + i64(order[s]) * C + c0 + c, lanes);
        float* target = dtable + i64(rows[j]) * C + c0 + c;
        put(target, add ? get(target, lanes) + sum : sum, lanes);
      });
    }
  });
}

}  // extern "C"
