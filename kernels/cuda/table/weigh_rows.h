#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Lanes of a DecodeTable that drop the row of least attention weight in every step.
namespace kvlm::cuda::packed {

/// Merges the states of a layer's lanes (attend_splits()), and adds the attention weights of this
/// step, a mean over query heads, to those of the lanes' rows, or (not `summed`) puts them in their
/// place.
///   in_order  scores lie in the order of rows: row_pieces.cu has stored them
void join_and_weigh_rows(const TableArgs& table, const AttendArgs& args, const FusedArgs& fused,
                         bool summed, bool in_order, Stream& stream);
/// Drops the row of least weight of every lane of a step, in all layers. `alike`: the KV heads of a
/// layer drop the same row, by the mean of their weights.
void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream);

}  // namespace kvlm::cuda::packed
