#include "vision/tiling.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/base/error.h"

// How a picture is cut into tiles of one size: the canvas of LLaVA-NeXT and OneVision that wastes
// the least, and InternVL's grid of the closest aspect ratio, each with the reference's arithmetic
// to the last bit, since a tile more or less changes the prompt.
namespace kvlm {

namespace {

constexpr int kMostTiles = 1024;

void check_picture(int height, int width) {
  if (height > 0 && width > 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("an image of {} x {} pixels cannot be cut into tiles", width, height));
}

void check_tile(int tile) {
  if (tile > 0 && tile <= 1 << 14) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("tiles of {} x {} pixels cannot be cut; expected 1 to {}, the image size "
                          "of the vision tower",
                          tile, tile, 1 << 14));
}

void check_dynamic(int height, int width, const DynamicTiling& tiling) {
  check_picture(height, width);
  check_tile(tiling.tile);
  if (tiling.min_tiles >= 1 && tiling.max_tiles >= tiling.min_tiles &&
      tiling.max_tiles <= kMostTiles) {
    return;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "an image cannot be cut into {} to {} tiles; expected 1 to {}, the smaller number first",
          tiling.min_tiles, tiling.max_tiles, kMostTiles));
}

/// The height x width pixels from (top, left) on; what lies outside the picture is black.
Image cut(const Image& image, int top, int left, int height, int width) {
  Image out;
  out.height = height;
  out.width = width;
  out.rgb.resize(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  const int first_row = std::max(0, -top);
  const int end_row = std::min(height, image.height - top);
  const int first_column = std::max(0, -left);
  const int end_column = std::min(width, image.width - left);
  if (first_column >= end_column) return out;
  const size_t bytes = static_cast<size_t>(end_column - first_column) * 3;
  for (int row = first_row; row < end_row; ++row) {
    const size_t from = (static_cast<size_t>(top + row) * static_cast<size_t>(image.width) +
                         static_cast<size_t>(left + first_column)) *
                        3;
    const size_t to = (static_cast<size_t>(row) * static_cast<size_t>(width) +
                       static_cast<size_t>(first_column)) *
                      3;
    std::copy_n(image.rgb.data() + from, bytes, out.rgb.data() + to);
  }
  return out;
}

/// The tiles of a canvas on which `picture` begins at (top, left), appended to `tiles`.
void cut_grid(const Image& picture, const TileGrid& grid, int tile, int top, int left,
              std::vector<Image>& tiles) {
  for (int row = 0; row < grid.rows; ++row) {
    for (int column = 0; column < grid.columns; ++column) {
      tiles.push_back(cut(picture, row * tile - top, column * tile - left, tile, tile));
    }
  }
}

/// Python's round(x, 7), which is the decimal number closest to x.
double round_to_7_decimals(double x) {
  std::array<char, 400> text;  // the longest double has 309 digits before the point
  const auto written = std::to_chars(text.data(), text.data() + text.size(), x,
                                     std::chars_format::fixed, /*precision=*/7);
  double rounded = x;
  std::from_chars(text.data(), written.ptr, rounded);
  return rounded;
}

/// Python's a // b of two positive floats: not floor(a / b) where the quotient rounds up to a whole
/// number.
double floor_division(double a, double b) {
  const double quotient = (a - std::fmod(a, b)) / b;
  const double whole = std::floor(quotient);
  return quotient - whole > 0.5 ? whole + 1.0 : whole;
}

/// Rows and columns of black on either side of a feature map, of which the picture covers `length`
/// in proportion.
int blank_patches(int canvas, double covered) {
  return (canvas - static_cast<int>(round_to_7_decimals(covered))) / 2;
}

}  // namespace

TileGrid dynamic_grid(int height, int width, const DynamicTiling& tiling) {
  check_dynamic(height, width, tiling);
  const double aspect = static_cast<double>(width) / height;
  const double area = static_cast<double>(width) * height;
  TileGrid best;
  double least = std::numeric_limits<double>::infinity();
  for (int count = tiling.min_tiles; count <= tiling.max_tiles; ++count) {
    for (int columns = 1; columns <= count; ++columns) {
      if (count % columns != 0) continue;
      const int rows = count / columns;
      const double difference = std::abs(aspect - static_cast<double>(columns) / rows);
      const double half_area = 0.5 * tiling.tile * tiling.tile * columns * rows;
      if (difference < least || (difference == least && area > half_area)) {
        least = difference;
        best = {rows, columns};
      }
    }
  }
  return best;
}

int dynamic_tile_count(int height, int width, const DynamicTiling& tiling) {
  const int count = dynamic_grid(height, width, tiling).count();
  return count + (tiling.thumbnail && count > 1 ? 1 : 0);
}

std::vector<Image> dynamic_tiles(const Image& image, const DynamicTiling& tiling, Resample resample,
                                 ResizeBackend backend) {
  const TileGrid grid = dynamic_grid(image.height, image.width, tiling);
  std::vector<Image> tiles;
  const Image resized =
      resize(image, grid.rows * tiling.tile, grid.columns * tiling.tile, resample, backend);
  cut_grid(resized, grid, tiling.tile, 0, 0, tiles);
  if (tiling.thumbnail && grid.count() > 1) {
    tiles.push_back(resize(image, tiling.tile, tiling.tile, resample, backend));
  }
  return tiles;
}

std::array<int, 2> best_canvas(int height, int width, const AnyresTiling& tiling) {
  check_picture(height, width);
  check_tile(tiling.tile);
  if (tiling.pinpoints.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "there is no canvas for an image; expected image_grid_pinpoints to list at least one");
  }
  std::array<int, 2> best{};
  const int64_t pixels = int64_t{height} * width;
  int64_t most = -1;
  int64_t least_waste = 0;
  for (const auto& [tall, wide] : tiling.pinpoints) {
    if (tall < 1 || wide < 1 || tall % tiling.tile != 0 || wide % tiling.tile != 0 ||
        tall / tiling.tile > kMostTiles / (wide / tiling.tile)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("image_grid_pinpoints has a canvas of {} x {} pixels; expected "
                              "multiples of the tile's {}, and {} tiles at most",
                              wide, tall, tiling.tile, kMostTiles));
    }
    const double scale =
        std::min(static_cast<double>(wide) / width, static_cast<double>(tall) / height);
    const auto shown_width = static_cast<int64_t>(width * scale);
    const auto shown_height = static_cast<int64_t>(height * scale);
    const int64_t shown = std::min(shown_width * shown_height, pixels);
    const int64_t waste = int64_t{tall} * wide - shown;
    if (shown > most || (shown == most && waste < least_waste)) {
      most = shown;
      least_waste = waste;
      best = {tall, wide};
    }
  }
  return best;
}

AnyresLayout anyres_layout(int height, int width, const AnyresTiling& tiling, int tile_patches) {
  const auto [canvas_height, canvas_width] = best_canvas(height, width, tiling);
  if (tile_patches < 1 || tile_patches > 1 << 12) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a tile of {} x {} patches has no layout; expected 1 to {}",
                            tile_patches, tile_patches, 1 << 12));
  }
  AnyresLayout layout;
  layout.grid = {canvas_height / tiling.tile, canvas_width / tiling.tile};
  layout.tile_patches = tile_patches;

  const double wider = static_cast<double>(canvas_width) / width;
  const double taller = static_cast<double>(canvas_height) / height;
  if (wider < taller) {
    layout.picture_width = canvas_width;
    layout.picture_height = std::min(static_cast<int>(std::ceil(height * wider)), canvas_height);
  } else {
    layout.picture_height = canvas_height;
    layout.picture_width = std::min(static_cast<int>(std::ceil(width * taller)), canvas_width);
  }
  layout.top = (canvas_height - layout.picture_height) / 2;
  layout.left = (canvas_width - layout.picture_width) / 2;

  // The reference unpads the feature map by its own proportions, not by the pixels above, and what
  // it takes away is as much on either side.
  layout.map_rows = layout.grid.rows * tile_patches;
  layout.map_columns = layout.grid.columns * tile_patches;
  const double aspect = static_cast<double>(width) / height;
  if (aspect > static_cast<double>(layout.map_columns) / layout.map_rows) {
    const double scale = static_cast<double>(layout.map_columns) / width;
    layout.first_row = blank_patches(layout.map_rows, height * scale);
    layout.map_rows -= 2 * layout.first_row;
  } else {
    const double scale = static_cast<double>(layout.map_rows) / height;
    layout.first_column = blank_patches(layout.map_columns, width * scale);
    layout.map_columns -= 2 * layout.first_column;
  }

  layout.rows = layout.map_rows;
  layout.columns = layout.map_columns;
  if (tiling.max_tiles > 0) {
    const double patches = static_cast<double>(layout.map_rows) * layout.map_columns;
    const double room = static_cast<double>(tiling.max_tiles) * tile_patches * tile_patches;
    const double ratio = std::sqrt(patches / room);
    if (ratio > 1.1) {
      layout.rows = static_cast<int>(floor_division(layout.map_rows, ratio));
      layout.columns = static_cast<int>(floor_division(layout.map_columns, ratio));
    }
  }
  return layout;
}

std::vector<Image> anyres_tiles(const Image& image, const AnyresTiling& tiling, Resample resample,
                                ResizeBackend backend) {
  const AnyresLayout layout = anyres_layout(image.height, image.width, tiling, 1);
  std::vector<Image> tiles;
  tiles.push_back(resize(image, tiling.tile, tiling.tile, resample, backend));
  const Image resized =
      resize(image, layout.picture_height, layout.picture_width, resample, backend);
  cut_grid(resized, layout.grid, tiling.tile, layout.top, layout.left, tiles);
  return tiles;
}

Image square_tile(const Image& image, int tile, std::array<uint8_t, 3> fill, Resample resample,
                  ResizeBackend backend) {
  check_tile(tile);
  return resize(pad_to_square(image, fill), tile, tile, resample, backend);
}

}  // namespace kvlm
