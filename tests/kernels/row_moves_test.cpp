#include "kernels/row_moves.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/base/error.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

/// Closing a gap in a ring is erasing from a list, from whichever side rows move.
TEST(CloseGaps, EqualsErasingFromAList) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int width : {1, 3, 64}) {
    for (const int places : {1, 2, 7, 40}) {
      for (int first = 0; first < places; first += 3) {
        for (int rows = 1; rows <= places; rows += 2) {
          for (int gap = 0; gap < rows; ++gap) {
            for (const bool from_front : {false, true}) {
              std::vector<float> ring(static_cast<size_t>(places * width), -1);
              std::vector<int> list(static_cast<size_t>(rows));
              std::iota(list.begin(), list.end(), 0);
              const auto at = [&](int begin, int row, int i) -> float& {
                return ring[static_cast<size_t>((begin + row) % places * width + i)];
              };
              for (int row = 0; row < rows; ++row) {
                for (int i = 0; i < width; ++i) at(first, row, i) = static_cast<float>(row);
              }
              list.erase(list.begin() + gap);
              const RowGap one{reinterpret_cast<std::byte*>(ring.data()),
                               static_cast<size_t>(width) * sizeof(float),
                               places,
                               first,
                               rows,
                               gap,
                               from_front};
              close_gaps({&one, 1}, stream);
              for (int row = 0; row + 1 < rows; ++row) {
                for (int i = 0; i < width; ++i) {
                  ASSERT_EQ(at(first + (from_front ? 1 : 0), row, i),
                            static_cast<float>(list[static_cast<size_t>(row)]))
                      << places << " places from " << first << ", row " << gap << " of " << rows;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(CloseGaps, RefusesARowThatIsNotThere) {
  ThreadPool pool(1);
  Stream stream(pool);
  float ring[4] = {};
  RowGap gap{reinterpret_cast<std::byte*>(ring), sizeof(float), 4, 0, 3, 3, false};
  EXPECT_THAT(testing::message_of(ErrorCode::kInvalidArgument,
                                  [&] {
                                    close_gaps({&gap, 1}, stream);
                                  }),
              ::testing::HasSubstr("row 3 of 3"));
}

TEST(ListedRows, AreGathered) {
  ThreadPool pool(2);
  Stream stream(pool);
  constexpr int kDim = 5;
  std::vector<f16> rows(40 * kDim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = to_f16(static_cast<float>(i));
  const auto at = [&](int row) {
    return reinterpret_cast<const std::byte*>(rows.data() + row * kDim);
  };
  const std::vector<int32_t> numbers{3, 7, 8, 9, 30, 29, 39, 0};
  std::vector<float> wide(numbers.size() * kDim, -1);
  std::vector<f16> same(3 * kDim);
  const auto bytes = [](auto& of) { return reinterpret_cast<std::byte*>(of.data()); };
  const ListedRows all{at(0), bytes(wide), numbers};
  const ListedRows none{at(0), bytes(wide), {}};
  gather_listed(std::vector<ListedRows>{none, all}, DType::kF16, kDim, DType::kF32, stream);
  const ListedRows from_five{at(5), bytes(same), std::span(numbers).subspan(1, 3)};
  gather_listed({&from_five, 1}, DType::kF16, kDim, DType::kF16, stream);
  for (size_t i = 0; i < numbers.size(); ++i) {
    for (int j = 0; j < kDim; ++j) {
      EXPECT_EQ(wide[i * kDim + static_cast<size_t>(j)], static_cast<float>(numbers[i] * kDim + j));
    }
  }
  for (int j = 0; j < 3 * kDim; ++j) {
    EXPECT_EQ(to_float(same[static_cast<size_t>(j)]), static_cast<float>((5 + 7) * kDim + j));
  }
  ListedRows nowhere = all;
  nowhere.to = nullptr;
  EXPECT_THROW(gather_listed({&nowhere, 1}, DType::kF16, kDim, DType::kF16, stream), Error);
  EXPECT_THROW(gather_listed({&all, 1}, DType::kF16, kDim, DType::kBF16, stream), Error);
}

TEST(ByteRanges, AreCopied) {
  ThreadPool pool(2);
  Stream stream(pool);
  std::vector<uint8_t> from(100);
  std::iota(from.begin(), from.end(), uint8_t{0});
  std::vector<uint8_t> to(100, 255);
  const auto* bytes = reinterpret_cast<const std::byte*>(from.data());
  auto* target = reinterpret_cast<std::byte*>(to.data());
  copy_ranges(
      std::vector<ByteRange>{
          {bytes + 1, target + 50, 7}, {bytes + 9, target, 0}, {bytes + 90, target + 10, 10}},
      stream);
  std::vector<uint8_t> expected(100, 255);
  std::copy_n(from.begin() + 1, 7, expected.begin() + 50);
  std::copy_n(from.begin() + 90, 10, expected.begin() + 10);
  EXPECT_EQ(to, expected);
  EXPECT_THROW(copy_ranges(std::vector<ByteRange>{{nullptr, target, 1}}, stream), Error);
}

/// Turning by one angle after the other is turning by their sum, and keeps lengths.
TEST(TurnRows, RotatesPairsOfHalves) {
  ThreadPool pool(1);
  Stream stream(pool);
  const std::vector<float> frequencies{1.0f, 0.25f};
  const std::vector<float> x{1, 2, 3, 4, 9};
  std::vector<float> turned(5, 7);
  const TurnedRow row{x.data(), reinterpret_cast<std::byte*>(turned.data())};
  turn_rows({&row, 1}, DType::kF32, frequencies, 2, stream);
  EXPECT_NEAR(turned[0], std::cos(2.0) - 3 * std::sin(2.0), 1e-6);
  EXPECT_NEAR(turned[2], 3 * std::cos(2.0) + std::sin(2.0), 1e-6);
  EXPECT_NEAR(turned[1], 2 * std::cos(0.5) - 4 * std::sin(0.5), 1e-6);
  EXPECT_NEAR(turned[3], 4 * std::cos(0.5) + 2 * std::sin(0.5), 1e-6);
  EXPECT_EQ(turned[4], 7);  // beyond the halves
}

}  // namespace
}  // namespace kvlm
