#pragma once

#include "kernels/base/tensor.h"
#include "kernels/cuda/prompt_rows.cuh"

namespace kvlm::cuda {

/// One call of kvlm::attention() whose multiply is f16 or bf16, on checked arguments.
struct PromptJob {
  TensorView out;     // (n, q_heads, head_dim)
  ConstTensorView q;  // as out
  PromptRows rows;    // head_dim is 1 to 256
  bool causal;
  float scale;
  DType multiply;
};

/// Attends on the tensor cores: q * scale, keys, values and weights are rounded to `multiply`,
/// scores, the softmax and all sums are f32. Takes scratch for the rounded keys and values.
/// Source: Dao 2023, "FlashAttention-2", alg. 1.
void attend_prompt(const PromptJob& job, Stream& stream);

}  // namespace kvlm::cuda
