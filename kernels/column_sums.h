#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention.h"
#include "kernels/base/host_device.h"
#include "kernels/base/tensor.h"

namespace kvlm {

/// The rows of attention that are summed: [first, n), and what each weighs.
struct SummedRows {
  // NOLINTNEXTLINE(google-explicit-constructor): mostly a number alone
  constexpr SummedRows(int64_t first_row = 0, float weight_of_newest = 1)
      : first(first_row), newest_weight(weight_of_newest) {}

  int64_t first;
  /// Of row n - 1; row `first` weighs 1, those between on a straight line (PyramidInfer).
  float newest_weight;
  /// Null, or (n,) in memory of the stream's device, in place of newest_weight: row i weighs
  /// received[i] / (n - i), the mean attention that it gets of the rows that see it (TGV-KV).
  const double* received = nullptr;
};

/// What row `index` of `count` summed ones weighs; one row alone weighs 1, unless by `received`.
VLM_HD constexpr float summed_weight(const SummedRows& rows, int64_t index, int64_t count) {
  if (rows.received != nullptr) {
    if (index >= count) return 0;  // a kernel's padding
    return static_cast<float>(rows.received[rows.first + index] /
                              static_cast<double>(count - index));
  }
  if (count < 2) return 1;
  return 1 + (rows.newest_weight - 1) * static_cast<float>(index) / static_cast<float>(count - 1);
}

/// Where goes what attention looks at, summed over query rows without ever forming the matrix.
struct QueuedSums {
  /// (kv_heads, stride) in memory of the stream's device: column j of kv_head h gains the mean over
  /// its q_per_kv query heads of sum_i w_i A_ij, i over the chosen rows, w_i their weights.
  double* sums = nullptr;
  int64_t stride = 0;  ///< at least the columns, which are past rows + n
  int64_t held = 0;    ///< columns from here on are overwritten
  /// (q_heads,) in memory of the host, or empty: gains the number of entries A_ij < 0.01 max_j A_ij
  /// among those that the chosen rows may see (VL-Cache's sparsity).
  std::span<double> small_entries = {};
};

/// Adds to `result` the causal attention A = softmax(scale * q . K) of `rows`, at least one.
///
///   q         (n, q_heads, head_dim)   f32
///   k         (n, kv_heads, head_dim)  f32, the rows that belong to the queries
///   past      kv_heads * runs entries as in attention(): keys before k; values are not read
///   multiply  f32 | f16 | bf16: as in attention(), whose weights are summed; the CPU always
///             multiplies in f32
///
/// Accumulated in f32 over a tile of rows and in f64 over tiles, in an order that depends on the
/// shapes only. Memory: on the CPU a tile of rows times all columns per worker, on CUDA at most 17
/// rows of sums and 17 states of every row, and where `multiply` is f16 or bf16 the queries and
/// keys once more in that type. Asynchronous on CUDA, unless small entries are asked for.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch.
/// Source: docs/formulas.md, "Importance"; Dao et al. 2022 for the tiling.
void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows rows, float scale, DType multiply,
                 Stream& stream);

/// column_sums() and causal attention() of the same rows, with their operands and their
/// outputs: `out` may be q. Where CUDA multiplies in f16 or bf16, all rows count alike and no small
/// entries are asked for, the sums take each row's softmax from attention instead of finding it
/// again: they then differ from column_sums() as sums of another order do.
void attend_and_sum(const QueuedSums& result, TensorView out, ConstTensorView q, ConstTensorView k,
                    ConstTensorView v, std::span<const KeyValueRows> past, SummedRows rows,
                    float scale, DType multiply, Stream& stream);

/// means[l, j] = the mean over h of sums[l, h, j], added in the order of the heads: the same
/// numbers on every device.
///   sums   (layers, kv_heads, columns) in memory of the stream's device
///   means  (layers, columns), there too; beside the sums
/// Asynchronous on CUDA.
void mean_over_heads(const double* sums, int64_t layers, int64_t kv_heads, int64_t columns,
                     double* means, Stream& stream);

}  // namespace kvlm
