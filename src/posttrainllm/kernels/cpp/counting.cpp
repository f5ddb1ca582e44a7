// Counting tables: see statistics.h for what each function promises and text/counting.py for the
// definition.
//
// Only n-grams of the validation part matter for a loss, so only they are counted: one hash table for
// each n, filled from the validation part, whose cells count what the training part has of it. So
// the memory is that of the validation part, and the training part can be of any length.

#include "statistics.h"

namespace {

constexpr double SMOOTHING = 0.1;
constexpr uint64_t MOST_TRAIN = 20000000;
constexpr uint64_t MOST_VAL = 2000000;
constexpr uint64_t NONE = UINT64_MAX;

struct Cell {
  uint64_t key;       // the n-gram: its tokens side by side
  uint32_t weight;    // how often the validation part has it; 0 for an empty cell
  uint32_t seen;      // how often the training part has it
  uint32_t followed;  // how often with a token behind it
  uint32_t pad;
};

struct Table {
  Cell* cells;
  uint64_t size;      // a power of two, over the number of different n-grams
  uint64_t n_tokens;  // n-grams of the validation part
};

struct Counting {
  Table tables[COUNTING_TABLES];
  uint64_t n_counted;
  uint64_t n_different;
  uint64_t window;                 // the last tokens of the run, the newest in the lowest bits
  uint64_t last[COUNTING_TABLES];  // cells of the n-grams that end in the last token
  uint32_t n_window;               // how many tokens the window holds, at most COUNTING_TABLES
  uint32_t width;
  uint64_t present[65536 / 64];  // bits: which tokens either part has
};

// Cells of the table of n-grams: no more than 4/5 of them are ever used.
uint64_t table_size(uint64_t n_val, uint32_t width, uint32_t n) {
  const uint32_t bits = 8 * width * n;
  const uint64_t most = bits < 63 && (1ull << bits) < n_val ? 1ull << bits : n_val;
  uint64_t size = 16;
  while (size < most + most / 4) size *= 2;
  return size;
}

inline uint64_t find(const Table& table, uint64_t key) {
  uint64_t at = key * 0x9E3779B97F4A7C15u;
  at = (at ^ at >> 32) & (table.size - 1);
  while (table.cells[at].weight && table.cells[at].key != key) at = (at + 1) & (table.size - 1);
  return at;
}

// log(x) for x > 0 and not subnormal: 2^e m with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 artanh(s) = 2 (s + s^3/3 + ...) with s = (m - 1) / (m + 1), |s| < 0.172.
double logarithm(double x) {
  constexpr double LN2_HIGH = 0.6931471803691238, LN2_LOW = 1.9082149292705877e-10;
  constexpr double SQRT2 = 1.4142135623730951;
  const uint64_t bits = __builtin_bit_cast(uint64_t, x);
  int64_t exponent = int64_t(bits >> 52) - 1023;
  double m = __builtin_bit_cast(double, (bits & 0xFFFFFFFFFFFFFull) | 1023ull << 52);
  if (m > SQRT2) {
    m *= 0.5;
    exponent++;
  }
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double series = 0.0;
  for (int k = 25; k > 1; k -= 2) series = (series + 1.0 / k) * square;
  const double e = double(exponent);
  return e * LN2_HIGH + (2.0 * (s + s * series) + e * LN2_LOW);
}

inline uint64_t token_at(const void* tokens, uint32_t width, uint64_t i) {
  return width == 1 ? static_cast<const uint8_t*>(tokens)[i]
                    : static_cast<const uint16_t*>(tokens)[i];
}

// The lowest n tokens of a window.
inline uint64_t gram(const Counting& counting, uint64_t window, uint32_t n) {
  const uint32_t bits = 8 * counting.width * n;
  return bits >= 64 ? window : window & ((1ull << bits) - 1);
}

void start_run(Counting& counting) {
  counting.window = 0;
  counting.n_window = 0;
  for (uint64_t& cell : counting.last) cell = NONE;
}

// Move the window on by one token and note that the text has it.
void take(Counting& counting, uint64_t token) {
  counting.window = counting.window << (8 * counting.width) | token;
  if (counting.n_window < COUNTING_TABLES) counting.n_window++;
  uint64_t& word = counting.present[token / 64];
  const uint64_t bit = 1ull << (token % 64);
  if (!(word & bit)) counting.n_different++;
  word |= bit;
}

}  // namespace

extern "C" {

uint64_t counting_runs(uint64_t* starts, uint64_t* length, uint64_t n_tokens, uint32_t validation) {
  const uint64_t most = validation ? MOST_VAL : MOST_TRAIN;
  starts[0] = 0;
  *length = n_tokens;
  if (n_tokens <= most) return 1;
  *length = most / COUNTING_RUNS;
  const uint64_t last = n_tokens - *length;
  const double step = double(last) / (COUNTING_RUNS - 1);
  for (uint64_t i = 0; i < COUNTING_RUNS; i++) starts[i] = uint64_t(double(i) * step);
  starts[COUNTING_RUNS - 1] = last;
  return COUNTING_RUNS;
}

uint64_t counting_bytes(uint64_t n_val, uint32_t width) {
  uint64_t cells = 0;
  for (uint32_t n = 1; n <= COUNTING_TABLES; n++) cells += table_size(n_val, width, n);
  return sizeof(Counting) + cells * sizeof(Cell);
}

void counting_begin(void* state, uint64_t n_val, uint32_t width) {
  Counting& counting = *static_cast<Counting*>(state);
  Cell* cells = reinterpret_cast<Cell*>(&counting + 1);
  for (uint32_t n = 1; n <= COUNTING_TABLES; n++) {
    const uint64_t size = table_size(n_val, width, n);
    for (uint64_t i = 0; i < size; i++) cells[i].weight = 0;
    counting.tables[n - 1] = {cells, size, 0};
    cells += size;
  }
  for (uint64_t& word : counting.present) word = 0;
  counting.n_counted = counting.n_different = 0;
  counting.width = width;
  start_run(counting);
}

void counting_validation(void* state, const void* tokens, uint64_t n, uint32_t starts_run) {
  Counting& counting = *static_cast<Counting*>(state);
  if (starts_run) start_run(counting);
  for (uint64_t i = 0; i < n; i++) {
    take(counting, token_at(tokens, counting.width, i));
    for (uint32_t size = 1; size <= counting.n_window; size++) {
      Table& table = counting.tables[size - 1];
      const uint64_t key = gram(counting, counting.window, size);
      Cell& cell = table.cells[find(table, key)];
      if (cell.weight == 0) cell = {key, 0, 0, 0, 0};
      cell.weight++;
      table.n_tokens++;
    }
  }
}

void counting_train(void* state, const void* tokens, uint64_t n, uint32_t starts_run) {
  Counting& counting = *static_cast<Counting*>(state);
  if (starts_run) start_run(counting);
  counting.n_counted += n;
  for (uint64_t i = 0; i < n; i++) {
    take(counting, token_at(tokens, counting.width, i));
    for (uint32_t size = 1; size <= counting.n_window; size++) {
      Table& table = counting.tables[size - 1];
      uint64_t& last = counting.last[size - 1];
      if (last != NONE) table.cells[last].followed++;
      const uint64_t at = find(table, gram(counting, counting.window, size));
      last = table.cells[at].weight ? at : NONE;
      if (last != NONE) table.cells[at].seen++;
    }
  }
}

double counting_loss(const void* state, uint32_t n) {
  const Counting& counting = *static_cast<const Counting*>(state);
  const Table& table = counting.tables[n - 1];
  if (table.n_tokens == 0) return -1.0;
  const double smoothing = SMOOTHING * double(counting.n_different);
  double sum = 0.0, lost = 0.0;  // compensated: millions of terms, and the sum keeps all its digits
  for (uint64_t i = 0; i < table.size; i++) {
    const Cell& cell = table.cells[i];
    if (cell.weight == 0) continue;
    uint64_t context = counting.n_counted;
    if (n > 1) {
      const Table& shorter = counting.tables[n - 2];
      context = shorter.cells[find(shorter, cell.key >> (8 * counting.width))].followed;
    }
    const double loss =
        logarithm(double(context) + smoothing) - logarithm(double(cell.seen) + SMOOTHING);
    const double term = loss * double(cell.weight) - lost;
    const double next = sum + term;
    lost = (next - sum) - term;
    sum = next;
  }
  return sum / double(table.n_tokens);
}

uint64_t counting_counted(const void* state) {
  return static_cast<const Counting*>(state)->n_counted;
}

double counting_guessing(uint64_t n_vocab) { return logarithm(double(n_vocab)); }

int64_t counting_standing(double loss, const double* lines, uint64_t n) {
  if (!__builtin_isfinite(loss)) return -1;
  uint64_t below = n;
  double lowest = __builtin_inf();
  for (uint64_t i = 0; i < n; i++) {
    if (lines[i] >= lowest) continue;  // of a short text longer counts are worse: nothing to be below
    lowest = lines[i];
    if (loss < lowest) below = i;
  }
  return int64_t(below);
}

}  // extern "C"
