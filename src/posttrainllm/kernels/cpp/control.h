// The control plane in C++: random numbers, initial values, data order, learning rate, sampling.
//
// control.py is the definition and says why each formula is what it is; these functions return the
// same bits, on every processor and as WebAssembly. So browser and node need no training logic of
// their own. What that takes: + - * / alone, no library function, sums in order, and no fused
// multiply-add (the build sets -ffp-contract=off). Nothing here allocates or keeps state.
//
// Sizes are numbers of elements. Arguments are not checked: the caller guarantees what is written
// beside each function.

#pragma once

#include <stdint.h>

// zig hides symbols on WebAssembly unless they say otherwise.
#pragma GCC visibility push(default)

#ifdef __cplusplus
extern "C" {
#endif

// Codes of the initial values and of the schedules, in the order of control.py's Init and Schedule.
enum { CONTROL_NORMAL = 0, CONTROL_RESIDUAL = 1, CONTROL_ZEROS = 2, CONTROL_ONES = 3 };
enum { CONTROL_COSINE = 0, CONTROL_CONSTANT = 1, CONTROL_WSD = 2 };

// Philox4x32-10: four random words for one counter.
//   out (4), key (2), counter (4); out may be counter.
void control_philox(uint32_t* out, const uint32_t* key, const uint32_t* counter);

// FNV-1a, 64 bits, of a name of `length` bytes of UTF-8: the stream its random numbers come from.
uint64_t control_stream_id(const uint8_t* name, uint64_t length);

// First values of a parameter: elements start .. start + count of the tensor whose name has this
// stream id. Any split into ranges gives the same values, so threads may share the work.
//   out (count); kind is one of the codes above; n_layer >= 1 counts for CONTROL_RESIDUAL alone.
void control_initial_values(float* out, uint64_t seed, uint64_t stream, uint64_t start,
                            uint64_t count, uint32_t kind, uint32_t n_layer);

// Where rows first_row .. first_row + rows of a step's batch start in the text: uniform in [low, high).
//   out (rows); low < high.
void control_batch_offsets(int64_t* out, uint64_t seed, uint64_t step, uint64_t first_row,
                           uint64_t rows, int64_t low, int64_t high);

// Which positions use which row of an embedding table, for embedding_backward_weight.
//   rows (n): the ids that occur, ascending, then -1.
//   starts (n): where the positions of rows[j] begin in order, then n; they end at starts[j + 1],
//               and for j = n - 1 at n.
//   order (n): all positions, by id and then ascending.
//   ids (n): none negative; n < 2^31. No operand may overlap another.
void control_token_index(int32_t* rows, int32_t* starts, int32_t* order, const int32_t* ids,
                         uint64_t n);

// Learning rate of a step, counted from 1; kind is one of the schedule codes above.
double control_learning_rate(uint64_t step, uint64_t steps, uint32_t kind, double peak,
                             uint64_t warmup, double final_ratio, double decay_fraction);

// What AdamW divides its moments by: out[0] = 1 - beta1^step, out[1] = 1 - beta2^step.
void control_bias_corrections(double* out, uint64_t step, double beta1, double beta2);

// Logits in which the tokens of `recent` are less likely, each once: / penalty where positive, else
// * penalty.
//   out (n_vocab), logits (n_vocab), not the same memory; recent (count), ids in 0 .. n_vocab - 1;
//   penalty >= 1 and finite.
void control_penalize(float* out, const float* logits, uint64_t n_vocab, const int32_t* recent,
                      uint64_t count, double penalty);

// Choose the next token. Returns its index, or -1 when a logit is not finite.
//   probability (1): of the chosen token among those it was chosen from; untouched on failure.
//   weights (n_vocab), order (n_vocab): scratch.
//   logits (n_vocab), n_vocab >= 1; temperature >= 0 and finite (0: the largest logit);
//   top_k (0: all); top_p in (0, 1] (1: all).
int64_t control_sample(double* probability, double* weights, uint32_t* order, const float* logits,
                       uint64_t n_vocab, uint64_t seed, uint64_t position, double temperature,
                       uint64_t top_k, double top_p);

#ifdef __cplusplus
}
#endif

#pragma GCC visibility pop
