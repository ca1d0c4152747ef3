#pragma once

#include "kernels/cuda/table/table_args.cuh"

// In-place eviction of KV heads with packed tokens (TableHead.placed). These kernels skip all other
// KV heads, and drop_rows.cu skips these.
namespace kvlm::cuda::packed {

/// Completes the entries of a slot after their upload.
void begin_places(const TableArgs& table, int slot, Stream& stream);
/// Counts the packed windows, then evicts as drop_least_weighed() does.
void drop_least_placed(const TableArgs& table, bool alike, Stream& stream);
/// Counts the packed windows, then evicts by `slots` of DecodeTable::evict(). This or
/// drop_least_placed() is called in every step.
///   alike  KV heads of a layer evict the same token, by mean weight
void evict_placed(const TableArgs& table, bool alike, const int* slots, Stream& stream);

}  // namespace kvlm::cuda::packed
