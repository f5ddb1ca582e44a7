// What to make of a run's figures: see statistics.h for what each function promises and
// training/writing.py for the reasons, the sources of the constants and the words.

#include "statistics.h"

namespace {

constexpr double BYTES_TO_MEMORISE = 1.8;
constexpr double EPOCHS_TO_MEMORISE = 4.0;
constexpr double BYTES_TO_WASTE = BYTES_TO_MEMORISE / 20;
constexpr uint64_t COPY_IS_LONG = 60;
constexpr double RISE = 0.1;

}  // namespace

extern "C" {

double writing_epochs(uint64_t batch, uint64_t accumulation, uint64_t n_ctx, uint64_t steps,
                      uint64_t n_train) {
  return double(batch * accumulation * n_ctx * steps) / double(n_train);
}

uint32_t writing_warning(uint64_t n_parameters, uint64_t train_bytes, double epochs) {
  const double ratio = double(train_bytes) / double(n_parameters);
  if (ratio < BYTES_TO_MEMORISE && epochs > EPOCHS_TO_MEMORISE) return WRITING_MEMORISES;
  return ratio < BYTES_TO_WASTE ? WRITING_TOO_LARGE : WRITING_FITS;
}

uint64_t writing_enough(uint64_t n_parameters) {
  const double wanted = double(n_parameters) * BYTES_TO_MEMORISE;
  const uint64_t whole = uint64_t(wanted);
  return double(whole) < wanted ? whole + 1 : whole;
}

int64_t writing_ahead(double loss, const double* lines, uint64_t n_lines) {
  int64_t found = -1;
  // The last line, of quadruples, is no sign of a learning rate that is far off.
  for (uint64_t i = 0; i < n_lines && i < 4; i++) {
    if (loss >= lines[i] && (found < 0 || lines[i] > lines[found])) found = int64_t(i);
  }
  return found;
}

uint32_t writing_actions(uint32_t* codes, const double* losses, uint32_t measured,
                         const double* lines, uint64_t n_lines, uint64_t copy, int64_t unseen_copy,
                         uint32_t larger) {
  const bool has_loss = measured & 1, has_best = measured & 2;
  uint32_t n = 0;
  if (has_loss && !__builtin_isfinite(losses[0])) {
    codes[n++] = WRITING_LOWER_RATE;
    return n;
  }
  if (has_loss && has_best && losses[0] > losses[1] + RISE) codes[n++] = WRITING_OVERFITS;
  const uint64_t usual = unseen_copy < 0 ? 0 : 2 * uint64_t(unseen_copy);
  if (copy > (usual > COPY_IS_LONG ? usual : COPY_IS_LONG)) codes[n++] = WRITING_RECITES;
  if (n > 0) return n;
  codes[n++] = WRITING_MORE_STEPS;
  if (has_loss && writing_ahead(losses[0], lines, n_lines) >= 0) {
    codes[n++] = WRITING_DIAGNOSE;
    return n;
  }
  if (larger) codes[n++] = WRITING_LARGER;
  codes[n++] = WRITING_OWN_TEXT;
  return n;
}

int64_t writing_larger(const uint64_t* vocabularies, const uint64_t* layers, const uint64_t* widths,
                       uint64_t n, uint64_t at, uint64_t train_bytes) {
  for (uint64_t i = at + 1; i < n; i++) {
    if (vocabularies[i] != vocabularies[at]) continue;
    const double n_parameters = double(12 * layers[i] * widths[i] * widths[i]);
    return double(train_bytes) > n_parameters * BYTES_TO_WASTE ? int64_t(i) : -1;
  }
  return -1;
}

}  // extern "C"
