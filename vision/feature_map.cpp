#include "vision/feature_map.h"

#include <fmt/format.h>

#include <cstddef>
#include <limits>

#include "kernels/base/error.h"
#include "vision/position_table.h"

namespace kvlm {

RowBlend resample_map(int rows, int columns, int to_rows, int to_columns) {
  const AxisTaps down = interpolation_axis(rows, to_rows, Interpolation::kBilinear);
  const AxisTaps across = interpolation_axis(columns, to_columns, Interpolation::kBilinear);
  RowBlend blend;
  blend.terms = 4;
  blend.indices.reserve(static_cast<size_t>(to_rows) * static_cast<size_t>(to_columns) * 4);
  blend.weights.reserve(blend.indices.capacity());
  for (size_t row = 0; row < static_cast<size_t>(to_rows); ++row) {
    for (size_t column = 0; column < static_cast<size_t>(to_columns); ++column) {
      for (size_t v = 2 * row; v < 2 * row + 2; ++v) {
        for (size_t u = 2 * column; u < 2 * column + 2; ++u) {
          blend.indices.push_back(down.indices[v] * columns + across.indices[u]);
          blend.weights.push_back(down.weights[v] * across.weights[u]);
        }
      }
    }
  }
  return blend;
}

RowBlend pack_anyres(const AnyresLayout& layout) {
  const int64_t side = layout.tile_patches;
  const int64_t newline = layout.tiles() * side * side;
  if (newline > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} tiles of {} x {} patches have too many features to be numbered",
                            layout.tiles(), side, side));
  }
  // Where patch (row, column) of the kept map lies among the features.
  const auto feature = [&](int64_t row, int64_t column) {
    row += layout.first_row;
    column += layout.first_column;
    const int64_t tile = 1 + row / side * layout.grid.columns + column / side;
    return static_cast<int32_t>((tile * side + row % side) * side + column % side);
  };

  RowBlend blend;
  blend.terms = layout.resampled() ? 4 : 1;
  const auto terms = static_cast<size_t>(blend.terms);
  blend.indices.reserve(static_cast<size_t>(layout.tokens()) * terms);
  blend.weights.reserve(blend.indices.capacity());
  const auto copy_of = [&](int64_t row) {
    blend.indices.insert(blend.indices.end(), terms, static_cast<int32_t>(row));
    blend.weights.push_back(1);
    blend.weights.insert(blend.weights.end(), terms - 1, 0.0f);
  };
  for (int64_t row = 0; row < side * side; ++row) copy_of(row);
  RowBlend map;
  if (layout.resampled()) {
    map = resample_map(layout.map_rows, layout.map_columns, layout.rows, layout.columns);
  }
  size_t term = 0;
  for (int row = 0; row < layout.rows; ++row) {
    for (int column = 0; column < layout.columns; ++column) {
      if (!layout.resampled()) {
        copy_of(feature(row, column));
        continue;
      }
      for (const size_t end = term + terms; term < end; ++term) {
        const int32_t from = map.indices[term];
        blend.indices.push_back(feature(from / layout.map_columns, from % layout.map_columns));
        blend.weights.push_back(map.weights[term]);
      }
    }
    copy_of(newline);
  }
  return blend;
}

}  // namespace kvlm
