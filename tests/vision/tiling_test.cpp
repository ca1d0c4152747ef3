#include "vision/tiling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/vision/normalize.h"
#include "tests/vision/test_images.h"
#include "vision/normalization.h"

namespace kvlm {
namespace {

using test::error_of;
using test::picture;
using ::testing::HasSubstr;

constexpr ResizeBackend kTorch = ResizeBackend::kTorchvision;

/// The five canvases of LLaVA-NeXT's released files.
AnyresTiling next_tiling() {
  return {336, {{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}}, 0};
}

/// Canvases of 1 to `most` tiles on each side, as OneVision's released files list them for 6.
AnyresTiling square_tiling(int tile, int most, int max_tiles) {
  AnyresTiling tiling{tile, {}, max_tiles};
  for (int rows = 1; rows <= most; ++rows) {
    for (int columns = 1; columns <= most; ++columns) {
      tiling.pinpoints.push_back({rows * tile, columns * tile});
    }
  }
  return tiling;
}

AnyresTiling onevision_tiling() { return square_tiling(384, 6, 9); }

const std::vector<std::array<int, 2>> kAwkward = {
    {1, 1},    {1, 2},     {1, 499},   {499, 1},    {1, 4000}, {4000, 1},   {2, 3},
    {27, 28},  {28, 28},   {29, 28},   {56, 56},    {57, 83},  {97, 89},    {101, 997},
    {997, 13}, {336, 336}, {448, 896}, {1009, 499}, {84, 84},  {2304, 2304}};

TEST(DynamicGrid, TestVectors) {
  struct Case {
    int height, width;
    TileGrid twelve, six;
    int count_twelve, count_six;
  };
  for (const Case& c :
       {Case{448, 448, {1, 1}, {1, 1}, 1, 1}, Case{300, 300, {1, 1}, {1, 1}, 1, 1},
        Case{480, 640, {3, 4}, {2, 3}, 13, 7}, Case{1080, 1920, {2, 4}, {1, 2}, 9, 3},
        Case{1024, 1024, {3, 3}, {2, 2}, 10, 5}, Case{2048, 2048, {3, 3}, {2, 2}, 10, 5},
        Case{899, 1024, {3, 3}, {2, 2}, 10, 5}, Case{2000, 500, {4, 1}, {4, 1}, 5, 5},
        Case{800, 400, {2, 1}, {2, 1}, 3, 3}}) {
    DynamicTiling tiling;
    EXPECT_EQ(dynamic_grid(c.height, c.width, tiling), c.twelve) << c.height << " x " << c.width;
    EXPECT_EQ(dynamic_tile_count(c.height, c.width, tiling), c.count_twelve);
    tiling.max_tiles = 6;
    EXPECT_EQ(dynamic_grid(c.height, c.width, tiling), c.six) << c.height << " x " << c.width;
    EXPECT_EQ(dynamic_tile_count(c.height, c.width, tiling), c.count_six);
  }
}

TEST(DynamicGrid, ATieGoesToTheLargerGridIfThePictureIsLarge) {
  const DynamicTiling tiling;
  // 1 x 1, 2 x 2 and 3 x 3 have the shape of a square; 2 x 2 wins above half of its 802,816 pixels.
  EXPECT_EQ(dynamic_grid(633, 633, tiling), (TileGrid{1, 1}));
  EXPECT_EQ(dynamic_grid(634, 634, tiling), (TileGrid{2, 2}));
  EXPECT_EQ(dynamic_grid(950, 950, tiling), (TileGrid{2, 2}));
  EXPECT_EQ(dynamic_grid(951, 951, tiling), (TileGrid{3, 3}));
  EXPECT_EQ(dynamic_grid(633, 1266, tiling), (TileGrid{1, 2}));
  EXPECT_EQ(dynamic_grid(634, 1268, tiling), (TileGrid{2, 4}));
  // 1.5 is as far from 1 as from 2, where there is no 3 x 2; 448 x 672 is more than a tile.
  DynamicTiling two;
  two.max_tiles = 2;
  EXPECT_EQ(dynamic_grid(364, 546, two), (TileGrid{1, 1}));
  EXPECT_EQ(dynamic_grid(366, 549, two), (TileGrid{1, 2}));
}

TEST(DynamicGrid, AsFewAsAllowed) {
  DynamicTiling tiling;
  tiling.min_tiles = tiling.max_tiles = 7;
  EXPECT_EQ(dynamic_grid(500, 500, tiling), (TileGrid{7, 1}));  // |1 - 1/7| before |1 - 7|
  tiling.max_tiles = 8;
  EXPECT_EQ(dynamic_grid(100, 200, tiling), (TileGrid{2, 4}));
  tiling.min_tiles = tiling.max_tiles = 1;
  EXPECT_EQ(dynamic_grid(100, 9000, tiling), (TileGrid{1, 1}));
  EXPECT_EQ(dynamic_tile_count(100, 9000, tiling), 1);
  tiling.max_tiles = 12;
  tiling.thumbnail = false;
  EXPECT_EQ(dynamic_tile_count(480, 640, tiling), 12);
}

TEST(Tiling, EqualsTheReferenceOnManySizes) {
  DynamicTiling six;
  six.max_tiles = 6;
  for (auto& in : test::goldens("size", "geometry.txt")) {
    int height, width;
    TileGrid twelve_expected, six_expected;
    int next_rows, next_columns, rows, columns;
    in >> height >> width >> twelve_expected.columns >> twelve_expected.rows >>
        six_expected.columns >> six_expected.rows >> next_rows >> next_columns >> rows >> columns;
    ASSERT_TRUE(in);
    EXPECT_EQ(dynamic_grid(height, width, {}), twelve_expected) << in.str();
    EXPECT_EQ(dynamic_grid(height, width, six), six_expected) << in.str();
    const AnyresLayout next = anyres_layout(height, width, next_tiling(), 24);
    EXPECT_EQ(next.rows, next_rows) << in.str();
    EXPECT_EQ(next.rows * next.columns, next_rows * next_columns) << in.str();
    const AnyresLayout onevision = anyres_layout(height, width, onevision_tiling(), 27);
    EXPECT_EQ(onevision.rows, rows) << in.str();
    EXPECT_EQ(onevision.rows * onevision.columns, rows * columns) << in.str();
  }
}

TEST(Tiling, CanvasesEqualTheReference) {
  for (auto& in : test::goldens("canvas", "geometry.txt")) {
    int height, width, tall, wide, picture_height, picture_width;
    in >> height >> width >> tall >> wide >> picture_height >> picture_width;
    ASSERT_TRUE(in);
    EXPECT_EQ(best_canvas(height, width, next_tiling()), (std::array{tall, wide})) << in.str();
    const AnyresLayout layout = anyres_layout(height, width, next_tiling(), 24);
    EXPECT_EQ(layout.picture_height, picture_height) << in.str();
    EXPECT_EQ(layout.picture_width, picture_width) << in.str();
  }
}

TEST(AnyresLayout, TestVectors) {
  struct Case {
    int height, width;
    std::array<int, 2> canvas;
    int map_rows, map_columns, rows, columns;
    int64_t tokens;
  };
  for (const Case& c : {Case{336, 336, {336, 672}, 24, 24, 24, 24, 1176},
                        Case{480, 640, {672, 672}, 36, 48, 36, 48, 2340},
                        Case{640, 480, {672, 672}, 48, 36, 48, 36, 2352},
                        Case{1080, 1920, {672, 672}, 28, 48, 28, 48, 1948},
                        Case{899, 1024, {672, 672}, 42, 48, 42, 48, 2634},
                        Case{100, 1000, {336, 1008}, 8, 72, 8, 72, 1160},
                        Case{200, 300, {336, 672}, 24, 36, 24, 36, 1464}}) {
    EXPECT_EQ(best_canvas(c.height, c.width, next_tiling()), c.canvas);
    const AnyresLayout layout = anyres_layout(c.height, c.width, next_tiling(), 24);
    EXPECT_EQ(layout.rows, c.rows) << c.height << " x " << c.width;
    EXPECT_EQ(layout.columns, c.columns) << c.height << " x " << c.width;
    EXPECT_FALSE(layout.resampled());
    EXPECT_EQ(layout.tokens(), c.tokens);
  }
  for (const Case& c : {Case{384, 384, {384, 384}, 27, 27, 27, 27, 1485},
                        Case{480, 640, {768, 768}, 40, 54, 40, 54, 2929},
                        Case{640, 480, {768, 768}, 54, 40, 54, 40, 2943},
                        Case{1080, 1920, {1152, 1920}, 75, 135, 60, 108, 7269},
                        Case{899, 1024, {1152, 1152}, 71, 81, 71, 81, 6551},
                        Case{200, 300, {384, 384}, 19, 27, 19, 27, 1261},
                        Case{2304, 2304, {2304, 2304}, 162, 162, 81, 81, 7371},
                        Case{3000, 4000, {1920, 2304}, 121, 162, 70, 93, 7309}}) {
    EXPECT_EQ(best_canvas(c.height, c.width, onevision_tiling()), c.canvas);
    const AnyresLayout layout = anyres_layout(c.height, c.width, onevision_tiling(), 27);
    EXPECT_EQ(layout.map_rows, c.map_rows) << c.height << " x " << c.width;
    EXPECT_EQ(layout.map_columns, c.map_columns) << c.height << " x " << c.width;
    EXPECT_EQ(layout.rows, c.rows) << c.height << " x " << c.width;
    EXPECT_EQ(layout.columns, c.columns) << c.height << " x " << c.width;
    EXPECT_EQ(layout.tokens(), c.tokens);
  }
}

TEST(AnyresLayout, ATooFlatPictureLeavesTheFirstTileAlone) {
  const AnyresLayout flat = anyres_layout(1, 4000, next_tiling(), 24);
  EXPECT_EQ(flat.rows, 0);
  EXPECT_EQ(flat.tokens(), 576);
  EXPECT_EQ(flat.picture_height, 1);
  // Standing, its empty rows still end in newlines.
  EXPECT_EQ(anyres_layout(4000, 1, next_tiling(), 24).tokens(), 576 + 24);
}

/// Of two equally good canvases the earlier; of those that show as much, the smaller.
TEST(BestCanvas, PrefersTheEarlierOfEquals) {
  AnyresTiling tiling{10, {{20, 10}, {10, 20}}, 0};
  EXPECT_EQ(best_canvas(5, 5, tiling), (std::array{20, 10}));
  tiling.pinpoints = {{30, 30}, {10, 20}, {20, 10}};
  EXPECT_EQ(best_canvas(5, 5, tiling), (std::array{10, 20}));
  EXPECT_EQ(best_canvas(25, 25, tiling), (std::array{30, 30}));
}

/// No row or column of patches that lies all in the picture is taken away.
TEST(AnyresLayout, UnpaddingCutsNoWholePatchOfThePicture) {
  const AnyresTiling tiling = next_tiling();
  for (int height = 1; height < 1500; height += 17) {
    for (int width = 1; width < 1500; width += 13) {
      const AnyresLayout layout = anyres_layout(height, width, tiling, 24);
      const auto first_whole = [](int begin) { return (begin + 13) / 14; };
      const int bottom = (layout.top + layout.picture_height) / 14;
      const int right = (layout.left + layout.picture_width) / 14;
      EXPECT_LE(layout.first_row, first_whole(layout.top)) << height << " x " << width;
      EXPECT_GE(layout.first_row + layout.map_rows, bottom) << height << " x " << width;
      EXPECT_LE(layout.first_column, first_whole(layout.left)) << height << " x " << width;
      EXPECT_GE(layout.first_column + layout.map_columns, right) << height << " x " << width;
      EXPECT_EQ(2 * layout.first_row + layout.map_rows, layout.grid.rows * 24);
      EXPECT_EQ(2 * layout.first_column + layout.map_columns, layout.grid.columns * 24);
    }
  }
}

/// The pixel at (y, x) of tiles laid side by side.
std::array<uint8_t, 3> pixel_of(std::span<const Image> tiles, const TileGrid& grid, int tile, int y,
                                int x) {
  const Image& here = tiles[static_cast<size_t>(y / tile * grid.columns + x / tile)];
  const size_t at =
      (static_cast<size_t>(y % tile) * static_cast<size_t>(tile) + static_cast<size_t>(x % tile)) *
      3;
  return {here.rgb[at], here.rgb[at + 1], here.rgb[at + 2]};
}

TEST(DynamicTiles, CoverTheResizedPictureExactly) {
  DynamicTiling tiling;
  tiling.tile = 28;
  for (const auto& [height, width] : kAwkward) {
    const Image image = picture("noise", height, width);
    const TileGrid grid = dynamic_grid(height, width, tiling);
    const std::vector<Image> tiles = dynamic_tiles(image, tiling, Resample::kBicubic, kTorch);
    ASSERT_EQ(static_cast<int>(tiles.size()), dynamic_tile_count(height, width, tiling));
    for (const Image& tile : tiles) ASSERT_EQ(tile.rgb.size(), size_t{28} * 28 * 3);
    const Image whole =
        resize(image, 28 * grid.rows, 28 * grid.columns, Resample::kBicubic, kTorch);
    size_t at = 0;
    for (int y = 0; y < whole.height; ++y) {
      for (int x = 0; x < whole.width; ++x, at += 3) {
        ASSERT_EQ(pixel_of(tiles, grid, 28, y, x),
                  (std::array{whole.rgb[at], whole.rgb[at + 1], whole.rgb[at + 2]}));
      }
    }
    if (grid.count() > 1) {
      EXPECT_EQ(tiles.back().rgb, resize(image, 28, 28, Resample::kBicubic, kTorch).rgb);
    }
  }
}

TEST(AnyresTiles, CoverTheCanvasExactly) {
  const AnyresTiling tiling = square_tiling(28, 3, 0);
  for (const auto& [height, width] : kAwkward) {
    const Image image = picture("noise", height, width);
    const AnyresLayout layout = anyres_layout(height, width, tiling, 2);
    const std::vector<Image> tiles = anyres_tiles(image, tiling, Resample::kBicubic, kTorch);
    ASSERT_EQ(static_cast<int>(tiles.size()), layout.tiles());
    EXPECT_EQ(tiles[0].rgb, resize(image, 28, 28, Resample::kBicubic, kTorch).rgb);
    const Image shown =
        resize(image, layout.picture_height, layout.picture_width, Resample::kBicubic, kTorch);
    const std::span<const Image> canvas(tiles.data() + 1, tiles.size() - 1);
    for (int y = 0; y < 28 * layout.grid.rows; ++y) {
      for (int x = 0; x < 28 * layout.grid.columns; ++x) {
        const int row = y - layout.top;
        const int column = x - layout.left;
        std::array<uint8_t, 3> expected{};
        if (row >= 0 && row < shown.height && column >= 0 && column < shown.width) {
          const size_t at = (static_cast<size_t>(row) * static_cast<size_t>(shown.width) +
                             static_cast<size_t>(column)) *
                            3;
          expected = {shown.rgb[at], shown.rgb[at + 1], shown.rgb[at + 2]};
        }
        ASSERT_EQ(pixel_of(canvas, layout.grid, 28, y, x), expected) << height << " x " << width;
      }
    }
  }
}

/// pixel_values of whole processors, tile by tile.
TEST(Tiling, PixelsEqualTheProcessorsBitForBit) {
  const AnyresTiling anyres = square_tiling(28, 3, 9);
  DynamicTiling dynamic;
  dynamic.tile = 28;
  for (auto& in : test::goldens("tiles", "geometry.txt")) {
    std::string family, backend, kind;
    int height, width;
    size_t count;
    in >> family >> backend >> kind >> height >> width >> count;
    const uint32_t expected = test::read_crc(in);
    PreprocessSpec spec;
    if (backend == "pil") {
      spec.resize_backend = ResizeBackend::kPil;
      spec.normalize_backend = NormalizeBackend::kPil;
    }
    if (family == "onevision" || family == "square") spec.mean = spec.std = {0.5, 0.5, 0.5};
    const Image image = picture(kind, height, width);
    std::vector<Image> tiles;
    if (family == "internvl") {
      tiles = dynamic_tiles(image, dynamic, spec.resample, spec.resize_backend);
    } else if (family == "square") {
      tiles.push_back(
          square_tile(image, 28, mean_colour(spec.mean), spec.resample, spec.resize_backend));
    } else {
      tiles = anyres_tiles(image, anyres, spec.resample, spec.resize_backend);
    }
    ASSERT_EQ(tiles.size(), count) << in.str();
    std::vector<float> values;
    for (const Image& tile : tiles) {
      const Tensor pixels = normalize(tile, spec);
      values.insert(values.end(), pixels.as<float>(),
                    pixels.as<float>() + pixels.shape().elements());
    }
    EXPECT_EQ(test::crc32(values.data(), values.size() * sizeof(float)), expected) << in.str();
  }
}

TEST(Tiling, RefusesWhatCannotBe) {
  DynamicTiling dynamic;
  error_of(ErrorCode::kInvalidArgument, [&] { dynamic_grid(0, 5, dynamic); });
  dynamic.max_tiles = 0;
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { dynamic_grid(5, 5, dynamic); }),
              HasSubstr("1 to 0 tiles; expected 1 to 1024"));
  dynamic.max_tiles = std::numeric_limits<int>::max();
  error_of(ErrorCode::kInvalidArgument, [&] { dynamic_tile_count(5, 5, dynamic); });
  dynamic.max_tiles = 12;
  dynamic.tile = 0;
  error_of(ErrorCode::kInvalidArgument, [&] { dynamic_grid(5, 5, dynamic); });

  AnyresTiling anyres = next_tiling();
  error_of(ErrorCode::kInvalidArgument, [&] { anyres_layout(5, 0, anyres, 24); });
  error_of(ErrorCode::kInvalidArgument, [&] { anyres_layout(5, 5, anyres, 0); });
  anyres.pinpoints.push_back({336, 700});
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { best_canvas(5, 5, anyres); }),
              HasSubstr("a canvas of 700 x 336 pixels; expected multiples of the tile's 336"));
  for (const std::array<int, 2> bad :
       {std::array{0, 336}, std::array{-336, 336}, std::array{336 * 1025, 336}}) {
    anyres.pinpoints = {bad};
    error_of(ErrorCode::kInvalidArgument, [&] { best_canvas(5, 5, anyres); });
  }
  anyres.pinpoints.clear();
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { best_canvas(5, 5, anyres); }),
              HasSubstr("image_grid_pinpoints"));
  error_of(ErrorCode::kInvalidArgument, [] {
    square_tile(Image{}, 28, {0, 0, 0}, Resample::kBicubic, kTorch);
  });
}

}  // namespace
}  // namespace kvlm
