#include "vision/feature_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "kernels/blend_rows.h"
#include "tests/kernels/values.h"
#include "tests/vision/test_images.h"
#include "vision/position_table.h"

namespace kvlm {
namespace {

using test::error_of;

TEST(ResampleMap, AveragesAHalvedMap) {
  // 4 x 2 numbered row-major to 2 x 1: the mean of each square.
  const RowBlend blend = resample_map(4, 2, 2, 1);
  ASSERT_EQ(blend.rows(), 2u);
  EXPECT_THAT(blend.indices, ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(blend.weights, ::testing::Each(0.25f));
}

TEST(ResampleMap, OfAClipsFrame) {
  const RowBlend blend = resample_map(27, 27, 14, 14);
  EXPECT_EQ(blend.rows(), 196u);
  // The last row and column: 25 and 26 with 0.5357143.
  const size_t last = 195 * 4;
  EXPECT_EQ(blend.indices[last], 25 * 27 + 25);
  EXPECT_EQ(blend.indices[last + 3], 26 * 27 + 26);
  EXPECT_NEAR(blend.weights[last + 3], 0.5357143f * 0.5357143f, 1e-6f);
  EXPECT_NEAR(blend.weights[last + 1], 0.4642857f * 0.5357143f, 1e-6f);
}

/// Whatever the size, the rows that are made are those that were counted, newlines end the rows of
/// the map, and what lies in the middle of a token comes from the right place.
TEST(PackAnyres, FollowsTheLayout) {
  AnyresTiling tiling{20, {}, 0};
  for (int rows = 1; rows <= 4; ++rows) {
    for (int columns = 1; columns <= 4; ++columns)
      tiling.pinpoints.push_back({20 * rows, 20 * columns});
  }
  constexpr int kSide = 5;
  for (const int max_tiles : {0, 2, 9}) {
    tiling.max_tiles = max_tiles;
    for (const int height : {1, 2, 19, 20, 21, 53, 83, 200, 1009}) {
      for (const int width : {1, 3, 20, 39, 41, 97, 160, 997}) {
        const AnyresLayout layout = anyres_layout(height, width, tiling, kSide);
        const RowBlend blend = pack_anyres(layout);
        ASSERT_EQ(blend.rows(), static_cast<size_t>(layout.tokens())) << height << " x " << width;
        ASSERT_EQ(blend.weights.size(), blend.indices.size());

        // Features that say where on the canvas their patch is.
        const int64_t features = int64_t{layout.tiles()} * kSide * kSide;
        Tensor x(DType::kF32, {features + 1, 2});
        for (int64_t i = 0; i < features; ++i) {
          const int64_t tile = i / (kSide * kSide) - 1;
          const int64_t row = i / kSide % kSide;
          const int64_t column = i % kSide;
          float* to = x.as<float>() + 2 * i;
          to[0] = tile < 0 ? -1.0f : static_cast<float>(tile / layout.grid.columns * kSide + row);
          to[1] = tile < 0 ? static_cast<float>(i)
                           : static_cast<float>(tile % layout.grid.columns * kSide + column);
        }
        x.as<float>()[2 * features] = x.as<float>()[2 * features + 1] = 1e6f;
        ThreadPool pool(1);
        Stream stream(pool);
        Tensor y(DType::kF32, {layout.tokens(), 2});
        blend_rows(y, x, blend, stream);

        const float* at = y.as<float>();
        for (int i = 0; i < kSide * kSide; ++i, at += 2) {
          ASSERT_EQ(at[0], -1);
          ASSERT_EQ(at[1], static_cast<float>(i));
        }
        // Bilinear interpolation of a coordinate is the coordinate, but at the rim.
        const auto place = [](int first, int i, int from, int to) {
          const double middle = (i + 0.5) * from / to - 0.5;
          return first + std::clamp(middle, 0.0, from - 1.0);
        };
        for (int row = 0; row < layout.rows; ++row) {
          for (int column = 0; column < layout.columns; ++column, at += 2) {
            ASSERT_NEAR(at[0], place(layout.first_row, row, layout.map_rows, layout.rows), 1e-4);
            ASSERT_NEAR(at[1],
                        place(layout.first_column, column, layout.map_columns, layout.columns),
                        1e-4);
          }
          ASSERT_EQ(at[0], 1e6f);
          at += 2;
        }
      }
    }
  }
}

TEST(PackAnyres, RefusesMoreFeaturesThanItCanNumber) {
  AnyresLayout layout;
  layout.grid = {32, 32};
  layout.tile_patches = 4096;
  error_of(ErrorCode::kInvalidArgument, [&] { pack_anyres(layout); });
}

}  // namespace
}  // namespace kvlm
