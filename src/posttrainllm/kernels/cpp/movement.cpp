// How far training moves the numbers of a layer: see statistics.h.

#include "statistics.h"

extern "C" {

void movement_add(double* sums, const float* after, const float* before, uint64_t n) {
  double moved = sums[0], size = sums[1];
  for (uint64_t i = 0; i < n; i++) {
    const double was = before[i], change = double(after[i]) - was;
    moved += change * change;
    size += was * was;
  }
  sums[0] = moved;
  sums[1] = size;
}

double movement_ratio(const double* sums) {
  return sums[1] > 0 ? __builtin_sqrt(sums[0] / sums[1]) : 0.0;
}

}  // extern "C"
