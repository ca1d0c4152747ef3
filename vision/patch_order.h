#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace kvlm {

/// The patches of a picture or clip: `slices` of (rows, columns) each. A still picture has one
/// slice; a slice of a clip holds as many frames as a patch is deep.
struct PatchGrid {
  int slices = 1;
  int rows = 0;
  int columns = 0;

  int64_t patches() const noexcept { return int64_t{slices} * rows * columns; }
  /// Visual tokens once merge x merge patches are one.
  int64_t cells(int merge) const noexcept { return patches() / (int64_t{merge} * merge); }

  friend bool operator==(const PatchGrid&, const PatchGrid&) = default;
};

/// Throws Error{kInvalidArgument} if a side is not positive or not a multiple of `merge`, or if the
/// grid has 2^31 patches or more.
void check_merge(const PatchGrid& grid, int merge);

/// Calls visit(row, column) for every patch of a slice in merge-block order: blocks of merge x
/// merge patches in raster order, raster order inside a block. `merge` 1 is raster order.
template <class Visit>
void for_each_place(const PatchGrid& grid, int merge, Visit&& visit) {
  for (int row = 0; row < grid.rows; row += merge) {
    for (int column = 0; column < grid.columns; column += merge) {
      for (int dy = 0; dy < merge; ++dy) {
        for (int dx = 0; dx < merge; ++dx) visit(row + dy, column + dx);
      }
    }
  }
}

/// {row, column} of every patch in merge-block order, all slices alike and one after another.
/// Throws as check_merge(). Source: Wang et al. 2024, "Qwen2-VL"; transformers,
/// get_vision_position_ids.
std::vector<std::array<int32_t, 2>> patch_places(const PatchGrid& grid, int merge);

/// The patches of a slice, numbered row-major, in merge-block order; each run of merge * merge is
/// one cell. This is InternVL's pixel shuffle too ("v2"; `columns_first` numbers the cells column
/// by column, its "v1"). Throws as check_merge().
std::vector<int32_t> merge_block_order(int rows, int columns, int merge,
                                       bool columns_first = false);

/// Where attention segments end: the first bound is 0, and segment i is the patches
/// [bounds[i], bounds[i + 1]). One segment a slice.
std::vector<int32_t> slice_bounds(std::span<const PatchGrid> grids);

/// Patches regrouped by windows of attention.
struct WindowOrder {
  std::vector<int32_t> cells;   ///< merged cells, numbered over all grids, window after window
  std::vector<int32_t> bounds;  ///< of the windows, in patches, as slice_bounds()
};

/// Windows of side x side merged cells, row-major in every slice, cells row-major in every window;
/// those at the right and lower edge are smaller. A slice's cells stay together, so slice_bounds()
/// holds for the new order too.
///
/// Throws Error{kInvalidArgument} as check_merge(), and if `side` is not positive.
/// Source: Bai et al. 2025, "Qwen2.5-VL", section 2.1.1; transformers, get_vision_window_index.
WindowOrder window_order(std::span<const PatchGrid> grids, int merge, int side);

/// The order that undoes a permutation: inverse[order[i]] = i.
std::vector<int32_t> inverse_order(std::span<const int32_t> order);

}  // namespace kvlm
