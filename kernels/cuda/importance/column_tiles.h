#pragma once

#include "kernels/base/tensor.h"
#include "kernels/column_sums.h"
#include "kernels/cuda/dense/prompt_attention.h"
#include "kernels/cuda/dense/prompt_rows.cuh"

namespace kvlm::cuda {

/// One call of kvlm::column_sums() whose multiply is f16 or bf16, on checked arguments.
struct ColumnTilesJob {
  ConstTensorView q;  // (n, q_heads, head_dim), head_dim at most 256
  PromptRows keys;
  SummedRows rows;
  float scale;
  DType multiply;
  unsigned long long* small;  // (q_heads,) that gain what the sums' small_entries are, or null
  /// Attention of the same rows or null: it is made on the way, and finds the softmax in place of
  /// the first pass. Then all rows are summed alike and `small` is null.
  const PromptJob* attention = nullptr;
};

/// What QueuedSums::small_entries counts: weights below this share of the largest of their row.
inline constexpr float kSmallWeight = 0.01f;

/// In how many parts `tiles` are taken where `blocks` of them run beside each other.
int sum_splits(int64_t tiles, int64_t blocks);

/// In how many parts sum_column_tiles() adds the rows up.
int column_tile_parts(const ColumnTilesJob& job);

/// Writes the parts (kv_heads, column_tile_parts(), columns) of the sums, not yet divided by
/// q_per_kv. q * scale and keys are rounded to `multiply` and multiplied on the tensor cores as in
/// attend_prompt(); the softmax is f32, sums are f32 over 32 rows and f64 beyond. Two passes over
/// the scores: the first finds the maximum and the sum of every row, the second adds the weights.
/// Queries are not read behind attention, which may write in their place.
/// Takes scratch for the rounded rows and for the softmax of every row.
void sum_column_tiles(const ColumnTilesJob& job, double* parts, Stream& stream);

}  // namespace kvlm::cuda
