#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Blocks of packed rows in lanes of a DecodeTable that are placed.
namespace kvlm::cuda::packed {

/// Nothing of rows [from, block_rows) of a block may make a product that is no number: their scales
/// become 0. By thread `thread` of `threads`.
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

/// Chooses the blocks that the next window of a side fills: the one that is being filled, then such
/// as have no rows, then new ones. By one thread, whenever a block begins or ends, so that it
/// follows from what the lane holds.
__device__ inline void choose_targets(const TableArgs& table, int lane, int side) {
  DeviceTail& tail = table.tails[lane * 2 + side];
  if (tail.most_blocks == 0) return;
  const int rows = table.windows[lane / table.heads % table.layers * 2 + side].rows;
  const int* live = table.live_of(lane, side);
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
