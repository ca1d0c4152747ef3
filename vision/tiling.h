#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "vision/preprocess.h"

namespace kvlm {

/// Tiles side by side, numbered row-major.
struct TileGrid {
  int rows = 1;
  int columns = 1;

  int count() const noexcept { return rows * columns; }

  friend bool operator==(const TileGrid&, const TileGrid&) = default;
};

/// InternVL's dynamic tiling; the fields are those of its preprocessing file.
struct DynamicTiling {
  int tile = 448;  ///< side of a tile, pixels
  int min_tiles = 1;
  int max_tiles = 12;
  bool thumbnail = true;  ///< a picture of more than one tile is followed by all of it in one
};

/// The grid whose shape is closest to a picture's. Of grids equally close the one with fewer tiles,
/// unless the picture has more than half the pixels of the larger one.
///
/// Throws Error{kInvalidArgument} for an empty picture and for numbers of tiles outside 1 to 1024.
/// Source: Chen et al. 2024, "How Far Are We to GPT-4V?", section 3.3; transformers,
/// get_optimal_tiled_canvas.
TileGrid dynamic_grid(int height, int width, const DynamicTiling& tiling);

/// How many pictures dynamic_tiles() makes of one of that size. Throws as dynamic_grid().
int dynamic_tile_count(int height, int width, const DynamicTiling& tiling);

/// The picture resized to its grid, whatever its shape, and cut row by row; the thumbnail last.
/// Throws as dynamic_grid() and resize().
std::vector<Image> dynamic_tiles(const Image& image, const DynamicTiling& tiling, Resample resample,
                                 ResizeBackend backend);

/// The anyres tiling of LLaVA-NeXT and LLaVA-OneVision; the fields are those of their files.
struct AnyresTiling {
  int tile = 336;                             ///< side of a tile, pixels
  std::vector<std::array<int, 2>> pinpoints;  ///< {height, width} of the canvases, in file order
  /// OneVision's "anyres_max_9" is 9: feature maps of more than 1.1^2 as many patches as that many
  /// tiles have are made smaller. 0: they never are.
  int max_tiles = 0;
};

/// What anyres makes of a picture of one size. Feature maps are of the canvas: the tower's patches
/// of all tiles but the first, put together as the tiles lie.
struct AnyresLayout {
  TileGrid grid;  ///< tiles of the canvas, without the first, which shows the whole picture
  int picture_height = 0;  ///< of the resized picture in the canvas, pixels
  int picture_width = 0;
  int top = 0;  ///< black rows above it
  int left = 0;
  int tile_patches = 0;  ///< patches along a side of a tile
  int first_row = 0;     ///< of the feature map, where the picture begins
  int first_column = 0;
  int map_rows = 0;  ///< rows of the feature map that are kept; 0 for a picture all too flat
  int map_columns = 0;
  int rows = 0;  ///< the same after the map was made smaller
  int columns = 0;

  /// Pictures that the tower is given.
  int tiles() const noexcept { return 1 + grid.count(); }
  bool resampled() const noexcept { return rows != map_rows || columns != map_columns; }
  /// Visual tokens: the first tile, then the map with a newline after every row.
  int64_t tokens() const noexcept {
    return int64_t{tile_patches} * tile_patches + int64_t{rows} * columns + rows;
  }

  friend bool operator==(const AnyresLayout&, const AnyresLayout&) = default;
};

/// The canvas, {height, width}, that shows most of a picture's pixels and then wastes fewest of its
/// own; the first of equals.
///
/// Throws Error{kInvalidArgument} for an empty picture, no pinpoints, and one that is not a
/// multiple of the tile or larger than 1024 tiles. Source: Liu et al. 2024, "LLaVA-NeXT";
/// transformers, select_best_resolution.
std::array<int, 2> best_canvas(int height, int width, const AnyresTiling& tiling);

/// The layout for a tower of `tile_patches` x `tile_patches` patches a tile, in the arithmetic of
/// transformers 5's processors (rounding to 7 decimals and float floor division included).
/// Throws as best_canvas(), and if tile_patches is not 1 to 4096.
AnyresLayout anyres_layout(int height, int width, const AnyresTiling& tiling, int tile_patches);

/// The whole picture resized to one tile, whatever its shape; then the tiles of the canvas, row by
/// row, on which the picture lies centred on black. As many as anyres_layout().tiles().
/// Throws as best_canvas() and resize().
std::vector<Image> anyres_tiles(const Image& image, const AnyresTiling& tiling, Resample resample,
                                ResizeBackend backend);

/// One tile of a picture that is one of several in a OneVision prompt: padded to a square with
/// `fill` (mean_colour() of the model's mean), then resized. Throws as pad_to_square() and
/// resize().
Image square_tile(const Image& image, int tile, std::array<uint8_t, 3> fill, Resample resample,
                  ResizeBackend backend);

}  // namespace kvlm
