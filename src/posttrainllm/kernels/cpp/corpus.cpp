// The two parts of a text, and the fixed windows of an evaluation: see statistics.h, and
// text/corpus.py for the reasons.

#include "statistics.h"

namespace {

constexpr uint64_t LONGEST = 4;  // bytes of a character

}  // namespace

extern "C" {

uint64_t corpus_split_near(uint64_t n, double fraction) {
  return uint64_t(double(n) * (1 - fraction));
}

uint64_t corpus_split(const uint8_t* near, uint64_t n, double fraction) {
  const uint64_t exact = corpus_split_near(n, fraction);
  const uint64_t left = n - exact < LONGEST ? n - exact : LONGEST;
  for (uint64_t i = 0; i < left; i++) {
    if ((near[i] & 0xC0) != 0x80) return exact + i;
  }
  return left < LONGEST ? n : exact;
}

uint64_t corpus_validation_offsets(int64_t* out, uint64_t n_val, uint64_t wanted, uint64_t n_ctx) {
  const uint64_t available = (n_val > 0 ? n_val - 1 : 0) / n_ctx;
  const bool all = wanted == 0 || wanted >= available;
  const uint64_t count = all ? available : wanted;
  if (out) {
    for (uint64_t i = 0; i < count; i++) {
      out[i] = int64_t((all ? i : (2 * i + 1) * available / (2 * wanted)) * n_ctx);
    }
  }
  return count;
}

}  // extern "C"
