#include "vision/patch_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::crc32;
using test::error_of;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

uint32_t crc_of(const std::vector<int32_t>& values) {
  return crc32(values.data(), values.size() * sizeof(int32_t));
}

TEST(PatchPlaces, GoBlockByBlock) {
  EXPECT_THAT(patch_places({1, 2, 4}, 2),
              ElementsAre(std::array{0, 0}, std::array{0, 1}, std::array{1, 0}, std::array{1, 1},
                          std::array{0, 2}, std::array{0, 3}, std::array{1, 2}, std::array{1, 3}));
  // A second slice begins anew; without merging they are in raster order.
  EXPECT_THAT(patch_places({2, 1, 2}, 1),
              ElementsAre(std::array{0, 0}, std::array{0, 1}, std::array{0, 0}, std::array{0, 1}));
}

TEST(PatchPlaces, AreEveryPatchOnceASlice) {
  for (const PatchGrid& grid : {PatchGrid{1, 1, 1}, PatchGrid{3, 1, 1}, PatchGrid{2, 6, 12},
                                PatchGrid{1, 118, 92}, PatchGrid{1, 30, 6}}) {
    for (const int merge : {1, 2, 3}) {
      if (grid.rows % merge != 0 || grid.columns % merge != 0) continue;
      auto places = patch_places(grid, merge);
      ASSERT_EQ(places.size(), static_cast<size_t>(grid.patches()));
      const std::vector<int32_t> order = merge_block_order(grid.rows, grid.columns, merge);
      for (size_t i = 0; i < places.size(); ++i) {
        EXPECT_EQ(places[i][0] * grid.columns + places[i][1], order[i % order.size()]);
      }
      EXPECT_EQ(grid.cells(merge) * merge * merge, grid.patches());
      const std::vector<int32_t> back = inverse_order(order);
      for (size_t i = 0; i < order.size(); ++i) {
        EXPECT_EQ(back[static_cast<size_t>(order[i])], static_cast<int32_t>(i));
      }
    }
  }
}

TEST(MergeBlockOrder, IsThePixelShuffle) {
  EXPECT_THAT(merge_block_order(4, 4, 2),
              ElementsAre(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  EXPECT_THAT(merge_block_order(4, 4, 2, /*columns_first=*/true),
              ElementsAre(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  // Where there are more cells across than down.
  EXPECT_THAT(merge_block_order(2, 6, 2, /*columns_first=*/true), merge_block_order(2, 6, 2));
  EXPECT_THAT(merge_block_order(2, 3, 1, /*columns_first=*/true), ElementsAre(0, 3, 1, 4, 2, 5));
}

TEST(PatchOrder, RefusesWhatCannotBeMerged) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] {
                         patch_places({1, 4, 5}, 2);
                       }),
              HasSubstr("1 x 4 x 5 patches cannot be merged by 2 x 2"));
  for (const PatchGrid& grid :
       {PatchGrid{0, 2, 2}, PatchGrid{1, -2, 2}, PatchGrid{1, 2, 0}, PatchGrid{1, 3, 2}}) {
    error_of(ErrorCode::kInvalidArgument, [&] { patch_places(grid, 2); });
    error_of(ErrorCode::kInvalidArgument, [&] { window_order({{grid}}, 2, 4); });
  }
  error_of(ErrorCode::kInvalidArgument, [] { merge_block_order(4, 4, 0); });
  error_of(ErrorCode::kInvalidArgument, [] { check_merge({1 << 20, 1 << 10, 2}, 1); });
  error_of(ErrorCode::kInvalidArgument, [] { check_merge({1, 1 << 16, 1 << 16}, 1); });
  const std::vector<PatchGrid> three(3, {1, 1 << 15, 1 << 15});
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { slice_bounds(three); }),
              HasSubstr("encode fewer at once"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] {
                         window_order({{{1, 4, 4}}}, 2, 0);
                       }),
              HasSubstr("window_size"));
}

TEST(WindowOrder, WorkedExamples) {
  const PatchGrid picture{1, 12, 20};
  WindowOrder order = window_order({{picture}}, 2, 4);
  EXPECT_THAT(order.cells,
              ElementsAreArray({0,  1,  2,  3,  10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32,
                                33, 4,  5,  6,  7,  14, 15, 16, 17, 24, 25, 26, 27, 34, 35,
                                36, 37, 8,  9,  18, 19, 28, 29, 38, 39, 40, 41, 42, 43, 50,
                                51, 52, 53, 44, 45, 46, 47, 54, 55, 56, 57, 48, 49, 58, 59}));
  EXPECT_THAT(order.bounds, ElementsAre(0, 64, 128, 160, 192, 224, 240));
  EXPECT_THAT(slice_bounds({{picture}}), ElementsAre(0, 240));

  const PatchGrid clip{2, 8, 12};
  order = window_order({{clip}}, 2, 4);
  EXPECT_THAT(order.bounds, ElementsAre(0, 64, 96, 160, 192));
  EXPECT_THAT(slice_bounds({{clip}}), ElementsAre(0, 96, 192));

  // Together, the second after the first.
  const WindowOrder both = window_order({{picture, clip}}, 2, 4);
  EXPECT_THAT(both.bounds, ElementsAre(0, 64, 128, 160, 192, 224, 240, 304, 336, 400, 432));
  for (size_t i = 0; i < order.cells.size(); ++i) {
    EXPECT_EQ(both.cells[60 + i], 60 + order.cells[i]);
  }
  EXPECT_THAT(slice_bounds({{picture, clip}}), ElementsAre(0, 240, 336, 432));
}

TEST(WindowOrder, EqualsTheReference) {
  for (auto& in : test::goldens("windows", "geometry.txt")) {
    PatchGrid grid;
    int merge, window, patch;
    in >> grid.slices >> grid.rows >> grid.columns >> merge >> window >> patch;
    std::string cells;
    in >> cells;
    const uint32_t bounds = test::read_crc(in);
    const WindowOrder order = window_order({{grid}}, merge, window / merge / patch);
    EXPECT_EQ(crc_of(order.cells), std::stoul(cells, nullptr, 16)) << in.str();
    EXPECT_EQ(crc_of(order.bounds), bounds) << in.str();
  }
}

TEST(WindowOrder, KeepsSlicesTogetherAndWindowsFull) {
  for (const PatchGrid& grid : {PatchGrid{1, 2, 2}, PatchGrid{3, 2, 26}, PatchGrid{2, 46, 34}}) {
    for (const int side : {1, 3, 4, 100}) {
      const WindowOrder order = window_order({{grid}}, 2, side);
      const int32_t slice = grid.rows * grid.columns / 4;
      std::vector<int32_t> sorted = order.cells;
      std::ranges::sort(sorted);
      std::vector<int32_t> all(static_cast<size_t>(grid.cells(2)));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(sorted, all);
      for (size_t i = 0; i < order.cells.size(); ++i) {
        EXPECT_EQ(order.cells[i] / slice, static_cast<int32_t>(i) / slice);
      }
      EXPECT_EQ(order.bounds.back(), grid.patches());
      for (size_t i = 1; i < order.bounds.size(); ++i) {
        const int32_t cells = (order.bounds[i] - order.bounds[i - 1]) / 4;
        EXPECT_GT(cells, 0);
        EXPECT_LE(cells, side * side);
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
