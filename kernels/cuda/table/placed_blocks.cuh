#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Packed blocks of placed KV heads: which ones the next window fills, and their unused rows.
namespace kvlm::cuda::packed {

/// Clears scales and zero points of rows [from, block_rows) of a block, so that no product with
/// them is NaN. By thread `thread` of `threads`.
__device__ inline void clear_rest(const TableArgs& table, const DeviceTail& tail, int block,
                                  int from, int thread, int threads) {
  const PackedFormat& format = table.formats[tail.format];
  const int row_bytes = format.groups() * static_cast<int>(dtype_bytes(format.meta));
  const int64_t at = static_cast<int64_t>(block) * tail.scale_stride;
  for (std::byte* meta : {tail.scales, tail.zeros}) {
    if (meta == nullptr) continue;
    auto* bytes = reinterpret_cast<unsigned char*>(meta + at);
    for (int i = from * row_bytes + thread; i < tail.block_rows * row_bytes; i += threads) {
      bytes[i] = 0;
    }
  }
}

/// Chooses the blocks that the next window of a side fills: the one being filled, then empty ones,
/// then new ones. By one thread, whenever a block begins or becomes empty, so that the choice
/// depends only on what the KV head holds.
__device__ inline void choose_targets(const TableArgs& table, int head, int side) {
  DeviceTail& tail = table.tails[head * 2 + side];
  if (tail.most_blocks == 0) return;
  const int rows = table.windows[head / table.kv_heads % table.layers * 2 + side].rows;
  const int* live = table.live_of(head, side);
  const int wanted = (tail.filled + rows + tail.block_rows - 1) / tail.block_rows;
  int count = 0;
  if (tail.filling >= 0) tail.targets[count++] = static_cast<int16_t>(tail.filling);
  for (int block = 0; block < tail.blocks && count < wanted; ++block) {
    if (live[block] == 0 && block != tail.filling) {
      tail.targets[count++] = static_cast<int16_t>(block);
    }
  }
  for (int block = tail.blocks; count < wanted; ++block) {
    tail.targets[count++] = static_cast<int16_t>(block);
  }
}

}  // namespace kvlm::cuda::packed
