#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Eviction of unpacked tokens by slot or score, in token order.
namespace kvlm::cuda::packed {

/// Evicts an unpacked token of each KV head that is not placed, and rotates the sinks if the table
/// has TurnedRows. `slots` as in DecodeTable::evict(), on the GPU.
void evict_slots(const TableArgs& table, const int* slots, Stream& stream);

}  // namespace kvlm::cuda::packed
