#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Lanes of a DecodeTable whose packed rows may go (TableLane.placed). What serves others passes
// these by, and the other way round.
namespace kvlm::cuda::packed {

/// Makes what the host has sent of a slot complete.
void begin_places(const TableArgs& table, int slot, Stream& stream);
/// drop_least_weighed(), once the windows that are full have been packed.
void drop_least_placed(const TableArgs& table, bool alike, Stream& stream);
/// evict_slots(), in the order in which rows came, then too; in every step.
///   alike  as there, of rows that go by weight
void evict_placed(const TableArgs& table, bool alike, const int* slots, Stream& stream);

}  // namespace kvlm::cuda::packed
