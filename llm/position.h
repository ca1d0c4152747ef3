#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvlm {

/// Where a row stands for RoPE: on one axis, where all three numbers are the same, or on the three
/// of M-RoPE, where a visual row has a time, a height and a width of its own.
struct Position {
  int32_t time = 0;
  int32_t height = 0;
  int32_t width = 0;

  /// Of a row of text, and of any row of a model with one axis.
  static constexpr Position on_every_axis(int32_t position) noexcept {
    return {position, position, position};
  }
  constexpr int32_t largest() const noexcept { return std::max({time, height, width}); }
  bool operator==(const Position&) const = default;
};

/// Rows of a prompt that follow each other: text, or the cells of a picture or clip, slice by slice
/// and row by row.
struct PositionSpan {
  int64_t rows = 0;
  std::vector<int32_t> times = {};  ///< of each slice of cells, from its first; empty: no cells
  int height = 0;                   ///< in cells
  int width = 0;

  friend bool operator==(const PositionSpan&, const PositionSpan&) = default;
};

/// Where the rows of a prompt stand.
struct PromptPositions {
  std::vector<Position> rows;
  int32_t next = 0;  ///< of the first generated token
};

/// first, first + 1, ... on every axis.
inline std::vector<Position> following_positions(int32_t first, size_t count) {
  std::vector<Position> positions(count);
  for (size_t i = 0; i < count; ++i) {
    positions[i] = Position::on_every_axis(first + static_cast<int32_t>(i));
  }
  return positions;
}

}  // namespace kvlm
