#pragma once

#include <cuda.h>

#include <cstdint>

namespace kvlm::cuda {

/// Rows of heads in GPU memory, of 16-bit elements: channel c of head h of row r is element
/// r * row_stride + h * channels + c. `data` and both strides are multiples of 16 bytes.
struct HeadGrid {
  const void* data;
  CUtensorMapDataType type;
  int channels;  // of a head
  int64_t rows;
  int heads;
  int64_t row_stride;
};

/// What copy_box() copies `box_channels` channels (64, or 16) of `box_rows` rows of a head by: to
/// shared memory row by row, their 16-byte chunks exchanged as in a panel of WarpgroupTile; zeros
/// where there is no such row or channel. Throws Error as check() does.
CUtensorMap map_heads(const HeadGrid& grid, int box_channels, int box_rows);

}  // namespace kvlm::cuda
