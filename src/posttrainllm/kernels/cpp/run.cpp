// run.cpp: runs a bound program. The host writes its calls as records (call.h) and calls
// posttrain_run once a step; the table below maps op numbers to kernels, in the order of ops.OPS.
#include "ops.h"
#include "pool.h"

namespace {

constexpr u64 SCRATCH_ALIGN = 64;

// One call with its offsets resolved: operands in table order, outputs first.
struct Args {
  const Call& call;
  char* base;
  Work work;

  float* f(int i) const {
    return call.buf[i] == ABSENT ? nullptr : reinterpret_cast<float*>(base + size_t(call.buf[i]));
  }
  const i32* ids(int i) const { return reinterpret_cast<const i32*>(base + size_t(call.buf[i])); }
  i64 n(int i) const { return call.size[i]; }
  i32 flag(int i) const { return i32(call.attr[i]); }
};

struct Row {
  const char* name;
  int operands;  // buffers, outputs and inputs
  int optional;  // the index of the one that may be absent, or -1
  int sizes;
  int accumulate;    // the attribute that holds WRITE, ADD or BETA, or -1
  bool has_scalars;  // BETA needs the scalars buffer
  void (*run)(const Args& a);
  u64 (*workspace)(const i64* n, const double* attr);
};

u64 nothing(const i64*, const double*) { return 0; }

constexpr Row TABLE[] = {
    {"embedding_forward", 5, -1, 4, -1, false,
     [](const Args& a) {
       embedding_forward(a.f(0), a.ids(1), a.ids(2), a.f(3), a.f(4), a.n(0), a.n(1), a.work);
     },
     nothing},
    {"embedding_backward_weight", 6, -1, 3, 0, true,
     [](const Args& a) {
       embedding_backward_weight(a.f(0), a.f(1), a.ids(2), a.ids(3), a.ids(4), a.f(5), a.n(0),
                                 a.n(1), a.n(2), a.flag(0), a.work);
     },
     nothing},
    {"layernorm_forward", 6, -1, 2, -1, false,
     [](const Args& a) {
       layernorm_forward(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.f(5), a.n(0), a.n(1),
                         float(a.call.attr[0]), a.work);
     },
     nothing},
    {"layernorm_backward_input", 6, -1, 2, 0, false,
     [](const Args& a) {
       layernorm_backward_input(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.f(5), a.n(0), a.n(1),
                                a.flag(0), a.work);
     },
     nothing},
    {"layernorm_backward_weight", 7, -1, 2, 0, true,
     [](const Args& a) {
       layernorm_backward_weight(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.f(5), a.f(6), a.n(0),
                                 a.n(1), a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return layernorm_backward_weight_workspace(n[0], n[1]); }},
    {"linear_forward", 4, 3, 3, -1, false,
     [](const Args& a) {
       linear_forward(a.f(0), a.f(1), a.f(2), a.f(3), a.n(0), a.n(1), a.n(2), a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return linear_forward_workspace(n[0], n[1], n[2]); }},
    {"linear_backward_input", 3, -1, 3, 1, false,
     [](const Args& a) {
       linear_backward_input(a.f(0), a.f(1), a.f(2), a.n(0), a.n(1), a.n(2), a.flag(0), a.flag(1),
                             a.work);
     },
     [](const i64* n, const double*) { return linear_backward_input_workspace(n[0], n[1], n[2]); }},
    {"linear_backward_weight", 4, -1, 3, 1, true,
     [](const Args& a) {
       linear_backward_weight(a.f(0), a.f(1), a.f(2), a.f(3), a.n(0), a.n(1), a.n(2), a.flag(0),
                              a.flag(1), a.work);
     },
     [](const i64* n, const double* attr) {
       return linear_backward_weight_workspace(n[0], n[1], n[2], i32(attr[0]));
     }},
    {"linear_backward_bias", 3, -1, 2, 0, true,
     [](const Args& a) {
       linear_backward_bias(a.f(0), a.f(1), a.f(2), a.n(0), a.n(1), a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return linear_backward_bias_workspace(n[0], n[1]); }},
    {"gelu_forward", 2, -1, 2, -1, false,
     [](const Args& a) { gelu_forward(a.f(0), a.f(1), a.n(0), a.n(1), a.flag(0), a.work); },
     nothing},
    {"gelu_backward", 3, -1, 2, -1, false,
     [](const Args& a) {
       gelu_backward(a.f(0), a.f(1), a.f(2), a.n(0), a.n(1), a.flag(0), a.work);
     },
     nothing},
    {"attention_forward", 4, -1, 4, -1, false,
     [](const Args& a) {
       attention_forward(a.f(0), a.f(1), a.f(2), a.ids(3), a.n(0), a.n(1), a.n(2), a.n(3), a.work);
     },
     [](const i64* n, const double*) {
       return attention_forward_workspace(n[0], n[1], n[2], n[3]);
     }},
    {"attention_backward", 6, -1, 4, -1, false,
     [](const Args& a) {
       attention_backward(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.ids(5), a.n(0), a.n(1), a.n(2),
                          a.n(3), a.work);
     },
     [](const i64* n, const double*) {
       return attention_backward_workspace(n[0], n[1], n[2], n[3]);
     }},
    {"attention_append", 3, -1, 4, -1, false,
     [](const Args& a) {
       attention_append(a.f(0), a.f(1), a.ids(2), a.n(0), a.n(1), a.n(2), a.n(3), a.work);
     },
     nothing},
    {"attention_decode", 4, -1, 4, -1, false,
     [](const Args& a) {
       attention_decode(a.f(0), a.f(1), a.f(2), a.ids(3), a.n(0), a.n(1), a.n(2), a.n(3), a.flag(0),
                        a.work);
     },
     nothing},
    {"add_forward", 3, -1, 2, -1, false,
     [](const Args& a) { add_forward(a.f(0), a.f(1), a.f(2), a.n(0), a.n(1), a.work); }, nothing},
    {"gather_forward", 3, -1, 3, -1, false,
     [](const Args& a) {
       gather_forward(a.f(0), a.f(1), a.ids(2), a.n(0), a.n(1), a.n(2), a.work);
     },
     nothing},
    {"cross_entropy_forward", 4, -1, 2, -1, false,
     [](const Args& a) {
       cross_entropy_forward(a.f(0), a.f(1), a.f(2), a.ids(3), a.n(0), a.n(1), a.work);
     },
     nothing},
    {"cross_entropy_backward", 5, -1, 2, -1, false,
     [](const Args& a) {
       cross_entropy_backward(a.f(0), a.f(1), a.ids(2), a.f(3), a.f(4), a.n(0), a.n(1), a.work);
     },
     nothing},
    {"loss_sum", 3, -1, 1, 0, true,
     [](const Args& a) { loss_sum(a.f(0), a.f(1), a.f(2), a.n(0), a.flag(0), a.work); }, nothing},
    {"sum_squares", 2, -1, 1, -1, false,
     [](const Args& a) { sum_squares(a.f(0), a.f(1), a.n(0), a.work); },
     [](const i64* n, const double*) { return sum_squares_workspace(n[0]); }},
    {"gradient_clip", 3, -1, 0, -1, false,
     [](const Args& a) { gradient_clip(a.f(0), a.f(1), a.f(2), float(a.call.attr[0]), a.work); },
     nothing},
    {"adamw_step", 6, -1, 1, -1, false,
     [](const Args& a) {
       adamw_step(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.f(5), a.n(0), a.call.attr[0],
                  a.call.attr[1], a.call.attr[2], a.call.attr[3], a.work);
     },
     nothing},
    {"linear_gelu_forward", 5, 4, 3, -1, false,
     [](const Args& a) {
       linear_gelu_forward(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.n(0), a.n(1), a.n(2),
                           a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return linear_forward_workspace(n[0], n[1], n[2]); }},
    {"linear_residual_forward", 5, 4, 3, -1, false,
     [](const Args& a) {
       linear_residual_forward(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.n(0), a.n(1), a.n(2),
                               a.work);
     },
     [](const i64* n, const double*) { return linear_forward_workspace(n[0], n[1], n[2]); }},
    {"gelu_linear_backward_input", 5, -1, 3, -1, false,
     [](const Args& a) {
       gelu_linear_backward_input(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.n(0), a.n(1), a.n(2),
                                  a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return linear_backward_input_workspace(n[0], n[1], n[2]); }},
    {"linear_backward_weight_bias", 5, -1, 3, 0, true,
     [](const Args& a) {
       linear_backward_weight_bias(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.n(0), a.n(1), a.n(2),
                                   a.flag(0), a.work);
     },
     [](const i64* n, const double*) {
       return linear_backward_weight_bias_workspace(n[0], n[1], n[2]);
     }},
    {"layernorm_backward", 9, -1, 2, 0, true,
     [](const Args& a) {
       layernorm_backward(a.f(0), a.f(1), a.f(2), a.f(3), a.f(4), a.f(5), a.f(6), a.f(7), a.f(8),
                          a.n(0), a.n(1), a.flag(0), a.work);
     },
     [](const i64* n, const double*) { return layernorm_backward_weight_workspace(n[0], n[1]); }},
    {"int8_forward", 5, 4, 3, -1, false,
     [](const Args& a) {
       int8_forward(a.f(0), a.f(1), a.ids(2), a.f(3), a.f(4), a.n(0), a.n(1), a.n(2), a.flag(0),
                    a.work);
     },
     nothing},
};

constexpr u32 COUNT = sizeof(TABLE) / sizeof(TABLE[0]);

constexpr u32 op_number(const char* name) {
  for (u32 op = 0; op < COUNT; op++) {
    const char *a = TABLE[op].name, *b = name;
    while (*a && *a == *b) a++, b++;
    if (*a == *b) return op;
  }
  return COUNT;
}

bool heads_fit(i64 C, i64 H) { return H >= 1 && C % H == 0 && C / H <= MAX_HEAD_SIZE; }

// Faults of the host, caught before a kernel reads through a wrong offset.
bool valid(const Call& call) {
  if (call.op >= COUNT) return false;
  const Row& row = TABLE[call.op];
  for (int i = 0; i < row.operands; i++) {
    const u64 offset = call.buf[i];
    if (offset == ABSENT ? i != row.optional : offset % sizeof(float) != 0) return false;
  }
  for (int i = 0; i < row.sizes; i++) {
    if (call.size[i] < 1) return false;
  }
  if (row.accumulate >= 0) {
    const double code = call.attr[row.accumulate];
    if (code != 0.0 && code != 1.0 && !(code == 2.0 && row.has_scalars)) return false;
  }
  switch (call.op) {
    case op_number("attention_forward"):
    case op_number("attention_backward"):
      return heads_fit(call.size[2], call.size[3]);
    case op_number("attention_decode"):
      return heads_fit(call.size[2], i64(call.attr[0]));
    case op_number("int8_forward"):  // rows of whole words
      return call.size[call.attr[0] != 0.0 ? 1 : 2] % 4 == 0;
  }
  return true;
}

}  // namespace

// zig hides symbols on WebAssembly unless they say otherwise.
#pragma GCC visibility push(default)
extern "C" {

u32 posttrain_op_count() { return COUNT; }

const char* posttrain_op_name(u32 op) { return op < COUNT ? TABLE[op].name : ""; }

// Bytes of scratch that posttrain_run needs for these calls, on any number of threads. Invalid calls
// count nothing: running them fails.
u64 posttrain_workspace(const Call* calls, u64 n) {
  u64 most = 0;
  for (u64 i = 0; i < n; i++) {
    if (!valid(calls[i])) continue;
    const u64 bytes = TABLE[calls[i].op].workspace(calls[i].size, calls[i].attr);
    if (bytes > most) most = bytes;
  }
  return most == 0 ? 0 : most + SCRATCH_ALIGN - 1;  // the host's offset may be aligned to less
}

// Runs the calls in order; each sees all that earlier ones wrote. Returns 0, or 1 + the index of
// the first call that is not valid; the calls before it have run then.
i32 posttrain_run(char* base, const Call* calls, u64 n, u64 workspace_offset, u32 threads) {
  const size_t raw = reinterpret_cast<size_t>(base) + size_t(workspace_offset);
  void* scratch = reinterpret_cast<void*>((raw + SCRATCH_ALIGN - 1) & ~size_t(SCRATCH_ALIGN - 1));
  const u32 team = pool_begin(threads);
  i32 result = 0;
  for (u64 i = 0; i < n && result == 0; i++) {
    if (valid(calls[i])) {
      TABLE[calls[i].op].run({calls[i], base, {scratch, team}});
    } else {
      result = i32(i + 1);
    }
  }
  pool_end(team);
  return result;
}

}  // extern "C"
#pragma GCC visibility pop
