// Statistics of text in C++: what counting reaches, how like its corpus written text is, and what to
// make of both. For hosts without Python: browser and node need no statistics of their own.
//
// text/counting.py, text/likeness.py, text/corpus.py and training/writing.py are the definitions and
// say why each rule is what it is; tests hold the functions here to the same words, counts and
// places, and losses to 1e-12. Texts are read piece by piece, in pieces of any size: no function
// needs a whole corpus in memory, and a host can show progress and be interrupted between two.
//
// Memory is the caller's: a `state` of as many bytes as the `_bytes` function says, aligned for 8,
// which stays where it is until the last call. Nothing here allocates. Arguments are not checked:
// the caller guarantees what is written beside each function. Sizes are numbers of elements.

#pragma once

#include <stdint.h>

// zig hides symbols on WebAssembly unless they say otherwise.
#pragma GCC visibility push(default)

#ifdef __cplusplus
extern "C" {
#endif

// ---- corpus.cpp: the two parts of a text -------------------------------------------------------

// Where the validation part of a text starts: at a character, close to the fraction, which is in
// [0, 1).
//   near (4): the text from near_start = corpus_split_near(n, fraction) on, fewer at its end.
uint64_t corpus_split_near(uint64_t n, double fraction);
uint64_t corpus_split(const uint8_t* near, uint64_t n, double fraction);

// Offsets of fixed validation windows of n_ctx tokens that do not overlap: `wanted` of them, evenly
// spaced, or all when that is 0 or more than there are. Returns how many there are.
//   out (wanted, or n_val / n_ctx when that is 0); it may be null to learn the number.
uint64_t corpus_validation_offsets(int64_t* out, uint64_t n_val, uint64_t wanted, uint64_t n_ctx);

// ---- movement.cpp: how far a step moves the numbers of a layer ---------------------------------

// The update ratio |after - before| / |before| (norms over all tensors of a layer), in float64.
//   sums (2): zero at first, then the squares of what moved and of what was. Tensors of n numbers
//   are added one after the other, in pieces of any size. The ratio of all-zero tensors is 0.
void movement_add(double* sums, const float* after, const float* before, uint64_t n);
double movement_ratio(const double* sums);

// ---- counting.cpp: losses of tables of n-grams -------------------------------------------------

// The stretches of a part that are counted: all of it, or RUNS evenly spaced ones of a long part.
//   starts (COUNTING_RUNS), length (1): of each. Returns how many. validation: 0 or 1; with no
//   validation part the training part is given as both.
enum { COUNTING_RUNS = 64, COUNTING_TABLES = 4 };
uint64_t counting_runs(uint64_t* starts, uint64_t* length, uint64_t n_tokens, uint32_t validation);

// Tokens have `width` 1 or 2 bytes: vocabularies up to 65,536. n_val: of all runs together.
uint64_t counting_bytes(uint64_t n_val, uint32_t width);
void counting_begin(void* state, uint64_t n_val, uint32_t width);

// First all validation runs, then all training runs; starts_run is 1 for the first piece of a run.
void counting_validation(void* state, const void* tokens, uint64_t n, uint32_t starts_run);
void counting_train(void* state, const void* tokens, uint64_t n, uint32_t starts_run);

// Loss of the table of n-grams, n = 1 to 4, in nats a token; a negative number where there is none,
// because the validation part has fewer than n tokens. Called after the last piece.
double counting_loss(const void* state, uint32_t n);
// Training tokens that were counted.
uint64_t counting_counted(const void* state);
// Loss of an untrained model: the logarithm of the vocabulary.
double counting_guessing(uint64_t n_vocab);

// Where a loss stands among n lines, of which only those count that are lower than all before them: i
// when line i is the lowest it is below, n when it is below none, -1 when it is no number.
int64_t counting_standing(double loss, const double* lines, uint64_t n);

// ---- likeness.cpp: real words and verbatim copies ----------------------------------------------

// Words. First `written` for each text, with the group (0 or 1) that it is counted in; then `read`
// for the corpus, whose parts (0: training, 1: validation) each end in `end`. n_bytes: of all
// written texts.
uint64_t likeness_words_bytes(uint64_t n_bytes);
void likeness_words_begin(void* state, uint64_t n_bytes);
void likeness_words_written(void* state, const uint8_t* text, uint64_t n, uint32_t group);
void likeness_words_read(void* state, const uint8_t* piece, uint64_t n, uint32_t part);
void likeness_words_end(void* state, uint32_t part);
// out[0]: words that were written in a group. out[1]: those of them in the parts of the mask (1:
// training, 2: validation, 3: either).
void likeness_words_count(const void* state, uint64_t* out, uint32_t group, uint32_t parts);

// Copies. First `written` for each text, then `read` for the corpus. n_bytes and n_texts: of all
// written texts; n_bytes + n_texts < 2^31.
uint64_t likeness_copy_bytes(uint64_t n_bytes, uint64_t n_texts);
void likeness_copy_begin(void* state, uint64_t n_bytes, uint64_t n_texts);
void likeness_copy_written(void* state, const uint8_t* text, uint64_t n);
void likeness_copy_read(void* state, const uint8_t* piece, uint64_t n);
// out[0]: length of the longest piece of any text that stands in what was read, 0 for none.
// out[1]: the first place where it stands.
void likeness_copy_longest(const void* state, uint64_t* out);

// Where the pieces of unseen text start that have the samples' sizes, and 1; 0 when the validation
// part is shorter than a sample.
//   starts, sizes (count).
uint32_t likeness_unseen(uint64_t* starts, const uint64_t* sizes, uint64_t count, uint64_t n_val);

// ---- writing.cpp: what to make of the figures --------------------------------------------------

// Passes over the training part that a run makes.
double writing_epochs(uint64_t batch, uint64_t accumulation, uint64_t n_ctx, uint64_t steps,
                      uint64_t n_train);

// Codes of warnings and actions, in the order of writing.py's WARNINGS and ACTIONS.
enum { WRITING_FITS = 0, WRITING_MEMORISES = 1, WRITING_TOO_LARGE = 2 };
enum {
  WRITING_LOWER_RATE = 0,
  WRITING_OVERFITS = 1,
  WRITING_RECITES = 2,
  WRITING_MORE_STEPS = 3,
  WRITING_DIAGNOSE = 4,
  WRITING_LARGER = 5,
  WRITING_OWN_TEXT = 6,
  WRITING_MOST_ACTIONS = 3,
};

// Whether a model of so many parameters can only memorise its text, or is far too large for it.
uint32_t writing_warning(uint64_t n_parameters, uint64_t train_bytes, double epochs);
// Bytes of text at which it could not.
uint64_t writing_enough(uint64_t n_parameters);

// What to try next, most useful first; returns how many codes there are.
//   codes (WRITING_MOST_ACTIONS).
//   losses (2): of the final model on the validation part, and the lowest on the way; measured: 1
//   for the first alone, 3 for both, 0 for none.
//   lines (n_lines): the losses of guessing and of the counting tables.
//   copy, unseen_copy: longest copies in bytes; unseen_copy -1 when it was not measured.
//   larger: 1 when there is a larger preset for this text (writing_larger).
uint32_t writing_actions(uint32_t* codes, const double* losses, uint32_t measured,
                         const double* lines, uint64_t n_lines, uint64_t copy, int64_t unseen_copy,
                         uint32_t larger);
// Which counting line is still ahead of a loss, the highest of them; -1 for none.
int64_t writing_ahead(double loss, const double* lines, uint64_t n_lines);
// The next preset in size, or -1 when there is none or it is far too large for the text.
//   vocabularies, layers, widths (n): of the presets in their order; `at` is the run's.
int64_t writing_larger(const uint64_t* vocabularies, const uint64_t* layers, const uint64_t* widths,
                       uint64_t n, uint64_t at, uint64_t train_bytes);

#ifdef __cplusplus
}
#endif

#pragma GCC visibility pop
