// ops.h: the signature of every op: outputs, inputs, sizes, scalars, means. The families' own files
// hold the derivations. <family>_workspace functions state the exact scratch in bytes; an op
// without one needs none. Buffers are dense and row-major; `accumulate` is WRITE, ADD or BETA.
#pragma once
#include "call.h"

constexpr i64 MAX_HEAD_SIZE = 256;  // of the attention ops: rows of a head live on the stack

// zig hides symbols on WebAssembly unless they say otherwise.
#pragma GCC visibility push(default)
extern "C" {

void embedding_forward(float* out, const i32* tokens, const i32* positions,
                       const float* token_table, const float* position_table, i64 N, i64 C,
                       const Work& work);
void embedding_backward_weight(float* dtable, const float* dout, const i32* rows, const i32* starts,
                               const i32* order, const float* scalars, i64 N, i64 C, i64 K,
                               i32 accumulate, const Work& work);

void layernorm_forward(float* out, float* mean, float* rstd, const float* x, const float* weight,
                       const float* bias, i64 N, i64 C, float eps, const Work& work);
void layernorm_backward_input(float* dx, const float* dout, const float* x, const float* weight,
                              const float* mean, const float* rstd, i64 N, i64 C, i32 accumulate,
                              const Work& work);
void layernorm_backward_weight(float* dweight, float* dbias, const float* dout, const float* x,
                               const float* mean, const float* rstd, const float* scalars, i64 N,
                               i64 C, i32 accumulate, const Work& work);
void layernorm_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x,
                        const float* weight, const float* mean, const float* rstd,
                        const float* scalars, i64 N, i64 C, i32 accumulate, const Work& work);

void linear_forward(float* out, const float* x, const float* weight, const float* bias, i64 N,
                    i64 I, i64 O, i32 transposed, const Work& work);
void linear_backward_input(float* dx, const float* dout, const float* weight, i64 N, i64 I, i64 O,
                           i32 transposed, i32 accumulate, const Work& work);
void linear_backward_weight(float* dweight, const float* x, const float* dout, const float* scalars,
                            i64 N, i64 I, i64 O, i32 transposed, i32 accumulate, const Work& work);
void linear_backward_bias(float* dbias, const float* dout, const float* scalars, i64 N, i64 O,
                          i32 accumulate, const Work& work);

void linear_backward_weight_bias(float* dweight, float* dbias, const float* x, const float* dout,
                                 const float* scalars, i64 N, i64 I, i64 O, i32 accumulate,
                                 const Work& work);

void gelu_forward(float* out, const float* x, i64 N, i64 C, i32 erf, const Work& work);
void gelu_backward(float* dx, const float* dout, const float* x, i64 N, i64 C, i32 erf,
                   const Work& work);

void attention_forward(float* out, float* lse, const float* qkv, const i32* segment_start, i64 B,
                       i64 T, i64 C, i64 H, const Work& work);
void attention_backward(float* dqkv, const float* dout, const float* qkv, const float* out,
                        const float* lse, const i32* segment_start, i64 B, i64 T, i64 C, i64 H,
                        const Work& work);
void attention_append(float* cache, const float* qkv, const i32* positions, i64 B, i64 T, i64 C,
                      i64 S, const Work& work);
void attention_decode(float* out, const float* qkv, const float* cache, const i32* positions, i64 B,
                      i64 T, i64 C, i64 S, i64 H, const Work& work);

void add_forward(float* out, const float* a, const float* b, i64 N, i64 C, const Work& work);
void gather_forward(float* out, const float* x, const i32* rows, i64 B, i64 N, i64 C,
                    const Work& work);

void cross_entropy_forward(float* row_loss, float* lse, const float* logits, const i32* targets,
                           i64 N, i64 V, const Work& work);
void cross_entropy_backward(float* dlogits, const float* logits, const i32* targets,
                            const float* lse, const float* scalars, i64 N, i64 V, const Work& work);
void loss_sum(float* loss, const float* row_loss, const float* scalars, i64 N, i32 accumulate,
              const Work& work);

void sum_squares(float* out, const float* x, i64 P, const Work& work);
void gradient_clip(float* clip, const float* decayed, const float* plain, float clip_norm,
                   const Work& work);
void adamw_step(float* param, float* m, float* v, const float* grad, const float* clip,
                const float* scalars, i64 P, double beta1, double beta2, double eps,
                double weight_decay, const Work& work);

void linear_gelu_forward(float* out, float* fc, const float* x, const float* weight,
                         const float* bias, i64 N, i64 I, i64 O, i32 erf, const Work& work);
void linear_residual_forward(float* out, const float* residual, const float* x, const float* weight,
                             const float* bias, i64 N, i64 I, i64 O, const Work& work);
void gelu_linear_backward_input(float* dfc, float* act, const float* dout, const float* weight,
                                const float* fc, i64 N, i64 I, i64 O, i32 erf, const Work& work);

void int8_forward(float* out, const float* x, const i32* weight, const float* scale,
                  const float* bias, i64 N, i64 I, i64 O, i32 transposed, const Work& work);

}  // extern "C"
#pragma GCC visibility pop

// Scratch in bytes. It follows from the shapes alone, never from the number of threads.
u64 layernorm_backward_weight_workspace(i64 N, i64 C);
u64 linear_forward_workspace(i64 N, i64 I, i64 O);
u64 linear_backward_input_workspace(i64 N, i64 I, i64 O);
u64 linear_backward_weight_workspace(i64 N, i64 I, i64 O, i32 transposed);
u64 linear_backward_bias_workspace(i64 N, i64 O);
u64 linear_backward_weight_bias_workspace(i64 N, i64 I, i64 O);
u64 attention_forward_workspace(i64 B, i64 T, i64 C, i64 H);
u64 attention_backward_workspace(i64 B, i64 T, i64 C, i64 H);
u64 sum_squares_workspace(i64 P);
