#pragma once

#include "kernels/cuda/table_args.cuh"

// Lanes of a DecodeTable that drop the row of least attention weight in every step, packed or not
// (TableShape::drops_packed).
namespace kvlm::cuda::packed {

/// Makes what the host has sent of a slot complete.
void begin_places(const TableArgs& table, int slot, Stream& stream);
/// Makes the scores of a layer's keys the weights of its values, place by place. `most`: places of
/// a side, at most.
void weigh_places(const TableArgs& table, int layer, int most, Stream& stream);
/// add_row_weights(), behind that.
void add_place_weights(const TableArgs& table, int layer, bool summed, Stream& stream);
/// drop_least_weighed(), once the windows that are full have been packed.
void drop_least_placed(const TableArgs& table, bool alike, Stream& stream);

}  // namespace kvlm::cuda::packed
