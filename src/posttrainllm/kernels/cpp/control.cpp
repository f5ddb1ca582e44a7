// The control plane: see control.h for what each function promises and control.py for the reasons.
// Every formula stands here in the order of operations that control.py has, or the bits would differ.

#include "control.h"

namespace {

// ---- random numbers --------------------------------------------------------------------------

struct Words {
  uint32_t w0, w1, w2, w3;
};

// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
inline Words philox(uint32_t k0, uint32_t k1, Words c) {
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t(c.w0) * 0xD2511F53u;
    const uint64_t p1 = uint64_t(c.w2) * 0xCD9E8D57u;
    c = {uint32_t(p1 >> 32) ^ c.w1 ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c.w3 ^ k1, uint32_t(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The key is the seed, the counter is (index, stream).
inline Words random_words(uint64_t seed, uint64_t stream, uint64_t index) {
  const Words counter = {uint32_t(index), uint32_t(index >> 32), uint32_t(stream),
                         uint32_t(stream >> 32)};
  return philox(uint32_t(seed), uint32_t(seed >> 32), counter);
}

inline uint64_t random_u64(uint64_t seed, uint64_t stream, uint64_t index) {
  const Words words = random_words(seed, stream, index);
  return uint64_t(words.w0) | uint64_t(words.w1) << 32;
}

constexpr uint64_t fnv1a(const char* name) {
  uint64_t value = 0xCBF29CE484222325u;
  for (; *name; name++) value = (value ^ uint8_t(*name)) * 0x100000001B3u;
  return value;
}

constexpr uint64_t BATCH_STREAM = fnv1a("batch");
constexpr uint64_t SAMPLE_STREAM = fnv1a("sample");

// ---- initial values --------------------------------------------------------------------------

constexpr double INIT_STD = 0.02;
constexpr int32_t SUM_MEAN = 524280;
constexpr double SUM_STD = 75674.45447441297;

inline uint32_t halves(Words words) {
  return (words.w0 & 0xFFFF) + (words.w0 >> 16) + (words.w1 & 0xFFFF) + (words.w1 >> 16) +
         (words.w2 & 0xFFFF) + (words.w2 >> 16) + (words.w3 & 0xFFFF) + (words.w3 >> 16);
}

// ---- functions that a library would have -------------------------------------------------------

constexpr double HALF_PI = 1.5707963267948966;

// Taylor series, the highest power first.
constexpr double SIN[10] = {-1.0 / 121645100408832000, 1.0 / 355687428096000, -1.0 / 1307674368000,
                            1.0 / 6227020800,          -1.0 / 39916800,       1.0 / 362880,
                            -1.0 / 5040,               1.0 / 120,             -1.0 / 6,
                            1.0};
constexpr double EXP[14] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                            1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                            1.0 / 120,        1.0 / 24,        1.0 / 6,        1.0 / 2,
                            1.0,              1.0};

// sin(x) for x in [0, pi / 2].
inline double sine(double x) {
  const double square = x * x;
  double value = 0.0;
  for (const double coefficient : SIN) value = value * square + coefficient;
  return x * value;
}

inline double power(double base, uint64_t exponent) {
  double value = 1.0;
  while (exponent) {
    if (exponent & 1) value = value * base;
    base = base * base;
    exponent >>= 1;
  }
  return value;
}

constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN2_HIGH = 0.6931471803691238;
constexpr double LN2_LOW = 1.9082149292705877e-10;
constexpr double EXP_LOWEST = -708.0;

// exp(x) for x <= 0: 2^n * exp(r) with x = n ln 2 + r.
inline double exponential(double x) {
  if (x < EXP_LOWEST) return 0.0;
  const int64_t n = int64_t(x * LOG2_E - 0.5);
  const double r = (x - double(n) * LN2_HIGH) - double(n) * LN2_LOW;
  double value = 0.0;
  for (const double coefficient : EXP) value = value * r + coefficient;
  return value * __builtin_bit_cast(double, (n + 1023) << 52);
}

// ---- sampling ----------------------------------------------------------------------------------

// Whether token a comes before token b: the larger logit first, the lower index among equals.
inline bool before(const float* logits, uint32_t a, uint32_t b) {
  return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Restore the heap below `at`: each entry comes before its two children.
inline void sift_down(uint32_t* heap, uint64_t at, uint64_t size, const float* logits) {
  const uint32_t moving = heap[at];
  for (uint64_t child; (child = 2 * at + 1) < size; at = child) {
    if (child + 1 < size && before(logits, heap[child + 1], heap[child])) child++;
    if (!before(logits, heap[child], moving)) break;
    heap[at] = heap[child];
  }
  heap[at] = moving;
}

// The first token of a heap that shrinks by one; the token moves behind its new end. So after m
// calls the m first tokens stand at the end of the array, the first of all last.
inline uint32_t take_first(uint32_t* heap, uint64_t* size, const float* logits) {
  const uint32_t first = heap[0];
  *size -= 1;
  heap[0] = heap[*size];
  heap[*size] = first;
  sift_down(heap, 0, *size, logits);
  return first;
}

// Set the weights that top_k and top_p exclude to zero.
void keep_largest(double* weights, uint32_t* order, const float* logits, uint64_t n, uint64_t top_k,
                  double top_p) {
  const uint64_t count = top_k == 0 || top_k > n ? n : top_k;
  if (count == n && top_p >= 1.0) return;
  for (uint64_t i = 0; i < n; i++) order[i] = uint32_t(i);
  for (uint64_t i = n / 2; i > 0; i--) sift_down(order, i - 1, n, logits);

  uint64_t left = n;
  if (count < n) {
    while (left > n - count) take_first(order, &left, logits);
    for (uint64_t i = 0; i < left; i++) weights[order[i]] = 0.0;
  }
  if (top_p >= 1.0) return;

  double total = 0.0;
  for (uint64_t i = 0; i < n; i++) total = total + weights[i];
  const double threshold = top_p * total;
  double sum = 0.0;
  if (count < n) {  // already taken, from the end of the array
    uint64_t at = n;
    while (at > n - count && sum < threshold) sum = sum + weights[order[--at]];
    for (uint64_t i = n - count; i < at; i++) weights[order[i]] = 0.0;
  } else {
    while (left > 0 && sum < threshold) sum = sum + weights[take_first(order, &left, logits)];
    for (uint64_t i = 0; i < left; i++) weights[order[i]] = 0.0;
  }
}

}  // namespace

extern "C" {

void control_philox(uint32_t* out, const uint32_t* key, const uint32_t* counter) {
  const Words words = philox(key[0], key[1], {counter[0], counter[1], counter[2], counter[3]});
  out[0] = words.w0;
  out[1] = words.w1;
  out[2] = words.w2;
  out[3] = words.w3;
}

uint64_t control_stream_id(const uint8_t* name, uint64_t length) {
  uint64_t value = 0xCBF29CE484222325u;
  for (uint64_t i = 0; i < length; i++) value = (value ^ name[i]) * 0x100000001B3u;
  return value;
}

void control_initial_values(float* out, uint64_t seed, uint64_t stream, uint64_t start,
                            uint64_t count, uint32_t kind, uint32_t n_layer) {
  if (kind == CONTROL_ZEROS || kind == CONTROL_ONES) {
    for (uint64_t i = 0; i < count; i++) out[i] = kind == CONTROL_ONES ? 1.0f : 0.0f;
    return;
  }
  // elementwise_sqrt is the processor's instruction, correctly rounded, and never a library call.
  const double std = kind == CONTROL_NORMAL
                         ? INIT_STD
                         : INIT_STD / __builtin_elementwise_sqrt(2.0 * double(n_layer));
  const float scale = float(std / SUM_STD);
  for (uint64_t i = 0; i < count; i++) {
    const uint64_t block = 2 * (start + i);
    const uint32_t sum =
        halves(random_words(seed, stream, block)) + halves(random_words(seed, stream, block + 1));
    out[i] = float(int32_t(sum) - SUM_MEAN) * scale;
  }
}

void control_batch_offsets(int64_t* out, uint64_t seed, uint64_t step, uint64_t first_row,
                           uint64_t rows, int64_t low, int64_t high) {
  const uint64_t span = uint64_t(high) - uint64_t(low);
  for (uint64_t i = 0; i < rows; i++) {
    out[i] = low + int64_t(random_u64(seed, BATCH_STREAM + step, first_row + i) % span);
  }
}

void control_token_index(int32_t* rows, int32_t* starts, int32_t* order, const int32_t* ids,
                         uint64_t n) {
  // Radix sort of the positions by id, eight bits a pass, stable; `rows` is the other buffer. An
  // even number of passes ends in `order`.
  int32_t largest = 0;
  for (uint64_t i = 0; i < n; i++) {
    order[i] = int32_t(i);
    if (ids[i] > largest) largest = ids[i];
  }
  const int passes = largest < 1 << 16 ? 2 : 4;
  for (int pass = 0; pass < passes; pass++) {
    const int shift = 8 * pass;
    const int32_t* from = pass % 2 ? rows : order;
    int32_t* to = pass % 2 ? order : rows;
    uint64_t place[257] = {0};
    for (uint64_t i = 0; i < n; i++) place[(ids[i] >> shift & 0xFF) + 1]++;
    for (int digit = 0; digit < 256; digit++) place[digit + 1] += place[digit];
    for (uint64_t i = 0; i < n; i++) to[place[ids[from[i]] >> shift & 0xFF]++] = from[i];
  }
  uint64_t used = 0;
  for (uint64_t i = 0; i < n; i++) {
    const int32_t id = ids[order[i]];
    if (i > 0 && id == ids[order[i - 1]]) continue;
    rows[used] = id;
    starts[used] = int32_t(i);
    used++;
  }
  for (uint64_t i = used; i < n; i++) {
    rows[i] = -1;
    starts[i] = int32_t(n);
  }
}

double control_learning_rate(uint64_t step, uint64_t steps, uint32_t kind, double peak,
                             uint64_t warmup, double final_ratio, double decay_fraction) {
  const uint64_t ramp = warmup > 1 ? warmup : 1;
  const uint64_t last = steps > 1 ? steps : 1;
  if (step > last) step = last;
  if (step <= ramp) return peak * double(step) / double(ramp);
  if (kind == CONTROL_CONSTANT) return peak;
  const double final = final_ratio * peak;
  if (kind == CONTROL_COSINE) {
    const double left = double(steps - step) / double(steps - ramp);
    const double share = sine(HALF_PI * left);
    return final + (peak - final) * (share * share);
  }
  const uint64_t decay = uint64_t(decay_fraction * double(steps));
  const uint64_t turn = steps - decay > ramp ? steps - decay : ramp;
  if (step <= turn) return peak;
  return final + (peak - final) * (double(steps - step) / double(steps - turn));
}

void control_bias_corrections(double* out, uint64_t step, double beta1, double beta2) {
  out[0] = 1.0 - power(beta1, step);
  out[1] = 1.0 - power(beta2, step);
}

void control_penalize(float* out, const float* logits, uint64_t n_vocab, const int32_t* recent,
                      uint64_t count, double penalty) {
  for (uint64_t i = 0; i < n_vocab; i++) out[i] = logits[i];
  for (uint64_t i = 0; i < count; i++) {
    const double before = double(logits[recent[i]]);  // of the input: a second time changes nothing
    out[recent[i]] = float(before > 0.0 ? before / penalty : before * penalty);
  }
}

int64_t control_sample(double* probability, double* weights, uint32_t* order, const float* logits,
                       uint64_t n_vocab, uint64_t seed, uint64_t position, double temperature,
                       uint64_t top_k, double top_p) {
  uint64_t best = 0;
  for (uint64_t i = 0; i < n_vocab; i++) {
    if (!__builtin_isfinite(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  if (temperature == 0.0) {
    *probability = 1.0;
    return int64_t(best);
  }
  const double largest = double(logits[best]);
  for (uint64_t i = 0; i < n_vocab; i++) {
    weights[i] = exponential((double(logits[i]) - largest) / temperature);
  }
  keep_largest(weights, order, logits, n_vocab, top_k, top_p);

  double total = 0.0;
  for (uint64_t i = 0; i < n_vocab; i++) total = total + weights[i];
  const uint64_t drawn = random_u64(seed, SAMPLE_STREAM, position) >> 11;  // 53 bits
  const double target = double(drawn) * 0x1p-53 * total;
  double sum = 0.0;
  uint64_t token = 0;
  for (uint64_t i = 0; i < n_vocab; i++) {
    if (weights[i] > 0.0) token = i;  // the last one, when rounding carries the target to the total
    sum = sum + weights[i];
    if (sum > target) break;
  }
  *probability = weights[token] / total;
  return int64_t(token);
}

}  // extern "C"
