// Products of matrices in memory against sums in double, on every instruction set.

#include "kernels/cpu/matmul.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <vector>

#include "tests/kernels/values.h"

namespace kvlm::cpu {
namespace {

using kvlm::testing::normal_tensor;
using kvlm::testing::values_of;

class Multiply : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

/// The product of x (rows, in) and w (out, in).
std::vector<float> product(const Tensor& x, const Tensor& w, int64_t rows) {
  const auto in = static_cast<size_t>(x.shape()[1]);
  const auto out = static_cast<size_t>(w.shape()[0]);
  std::vector<float> y(static_cast<size_t>(rows) * out, NAN);
  multiply({y.data(), out}, {x.as<float>(), in}, {w.view().data(), w.dtype(), in},
           static_cast<size_t>(rows), out, in, false);
  return y;
}

TEST_P(Multiply, EqualsSumsInDouble) {
  uint32_t seed = 1;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t in : {1, 3, 40, 257, 600}) {
      for (const int64_t out : {1, 5, 31, 33, 70}) {
        const Tensor x = normal_tensor(DType::kF32, {25, in}, ++seed);
        const Tensor w = normal_tensor(dtype, {out, in}, ++seed);
        const std::vector<float> y = product(x, w, 25);
        const auto a = values_of(x);
        const auto b = values_of(w);
        for (size_t i = 0; i < y.size(); ++i) {
          const size_t row = i / static_cast<size_t>(out) * static_cast<size_t>(in);
          const size_t output = i % static_cast<size_t>(out) * static_cast<size_t>(in);
          double sum = 0;
          double size = 0;
          for (size_t k = 0; k < static_cast<size_t>(in); ++k) {
            sum += a[row + k] * b[output + k];
            size += std::fabs(a[row + k] * b[output + k]);
          }
          ASSERT_NEAR(y[i], sum, 2e-6 * size) << in << " " << out << " " << i;
        }
      }
    }
  }
}

/// The bits of a row depend neither on the number of rows nor on that of outputs.
TEST_P(Multiply, ARowDependsOnNothingElse) {
  const Tensor x = normal_tensor(DType::kF32, {40, 300}, 1);
  const Tensor w = normal_tensor(DType::kBF16, {50, 300}, 2);
  const std::vector<float> all = product(x, w, 40);
  for (const int64_t rows : {1, 2, 7, 12, 13, 39}) {
    const std::vector<float> some = product(x, w, rows);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << rows;
  }
  const Tensor one = normal_tensor(DType::kBF16, {1, 300}, 2);  // its first output
  const std::vector<float> alone = product(x, one, 40);
  for (size_t row = 0; row < 40; ++row) EXPECT_EQ(alone[row], all[row * 50]);
}

TEST_P(Multiply, AddsAndKeepsWhatIsBetweenRows) {
  const Tensor x = normal_tensor(DType::kF32, {9, 64}, 1);
  const Tensor w = normal_tensor(DType::kF32, {11, 64}, 2);
  const std::vector<float> once = product(x, w, 9);
  std::vector<float> y(9 * 20, 7.0f);
  const auto run = [&](bool add) {
    multiply({y.data(), 20}, {x.as<float>(), 64}, {w.as<float>(), 64}, 9, 11, 64, add);
  };
  run(false);
  run(true);
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_EQ(y[i], i % 20 < 11 ? 2 * once[i / 20 * 11 + i % 20] : 7.0f) << i;
  }
  multiply({y.data(), 20}, {x.as<float>(), 64}, {w.as<float>(), 64}, 9, 11, 0, false);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[11], 7.0f);
}

TEST_P(Multiply, InfinitiesStayInTheirOutputs) {
  Tensor x = normal_tensor(DType::kF32, {3, 8}, 1);
  Tensor w = normal_tensor(DType::kF32, {5, 8}, 2);
  w.as<float>()[2 * 8 + 3] = INFINITY;
  const std::vector<float> y = product(x, w, 3);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isfinite(y[i]), i % 5 != 2) << i;
}

INSTANTIATE_TEST_SUITE_P(Targets, Multiply,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

}  // namespace
}  // namespace kvlm::cpu
