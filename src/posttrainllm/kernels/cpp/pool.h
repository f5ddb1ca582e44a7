// pool.h: independent tiles of one op, run by several threads.
//
// An op cuts its work into tiles by its shape alone and calls run_tiles; the threads take tiles one
// by one from a counter, so that a thread which the system delays does not hold up the rest. The
// call returns when every tile is done, which makes consecutive ops (and passes) a barrier. Which
// thread runs which tile is a matter of timing, hence no tile may depend on another one.
//
// Not here: a queue, futures, nesting. A tile must not call run_tiles.
#pragma once
#include "call.h"

// Claims the pool for one program run and starts or resizes it when needed. Returns the number of
// threads to use: 1 when another thread of this process is using the pool at the moment.
u32 pool_begin(u32 threads);
void pool_end(u32 threads);

// Calls run(context, tile) for tile = 0 .. tiles-1.
void pool_run(i64 tiles, void (*run)(const void* context, i64 tile), const void* context);

template <class Body>
inline void run_tiles(const Work& work, i64 tiles, const Body& body) {
  if (work.threads <= 1 || tiles <= 1) {  // inline: no wake-up for work of one tile
    for (i64 tile = 0; tile < tiles; tile++) body(tile);
    return;
  }
  pool_run(
      tiles, [](const void* context, i64 tile) { (*static_cast<const Body*>(context))(tile); },
      &body);
}

// The same over rows 0 .. N-1 in tiles of `step` rows: body(first, last).
template <class Body>
inline void run_rows(const Work& work, i64 N, i64 step, const Body& body) {
  run_tiles(work, ceil_div(N, step),
            [&](i64 tile) { body(tile * step, min(N, (tile + 1) * step)); });
}

// Rows of C elements that make a tile of about 8192 elements: 3 to 10 us of work for the
// elementwise ops, so that handing out a tile (well under 1 us) does not show.
inline i64 rows_per_tile(i64 C) { return max(1, 8192 / C); }
