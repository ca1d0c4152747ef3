#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Attention weights of tokens (H2O, TOVA), and eviction of the unpacked token of least weight.
namespace kvlm::cuda::packed {

/// Merges the split states of a layer (attend_splits()). Adds this step's attention weights, a mean
/// over query heads, to the tokens' weights, or replaces them (not `summed`).
///   in_order  row_splits.cu stored the scores, in slot order
void join_and_weigh_rows(const TableArgs& table, const AttendArgs& args, const FusedArgs& fused,
                         bool summed, bool in_order, Stream& stream);
/// Evicts the token of least weight of every KV head of a step, in all layers. `alike`: one token
/// for the KV heads of a layer, by mean weight.
void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream);

}  // namespace kvlm::cuda::packed
