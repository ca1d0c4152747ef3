#include "kernels/tile_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::normal_tensor;

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

float at(ConstTensorView rows, int64_t row, int64_t column) {
  return rows.as<float>()[row * rows.shape()[1] + column];
}

TEST(PlaceTiles, AddsPositionsToClassTokenAndPatches) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t first : {0, 1}) {
    for (const int64_t tiles : {1, 3}) {
      for (const int64_t patches : {1, 9}) {
        for (const int64_t dim : {1, 7, 17}) {
          const int64_t in_tile = first + patches;
          const Tensor products = normal_tensor(DType::kF32, {tiles * patches, dim}, 1);
          const Tensor token = normal_tensor(DType::kF32, {1, dim}, 2);
          const Tensor positions = normal_tensor(DType::kF32, {in_tile, dim}, 3);
          Tensor x = normal_tensor(DType::kF32, {tiles * in_tile, dim}, 4);
          scatter_tiles(x, products, first > 0 ? token.view() : ConstTensorView(), positions,
                        stream);
          for (int64_t row = 0; row < tiles * in_tile; ++row) {
            const int64_t tile = row / in_tile;
            const int64_t in = row % in_tile;
            for (int64_t i = 0; i < dim; ++i) {
              const float put =
                  in < first ? at(token, 0, i) : at(products, tile * patches + in - first, i);
              ASSERT_EQ(at(x.view(), row, i), put + at(positions, in, i))
                  << first << ", " << tiles << " x " << patches << " x " << dim << " at " << row;
            }
          }
        }
      }
    }
  }
}

TEST(PlaceTiles, NoTilesAreNone) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor none(DType::kF32, {0, 4});
  scatter_tiles(none, Tensor(DType::kF32, {0, 4}), {}, normal_tensor(DType::kF32, {9, 4}, 1),
                stream);
}

TEST(PlaceTiles, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor patches = normal_tensor(DType::kF32, {18, 8}, 1);
  const Tensor token = normal_tensor(DType::kF32, {1, 8}, 2);
  const Tensor positions = normal_tensor(DType::kF32, {10, 8}, 3);
  Tensor x(DType::kF32, {20, 8});
  const auto refused = [&](TensorView to, ConstTensorView from, ConstTensorView with,
                           ConstTensorView where) {
    return message_of(kInvalid, [&] { scatter_tiles(to, from, with, where, stream); });
  };
  EXPECT_THAT(refused(x.view().slice(0, 19), patches, token, positions),
              HasSubstr("scatter_tiles: 19 rows are not whole tiles of 10 rows each"));
  EXPECT_THAT(refused(x, patches, token, positions.view().slice(0, 1)),
              HasSubstr("not whole tiles of 1 rows"));
  EXPECT_THAT(refused(x, patches.view().slice(0, 17), token, positions),
              HasSubstr("patches has shape (17, 8)"));
  EXPECT_THAT(refused(x, patches, {}, positions), HasSubstr("patches has shape (18, 8)"));
  EXPECT_THAT(refused(x, patches, normal_tensor(DType::kF32, {1, 7}, 1), positions),
              HasSubstr("class_token has shape (1, 7)"));
  EXPECT_THAT(refused(x, patches, token, normal_tensor(DType::kF32, {10, 7}, 1)),
              HasSubstr("class_token has shape (1, 8)"));
  EXPECT_THAT(refused(x, patches, {}, normal_tensor(DType::kF32, {10, 7}, 1)),
              HasSubstr("x has shape (20, 8)"));
  EXPECT_THAT(refused(x, Tensor(DType::kF16, {18, 8}), token, positions),
              HasSubstr("patches holds f16"));
  EXPECT_THAT(refused(x, x.view().slice(0, 18), token, positions), HasSubstr("overlap"));
}

TEST(TakeTiles, CopiesWhatIsNotSkippedIntoItsColumns) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t tiles : {1, 3}) {
    for (const int64_t in_tile : {1, 2, 10}) {
      for (int64_t skipped = 0; skipped <= std::min<int64_t>(in_tile, 2); ++skipped) {
        for (const int64_t dim : {1, 7, 17}) {
          for (const int64_t first : {0, 4}) {
            const int64_t kept = in_tile - skipped;
            const Tensor x = normal_tensor(DType::kF32, {tiles * in_tile, dim}, 1);
            Tensor y = normal_tensor(DType::kF32, {tiles * kept, first + dim + 3}, 2);
            const Tensor before = normal_tensor(DType::kF32, {tiles * kept, first + dim + 3}, 2);
            take_tiles(y, first, x, in_tile, skipped, stream);
            for (int64_t row = 0; row < tiles * kept; ++row) {
              const int64_t from = row / kept * in_tile + skipped + row % kept;
              for (int64_t i = 0; i < y.shape()[1]; ++i) {
                const bool taken = i >= first && i < first + dim;
                ASSERT_EQ(at(y.view(), row, i), taken ? at(x, from, i - first) : at(before, row, i))
                    << tiles << " x " << in_tile << " - " << skipped << " at " << row << ", " << i;
              }
            }
          }
        }
      }
    }
  }
}

TEST(TakeTiles, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {20, 8}, 1);
  Tensor y(DType::kF32, {18, 12});
  const auto refused = [&](TensorView to, int64_t first, int64_t in_tile, int64_t skipped) {
    return message_of(kInvalid, [&] { take_tiles(to, first, x, in_tile, skipped, stream); });
  };
  EXPECT_THAT(refused(y, 0, 9, 1),
              HasSubstr("take_tiles: 20 rows are not whole tiles of 9 rows each"));
  EXPECT_THAT(refused(y, 0, 0, 0), HasSubstr("not whole tiles of 0 rows"));
  EXPECT_THAT(refused(y, 0, 10, -1), HasSubstr("not whole tiles of 10 rows"));
  EXPECT_THAT(refused(y, 0, 10, 11), HasSubstr("not whole tiles of 10 rows"));
  EXPECT_THAT(refused(y, 0, 10, 0), HasSubstr("y has shape (18, 12)"));
  EXPECT_THAT(refused(y, 5, 10, 1),
              HasSubstr("8 columns do not fit into columns 5 on of (18, 12)"));
  EXPECT_THAT(refused(y, -1, 10, 1), HasSubstr("do not fit into columns -1"));
  Tensor halves(DType::kF16, {18, 12});
  EXPECT_THAT(refused(halves, 0, 10, 1), HasSubstr("y holds f16"));
}

}  // namespace
}  // namespace kvlm
