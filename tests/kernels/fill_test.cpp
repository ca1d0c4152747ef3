#include "kernels/fill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::same_bits;
using testing::values_of;

Tensor filled(DType dtype, const Shape& shape, uint64_t seed, float width, int threads) {
  ThreadPool pool(threads);
  Stream stream(pool);
  Tensor out(dtype, shape);
  fill_random(out, seed, width, stream);
  return out;
}

/// Mean, variance and sixteen equal bins of the uniform distribution, within five standard
/// deviations of what as many draws give.
TEST(FillRandom, IsUniform) {
  constexpr int64_t kCount = 1 << 20;
  const double count = kCount;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    const auto values = values_of(filled(DType::kF32, {kCount}, seed, 2.0f, 2));
    double sum = 0;
    double squares = 0;
    std::array<double, 16> bins{};
    for (const double x : values) {
      ASSERT_GE(x, -2);
      ASSERT_LT(x, 2);
      sum += x;
      squares += x * x;
      bins[static_cast<size_t>((x + 2) * 4)] += 1;
    }
    const double variance = 4.0 / 3;
    EXPECT_NEAR(sum / count, 0, 5 * std::sqrt(variance / count));
    EXPECT_NEAR(squares / count, variance, 5 * std::sqrt((16.0 / 5 - variance * variance) / count));
    for (const double bin : bins) {
      EXPECT_NEAR(bin, count / 16, 5 * std::sqrt(count / 16 * 15 / 16)) << seed;
    }
  }
}

/// The reference's first outputs for seed 0 are known (Vigna's splitmix64.c): their upper 24 bits
/// are the steps.
TEST(FillRandom, FollowsSplitMix64) {
  constexpr std::array<uint64_t, 3> kReference = {0xe220a8397b1dcdafull, 0x6e789e6aa1b965f4ull,
                                                  0x06c45d188009454full};
  for (size_t i = 0; i < kReference.size(); ++i) {
    const double step = static_cast<double>(kReference[i] >> 40) - 0x1p23;
    EXPECT_EQ(static_cast<double>(random_value(0, i, 1.0f)), step * 0x1p-23) << i;
  }
}

TEST(FillRandom, RoundsToTheTypeAsked) {
  for (const float width : {1.0f, 0.01f, 1e-6f}) {
    const Tensor f32 = filled(DType::kF32, {1000}, 3, width, 1);
    const Tensor half = filled(DType::kF16, {1000}, 3, width, 1);
    const Tensor brain = filled(DType::kBF16, {1000}, 3, width, 1);
    for (int i = 0; i < 1000; ++i) {
      ASSERT_EQ(f32.as<float>()[i], random_value(3, static_cast<uint64_t>(i), width));
      ASSERT_EQ(half.as<f16>()[i].bits, to_f16(f32.as<float>()[i]).bits);
      ASSERT_EQ(brain.as<bf16>()[i].bits, to_bf16(f32.as<float>()[i]).bits);
    }
  }
}

/// Not of the threads, and not of the shape; of the seed.
TEST(FillRandom, DependsOnSeedAndPlaceAlone) {
  const Tensor one = filled(DType::kBF16, {100'003}, 7, 1.0f, 1);
  EXPECT_TRUE(same_bits(one.view(), filled(DType::kBF16, {100'003}, 7, 1.0f, 4).view()));
  const Tensor longer = filled(DType::kBF16, {2, 100'003}, 7, 1.0f, 2);
  EXPECT_TRUE(same_bits(one.view(), longer.view().slice(0, 1)));
  EXPECT_FALSE(same_bits(one.view(), filled(DType::kBF16, {100'003}, 8, 1.0f, 1).view()));
  std::set<float> first;
  for (uint64_t seed = 0; seed < 1000; ++seed) first.insert(random_value(seed, 0, 1.0f));
  EXPECT_GT(first.size(), 990u);
}

TEST(FillRandom, TakesNothingAndRefusesWhatItCannot) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor empty(DType::kF32, {0, 5});
  fill_random(empty, 1, 1.0f, stream);
  EXPECT_EQ(values_of(filled(DType::kF32, {3}, 1, 0.0f, 1)), (reference::Values{0, 0, 0}));
  const auto refused = [&](DType dtype, float width) {
    Tensor out(dtype, {4});
    return message_of(ErrorCode::kInvalidArgument, [&] { fill_random(out, 1, width, stream); });
  };
  EXPECT_THAT(refused(DType::kI32, 1), HasSubstr("fill_random: out holds i32"));
  EXPECT_THAT(refused(DType::kF32, -1), HasSubstr("width is -1"));
  EXPECT_THAT(refused(DType::kF32, std::nanf("")), HasSubstr("width is nan"));
  EXPECT_THAT(refused(DType::kF32, HUGE_VALF), HasSubstr("width is inf"));
}

}  // namespace
}  // namespace kvlm
