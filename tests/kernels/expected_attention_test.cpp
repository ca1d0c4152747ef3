#include "kernels/expected_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "kernels/base/error.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using kvlm::testing::make_tensor;
using kvlm::testing::message_of;
using kvlm::testing::normal_tensor;
using kvlm::testing::values_of;
using ::testing::HasSubstr;

constexpr float kQuarter = std::numbers::pi_v<float> / 2;

class ExpectedAttention : public ::testing::Test {
 protected:
  std::vector<double> weights_of(const FutureQueries& future, const Tensor& q,
                                 const std::vector<Tensor>& keys) {
    std::vector<StoredRows> heads;
    for (const Tensor& rows : keys) {
      heads.push_back({rows.view().data(), rows.dtype(), rows.shape()[0]});
    }
    std::vector<double> weights(keys.size() * static_cast<size_t>(q.shape()[0]));
    expected_attention(future, q, heads, weights, stream_);
    return weights;
  }
  /// Of one head with two keys: exp of the difference of what softmax takes of them.
  double ratio(const FutureQueries& future, const std::vector<float>& q,
               const std::vector<float>& k) {
    std::vector<Tensor> keys;
    keys.push_back(make_tensor(DType::kF32, {2, 2}, k));
    const std::vector<double> found =
        weights_of(future, make_tensor(DType::kF32, {2, 1, 2}, q), keys);
    EXPECT_NEAR(found[0] + found[1], 1, 1e-12);
    return found[1] / found[0];
  }

  ThreadPool pool_{3};
  Stream stream_{pool_};
};

/// Queries (1, 0) and (3, 0) have the mean (2, 0) and the covariance 1 in the first channel: a key
/// (1, 0) has 2 + 1/2, a key (0, 1) nothing.
TEST_F(ExpectedAttention, OfNormalQueries) {
  const std::vector<float> q = {1, 0, 3, 0};
  const std::vector<float> k = {0, 1, 1, 0};
  EXPECT_NEAR(ratio({}, q, k), std::exp(2.5), 1e-5);
  EXPECT_NEAR(ratio({.covariance = false}, q, k), std::exp(2.0), 1e-5);
  EXPECT_NEAR(ratio({.scale = 0.5f}, q, k), std::exp(1.125), 1e-5);
}

/// The first row left out: the queries are (1, 0) and (3, 0) again, and its key gets nothing.
TEST_F(ExpectedAttention, LeavesOutTheFirstRows) {
  std::vector<Tensor> keys;
  keys.push_back(make_tensor(DType::kF32, {3, 2}, {9, 9, 0, 1, 1, 0}));
  const std::vector<double> found =
      weights_of({.first_row = 1}, make_tensor(DType::kF32, {3, 1, 2}, {50, -7, 1, 0, 3, 0}), keys);
  EXPECT_EQ(found[0], 0);
  EXPECT_NEAR(found[1], 1 / (1 + std::exp(2.5)), 1e-7);
  EXPECT_NEAR(found[2], std::exp(2.5) / (1 + std::exp(2.5)), 1e-7);
}

/// The same queries after RoPE, a quarter turn a position: (1, 0) and (0, 3). The one position
/// behind the prompt is half a turn away: the mean becomes (-2, 0).
TEST_F(ExpectedAttention, TurnsQueriesToThePositionsToCome) {
  const std::vector<float> turn = {kQuarter};
  const std::vector<float> q = {1, 0, 0, 3};
  EXPECT_NEAR(ratio({.positions = 1, .frequencies = turn}, q, {0, 1, 1, 0}), std::exp(-1.5), 1e-5);
  // Two positions, half a turn and three quarters: R has -1/2 for cosine and sine, the mean becomes
  // (-1, -1), the covariance 1/4 everywhere.
  const FutureQueries two{.positions = 2, .frequencies = turn};
  EXPECT_NEAR(ratio(two, q, {0, 1, 1, 0}), 1, 1e-5);
  EXPECT_NEAR(ratio(two, q, {0, 1, 1, 1}), std::exp(-1.5 + 0.875), 1e-5);
  EXPECT_NEAR(ratio({.positions = 2, .covariance = false, .frequencies = turn}, q, {0, 1, 1, 1}),
              std::exp(-1.0), 1e-5);
}

/// Two query heads of one kv_head: the mean of their softmaxes.
TEST_F(ExpectedAttention, IsTheMeanOverQueryHeads) {
  const Tensor q = make_tensor(DType::kF32, {2, 2, 1}, {2, -1, 2, -1});
  std::vector<Tensor> keys;
  keys.push_back(make_tensor(DType::kF32, {2, 1}, {0, 1}));
  const std::vector<double> found = weights_of({}, q, keys);
  const auto share = [](double x) { return std::exp(x) / (1 + std::exp(x)); };
  EXPECT_NEAR(found[1], (share(2) + share(-1)) / 2, 1e-6);
}

/// Rows of several tiles, several heads, rotated channels and others, against plain sums.
TEST_F(ExpectedAttention, EqualsPlainSums) {
  constexpr size_t kRows = 150;
  constexpr size_t kHeads = 2;
  constexpr size_t kPerHead = 3;
  constexpr size_t kDim = 10;
  constexpr size_t kHalf = 3;
  const std::vector<float> frequencies = {1, 0.3f, 0.01f};
  const FutureQueries future{
      .first_row = 4, .positions = 20, .scale = 0.3f, .frequencies = frequencies};
  const Tensor q = normal_tensor(DType::kF32, {kRows, kHeads * kPerHead, kDim}, 1);
  std::vector<Tensor> keys;
  for (uint32_t h = 0; h < kHeads; ++h) {
    keys.push_back(normal_tensor(DType::kF16, {kRows, kDim}, h + 2));
  }
  const std::vector<double> found = weights_of(future, q, keys);
  const auto queries = values_of(q);
  const auto rotated = [&](std::vector<double> x, double position) {
    const std::vector<double> from = x;
    for (size_t f = 0; f < kHalf; ++f) {
      const double angle = position * static_cast<double>(frequencies[f]);
      x[f] = std::cos(angle) * from[f] - std::sin(angle) * from[f + kHalf];
      x[f + kHalf] = std::cos(angle) * from[f + kHalf] + std::sin(angle) * from[f];
    }
    return x;
  };
  const auto ahead = [&](const std::vector<double>& x) {  // R x
    std::vector<double> mean(kDim);
    for (int p = 0; p < future.positions; ++p) {
      const std::vector<double> turned = rotated(x, static_cast<double>(kRows) + p);
      for (size_t c = 0; c < kDim; ++c) mean[c] += turned[c] / future.positions;
    }
    return mean;
  };
  constexpr double kCount = kRows - 4;
  for (size_t h = 0; h < kHeads; ++h) {
    const auto k = values_of(keys[h]);
    std::vector<double> expected(kRows);
    for (size_t head = h * kPerHead; head < (h + 1) * kPerHead; ++head) {
      std::vector<std::vector<double>> rows;
      std::vector<double> mean(kDim);
      for (size_t i = 4; i < kRows; ++i) {
        const auto first =
            queries.begin() + static_cast<std::ptrdiff_t>((i * kHeads * kPerHead + head) * kDim);
        rows.push_back(ahead(rotated({first, first + kDim}, -static_cast<double>(i))));
        for (size_t c = 0; c < kDim; ++c) mean[c] += rows.back()[c] / kCount;
      }
      std::vector<double> logits(kRows);
      for (size_t j = 0; j < kRows; ++j) {
        double first = 0;
        for (size_t c = 0; c < kDim; ++c) first += mean[c] * k[j * kDim + c];
        double second = 0;  // k^T Sigma k is the variance of q . k
        for (const auto& row : rows) {
          double product = 0;
          for (size_t c = 0; c < kDim; ++c) product += row[c] * k[j * kDim + c];
          second += (product - first) * (product - first) / kCount;
        }
        logits[j] = j < 4 ? 0 : std::exp(0.3 * first + 0.09 / 2 * second);
      }
      const double sum = std::accumulate(logits.begin(), logits.end(), 0.0);
      for (size_t j = 0; j < kRows; ++j) expected[j] += logits[j] / sum / kPerHead;
    }
    for (size_t j = 0; j < kRows; ++j) {
      EXPECT_NEAR(found[h * kRows + j], expected[j], 1e-5 * expected[j]) << h << ", " << j;
    }
  }
}

TEST_F(ExpectedAttention, RefusesWhatDoesNotFit) {
  const Tensor q = normal_tensor(DType::kF32, {3, 4, 2}, 1);
  const Tensor k = normal_tensor(DType::kF16, {3, 2}, 2);
  std::vector<StoredRows> keys(2, {k.view().data(), DType::kF16, 3});
  std::vector<double> weights(6);
  const auto refused = [&](const FutureQueries& future) {
    return message_of(ErrorCode::kInvalidArgument,
                      [&] { expected_attention(future, q, keys, weights, stream_); });
  };
  EXPECT_THAT(refused({.first_row = 3}), HasSubstr("first_row is 3, expected 0 to 2"));
  EXPECT_THAT(refused({.positions = 0}), HasSubstr("0 positions"));
  EXPECT_THAT(refused({.scale = HUGE_VALF}), HasSubstr("scale is inf"));
  const std::vector<float> frequencies(2);
  EXPECT_THAT(refused({.frequencies = frequencies}), HasSubstr("rotate 4 channels, expected at"));
  weights.resize(5);
  EXPECT_THAT(refused({}), HasSubstr("weights has 5 entries, expected 2 KV heads times 3 rows"));
  keys[1].rows = 2;
  EXPECT_THAT(refused({}), HasSubstr("KV head 1 has 2 keys, expected 3"));
  keys[1] = {k.view().data(), DType::kU8, 3};
  EXPECT_THAT(refused({}), HasSubstr("KV head 1 holds u8"));
  keys.resize(3, keys[0]);
  EXPECT_THAT(refused({}), HasSubstr("4 query heads are not a multiple of 3 KV heads"));
}

}  // namespace
}  // namespace kvlm
