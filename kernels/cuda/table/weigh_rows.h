#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Lanes of a DecodeTable that drop the row of least attention weight in every step.
namespace kvlm::cuda::packed {

/// Adds what attention to a layer has weighed in this step, a mean over query heads, to the weights
/// of its rows, or (not `summed`) puts it in their place.
///   log_sums  (KV heads of the step, q_per_kv): a weight is exp(score - log_sum), from the scores
///             that row_pieces.cu has stored; null: attention has stored weights
void add_row_weights(const TableArgs& table, int layer, bool summed, const float* log_sums,
                     Stream& stream);
/// Drops the row of least weight of every lane of a step, in all layers. `alike`: the KV heads of a
/// layer drop the same row, by the mean of their weights.
void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream);

}  // namespace kvlm::cuda::packed
