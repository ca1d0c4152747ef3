#pragma once

#include "kernels/base/tensor.h"
#include "kernels/cuda/dense/prompt_rows.cuh"

namespace kvlm::cuda {

/// One call of kvlm::attention() whose multiply is f16 or bf16, on checked arguments.
struct PromptJob {
  TensorView out;     // (n, q_heads, head_dim)
  ConstTensorView q;  // as out
  PromptRows rows;    // head_dim is 1 to 256
  bool causal;
  float scale;
  DType multiply;
  /// (q_heads, softmax_rows) or null: of each row the maximum m that its weights 2^(s - m) / sum
  /// are relative to, at most 8 below its largest score s = scale * log2(e) * q . k, and 1 / sum.
  float2* softmax = nullptr;
  int64_t softmax_rows = 0;  // at least n
};

/// Attends on the tensor cores: q * scale, keys, values and weights are rounded to `multiply`,
/// scores, the softmax and all sums are f32. Takes scratch for the rounded keys and values, which
/// it returns: tiles of columns_at_a_time() rows as round_rows() lays them, until the next call.
/// Source: Dao 2023, "FlashAttention-2", alg. 1.
const void* attend_prompt(const PromptJob& job, Stream& stream);

}  // namespace kvlm::cuda
