#include "vision/position_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/values.h"
#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::error_of;
using ::testing::Each;
using ::testing::HasSubstr;

/// (output, input) weights of an axis, those of one sample added up.
std::vector<float> dense(const AxisTaps& axis, int input, int output) {
  std::vector<float> weights(static_cast<size_t>(input) * static_cast<size_t>(output));
  const auto taps = static_cast<size_t>(axis.taps);
  for (size_t i = 0; i < axis.indices.size(); ++i) {
    weights[i / taps * static_cast<size_t>(input) + static_cast<size_t>(axis.indices[i])] +=
        axis.weights[i];
  }
  return weights;
}

TEST(InterpolationAxis, TestVectors) {
  const AxisTaps axis = interpolation_axis(27, 14, Interpolation::kBilinear);
  ASSERT_EQ(axis.indices.size(), 28u);
  const auto expect = [&](size_t o, int index, float past) {
    EXPECT_EQ(axis.indices[2 * o], index);
    EXPECT_NEAR(axis.weights[2 * o + 1], past, 1e-6f) << o;
    EXPECT_NEAR(axis.weights[2 * o], 1 - past, 1e-6f) << o;
  };
  expect(0, 0, 0.4642857f);
  expect(1, 2, 0.3928571f);
  expect(2, 4, 0.3214286f);
  expect(6, 12, 0.0357143f);
  expect(13, 25, 0.5357143f);
}

TEST(InterpolationAxis, EqualsTorch) {
  for (auto& in : test::goldens("axis", "geometry.txt")) {
    std::string mode;
    size_t length, to_length;
    in >> mode >> length >> to_length;
    const std::vector<float> weights = dense(
        interpolation_axis(static_cast<int>(length), static_cast<int>(to_length),
                           mode == "bicubic" ? Interpolation::kBicubic : Interpolation::kBilinear),
        static_cast<int>(length), static_cast<int>(to_length));
    for (size_t i = 0; i < 8; ++i) {
      double value = 0;
      in >> value;
      ASSERT_TRUE(in);
      const float* row = weights.data() + (2 * i + 1) * to_length / 16 * length;
      double sum = 0;
      for (size_t k = 0; k < length; ++k) sum += row[k] * std::sin(static_cast<double>(k));
      // torch's positions are a float's rounding of `length` apart at worst.
      EXPECT_NEAR(sum, value, 1e-6 + 1e-7 * static_cast<double>(length)) << in.str();
    }
  }
}

TEST(InterpolationAxis, AnUnchangedLengthIsACopy) {
  for (const Interpolation mode : {Interpolation::kBilinear, Interpolation::kBicubic}) {
    for (const int length : {1, 2, 27, 1009}) {
      const std::vector<float> weights =
          dense(interpolation_axis(length, length, mode), length, length);
      for (size_t i = 0; i < weights.size(); ++i) {
        ASSERT_EQ(weights[i], i % (static_cast<size_t>(length) + 1) == 0 ? 1.0f : 0.0f);
      }
    }
  }
}

TEST(InterpolationAxis, WeightsOfASampleSumToOne) {
  for (const Interpolation mode : {Interpolation::kBilinear, Interpolation::kBicubic}) {
    for (const int from : {1, 2, 7, 32}) {
      for (const int to : {1, 3, 31, 64, 1000}) {
        const AxisTaps axis = interpolation_axis(from, to, mode);
        for (size_t i = 0; i < axis.weights.size(); i += static_cast<size_t>(axis.taps)) {
          float sum = 0;
          for (size_t t = 0; t < static_cast<size_t>(axis.taps); ++t) sum += axis.weights[i + t];
          EXPECT_NEAR(sum, 1, 2e-6f);
        }
      }
    }
  }
  error_of(ErrorCode::kInvalidArgument, [] { interpolation_axis(0, 4, Interpolation::kBilinear); });
  error_of(ErrorCode::kInvalidArgument,
           [] { interpolation_axis(4, 1 << 25, Interpolation::kBicubic); });
}

TEST(LearnedPositions, EqualTheReferenceBitForBit) {
  for (auto& in : test::goldens("learned", "geometry.txt")) {
    int side, merge;
    PatchGrid grid;
    std::string indices;
    in >> side >> grid.slices >> grid.rows >> grid.columns >> merge >> indices;
    const uint32_t weights = test::read_crc(in);
    const RowBlend blend = learned_positions(side, grid, merge);
    EXPECT_EQ(blend.rows(), static_cast<size_t>(grid.patches()));
    EXPECT_EQ(test::crc32(blend.indices.data(), blend.indices.size() * sizeof(int32_t)),
              std::stoul(indices, nullptr, 16))
        << in.str();
    EXPECT_EQ(test::crc32(blend.weights.data(), blend.weights.size() * sizeof(float)), weights)
        << in.str();
  }
}

TEST(LearnedPositions, AGridOfTheTablesSizeTakesTheTable) {
  const RowBlend blend = learned_positions(6, {2, 6, 6}, 2);
  const std::vector<int32_t> order = merge_block_order(6, 6, 2);
  for (size_t row = 0; row < blend.rows(); ++row) {
    EXPECT_EQ(blend.indices[4 * row], order[row % order.size()]);
    EXPECT_EQ(blend.weights[4 * row], 1);
    EXPECT_THAT(
        std::vector<float>(blend.weights.begin() + static_cast<std::ptrdiff_t>(4 * row) + 1,
                           blend.weights.begin() + static_cast<std::ptrdiff_t>(4 * row) + 4),
        Each(0.0f));
  }
  error_of(ErrorCode::kInvalidArgument, [] { learned_positions(0, {1, 2, 2}, 2); });
  error_of(ErrorCode::kInvalidArgument, [] { learned_positions(46341, {1, 2, 2}, 2); });
  error_of(ErrorCode::kInvalidArgument, [] { learned_positions(48, {1, 2, 3}, 2); });
}

/// By hand: 2 x 2 to 1 x 1 is the mean of bilinear, and of bicubic too, whose outer taps cancel.
TEST(ResamplePositions, WorkedExample) {
  const Tensor table = testing::make_tensor(DType::kF32, {4, 2}, {1, 10, 2, 20, 3, 30, 4, 40});
  for (const Interpolation mode : {Interpolation::kBilinear, Interpolation::kBicubic}) {
    const Tensor one = resample_positions(table, 2, 1, 1, mode);
    EXPECT_FLOAT_EQ(one.as<float>()[0], 2.5f);
    EXPECT_FLOAT_EQ(one.as<float>()[1], 25);
  }
  const Tensor same = resample_positions(table, 2, 2, 2, Interpolation::kBicubic);
  EXPECT_TRUE(testing::same_bits(same, table));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [&] { resample_positions(table, 3, 2, 2, Interpolation::kBicubic); }),
              HasSubstr("a table of 3 x 3 positions has a row for each"));
}

TEST(ResamplePositions, IsTheProductOfItsAxes) {
  const Tensor table = testing::normal_tensor(DType::kF32, {49, 3}, 5);
  for (const Interpolation mode : {Interpolation::kBilinear, Interpolation::kBicubic}) {
    const Tensor out = resample_positions(table, 7, 4, 11, mode);
    const std::vector<float> down = dense(interpolation_axis(7, 4, mode), 7, 4);
    const std::vector<float> across = dense(interpolation_axis(7, 11, mode), 7, 11);
    for (size_t row = 0; row < 4; ++row) {
      for (size_t column = 0; column < 11; ++column) {
        for (size_t channel = 0; channel < 3; ++channel) {
          double sum = 0;
          for (size_t y = 0; y < 7; ++y) {
            for (size_t x = 0; x < 7; ++x) {
              sum += static_cast<double>(down[row * 7 + y]) * across[column * 7 + x] *
                     table.as<float>()[(y * 7 + x) * 3 + channel];
            }
          }
          EXPECT_NEAR(out.as<float>()[(row * 11 + column) * 3 + channel], sum, 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
