#include "vision/patch_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

/// The end of what grids before have taken, moved past another.
int32_t advance(int32_t end, int64_t count) {
  const int64_t next = end + count;
  if (next > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the images of a batch have more than {} patches; encode fewer at once",
                            std::numeric_limits<int32_t>::max()));
  }
  return static_cast<int32_t>(next);
}

}  // namespace

void check_merge(const PatchGrid& grid, int merge) {
  const bool positive = grid.slices > 0 && grid.rows > 0 && grid.columns > 0 && merge > 0;
  if (!positive || grid.rows % merge != 0 || grid.columns % merge != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a grid of {} x {} x {} patches cannot be merged by {} x {}; expected "
                            "positive sides that {} divides",
                            grid.slices, grid.rows, grid.columns, merge, merge, merge));
  }
  // Products of ints that fit, so that neither this nor a sum of two passes 2^63.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (int64_t{grid.rows} * grid.columns > kMost ||
      int64_t{grid.rows} * grid.columns * grid.slices > kMost) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a grid of {} x {} x {} patches is too large; expected at most {} "
                            "patches; make the image smaller",
                            grid.slices, grid.rows, grid.columns, kMost));
  }
}

std::vector<std::array<int32_t, 2>> patch_places(const PatchGrid& grid, int merge) {
  check_merge(grid, merge);
  std::vector<std::array<int32_t, 2>> places;
  places.reserve(static_cast<size_t>(grid.patches()));
  for (int slice = 0; slice < grid.slices; ++slice) {
    for_each_place(grid, merge, [&](int row, int column) { places.push_back({row, column}); });
  }
  return places;
}

std::vector<int32_t> merge_block_order(int rows, int columns, int merge, bool columns_first) {
  const PatchGrid grid{1, rows, columns};
  check_merge(grid, merge);
  std::vector<int32_t> order;
  order.reserve(static_cast<size_t>(grid.patches()));
  for_each_place(grid, merge,
                 [&](int row, int column) { order.push_back(row * columns + column); });
  if (!columns_first) return order;

  const auto cell = static_cast<size_t>(merge) * static_cast<size_t>(merge);
  const auto down = static_cast<size_t>(rows / merge);
  const auto across = static_cast<size_t>(columns / merge);
  std::vector<int32_t> turned(order.size());
  for (size_t row = 0; row < down; ++row) {
    for (size_t column = 0; column < across; ++column) {
      std::copy_n(order.data() + (row * across + column) * cell, cell,
                  turned.data() + (column * down + row) * cell);
    }
  }
  return turned;
}

std::vector<int32_t> slice_bounds(std::span<const PatchGrid> grids) {
  std::vector<int32_t> bounds = {0};
  for (const PatchGrid& grid : grids) {
    check_merge(grid, 1);
    for (int slice = 0; slice < grid.slices; ++slice) {
      bounds.push_back(advance(bounds.back(), int64_t{grid.rows} * grid.columns));
    }
  }
  return bounds;
}

WindowOrder window_order(std::span<const PatchGrid> grids, int merge, int side) {
  if (side < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a window of {} x {} merged patches is empty; expected window_size to "
                            "be at least the patch size times the merge size",
                            side, side));
  }
  WindowOrder order;
  order.bounds.push_back(0);
  int32_t first = 0;  // cell of the slice
  for (const PatchGrid& grid : grids) {
    check_merge(grid, merge);
    const int rows = grid.rows / merge;
    const int columns = grid.columns / merge;
    for (int slice = 0; slice < grid.slices; ++slice) {
      for (int64_t top = 0; top < rows; top += side) {
        const auto bottom = static_cast<int32_t>(std::min<int64_t>(rows, top + side));
        for (int64_t left = 0; left < columns; left += side) {
          const auto right = static_cast<int32_t>(std::min<int64_t>(columns, left + side));
          for (auto row = static_cast<int32_t>(top); row < bottom; ++row) {
            for (auto column = static_cast<int32_t>(left); column < right; ++column) {
              order.cells.push_back(first + row * columns + column);
            }
          }
          const int64_t cells = (bottom - top) * (right - left);
          order.bounds.push_back(advance(order.bounds.back(), cells * merge * merge));
        }
      }
      first += rows * columns;
    }
  }
  return order;
}

std::vector<int32_t> inverse_order(std::span<const int32_t> order) {
  std::vector<int32_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    inverse[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  }
  return inverse;
}

}  // namespace kvlm
