#pragma once

#include "kernels/cuda/table/table_args.cuh"

namespace kvlm::cuda::packed {

/// Drops a full row of each lane that is not placed, and turns the first rows of keys if they turn:
/// `slots` as DecodeTable::evict(), on the GPU.
void evict_slots(const TableArgs& table, const int* slots, Stream& stream);

}  // namespace kvlm::cuda::packed
