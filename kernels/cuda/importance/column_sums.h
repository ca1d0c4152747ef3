#pragma once

#include "kernels/column_sums.h"

namespace kvlm::cuda {

/// kvlm::column_sums on checked arguments.
void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows rows, float scale, DType multiply,
                 Stream& stream);

/// kvlm::attend_and_sum on checked arguments, of all rows, with f16 or bf16.
void attend_and_sum(const QueuedSums& result, TensorView out, ConstTensorView q, ConstTensorView k,
                    ConstTensorView v, std::span<const KeyValueRows> past, float scale,
                    DType multiply, Stream& stream);

/// kvlm::mean_over_heads.
void mean_over_heads(const double* sums, int64_t layers, int64_t kv_heads, int64_t columns,
                     double* means, Stream& stream);

}  // namespace kvlm::cuda
