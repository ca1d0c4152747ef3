#include "kernels/hadamard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/base/error.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

std::vector<float> turned(std::vector<float> x, int64_t dim, int threads = 1) {
  ThreadPool pool(threads);
  Stream stream(pool);
  const TensorView view(x.data(), DType::kF32, {static_cast<int64_t>(x.size()) / dim, dim});
  const HadamardRows rows{view, view};
  hadamard({&rows, 1}, stream);
  return x;
}

/// Entry (i, j) of Sylvester's matrix is -1 to the number of digits that i and j have in common.
double entry(size_t i, size_t j) { return std::popcount(i & j) % 2 == 0 ? 1 : -1; }

TEST(Hadamard, OfFourNumbers) {
  EXPECT_THAT(turned({1, 2, 3, 4}, 4), ElementsAre(5, -1, -2, 0));
  EXPECT_THAT(turned({1, 0, 0, 0, 0, 0, 0, 8}, 4),
              ElementsAre(0.5f, 0.5f, 0.5f, 0.5f, 4, -4, -4, 4));
  EXPECT_THAT(turned({3, -7}, 1), ElementsAre(3, -7));
}

/// Seven is four, two and one.
TEST(Hadamard, OfNoPowerOfTwoIsOfItsPowers) {
  const float root = std::sqrt(0.5f);
  EXPECT_THAT(turned({1, 2, 3, 4, 6, 2, 9}, 7),
              Pointwise(FloatNear(1e-6f), {5.0f, -1.0f, -2.0f, 0.0f, 8 * root, 4 * root, 9.0f}));
}

TEST(Hadamard, EqualsTheMatrix) {
  for (const size_t dim : {2, 8, 64, 128, 256, 1024}) {
    const std::vector<float> x = testing::normal_values(3 * dim, 5);
    const std::vector<float> y = turned(x, static_cast<int64_t>(dim), 2);
    for (size_t i = 0; i < x.size(); ++i) {
      double sum = 0;
      for (size_t j = 0; j < dim; ++j) {
        sum += entry(i % dim, j) * static_cast<double>(x[i / dim * dim + j]);
      }
      ASSERT_NEAR(y[i], sum / std::sqrt(static_cast<double>(dim)), 1e-5) << dim << ", " << i;
    }
  }
}

TEST(Hadamard, KeepsProductsAndUndoesItself) {
  for (const int64_t dim : {1, 3, 16, 20, 72, 80, 96, 128}) {
    const std::vector<float> q = testing::normal_values(static_cast<size_t>(dim), 1);
    const std::vector<float> k = testing::normal_values(static_cast<size_t>(dim), 2);
    const std::vector<float> turned_q = turned(q, dim);
    const std::vector<float> turned_k = turned(k, dim);
    double product = 0;
    double of_turned = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      product += static_cast<double>(q[i]) * static_cast<double>(k[i]);
      of_turned += static_cast<double>(turned_q[i]) * static_cast<double>(turned_k[i]);
    }
    EXPECT_NEAR(product, of_turned, 1e-5 * static_cast<double>(dim)) << dim;
    EXPECT_THAT(turned(turned_k, dim), Pointwise(FloatNear(1e-5f), k)) << dim;
  }
}

TEST(Hadamard, TensorsOfACallAreTurnedEach) {
  ThreadPool pool(2);
  Stream stream(pool);
  const Tensor q = testing::normal_tensor(DType::kF32, {5, 6, 20}, 3);
  const Tensor k = testing::normal_tensor(DType::kF32, {5, 2, 20}, 4);
  Tensor to_q(DType::kF32, q.shape());
  Tensor to_k(DType::kF32, k.shape());
  const Tensor none(DType::kF32, {0, 2, 20});
  Tensor to_none(DType::kF32, none.shape());
  const HadamardRows rows[] = {{q, to_q}, {none, to_none}, {k, to_k}};
  hadamard(rows, stream);
  const auto values = [](const Tensor& x) {
    return std::vector<float>(x.as<float>(), x.as<float>() + x.shape().elements());
  };
  EXPECT_EQ(values(to_q), turned(values(q), 20));
  EXPECT_EQ(values(to_k), turned(values(k), 20));
}

TEST(Hadamard, RefusesWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = testing::normal_tensor(DType::kF32, {2, 8}, 3);
  Tensor narrow(DType::kF32, {2, 4});
  Tensor wide(DType::kF32, {1, 4096});
  Tensor half(DType::kF16, {2, 8});
  const auto refused = [&](ConstTensorView from, TensorView to) {
    const HadamardRows rows{from, to};
    EXPECT_THROW(hadamard({&rows, 1}, stream), Error);
  };
  refused(x, narrow);
  refused(wide, wide);
  refused(x, half);
  refused(half, half);
  Tensor two(DType::kF32, {3, 8});
  refused(two.view().slice(0, 2), two.view().slice(1, 2));
  Tensor like(DType::kF32, {2, 8});
  const HadamardRows unlike[] = {{x, like}, {narrow, narrow}};
  EXPECT_THROW(hadamard(unlike, stream), Error);
}

}  // namespace
}  // namespace kvlm
