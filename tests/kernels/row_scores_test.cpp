#include "kernels/row_scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/base/error.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using kvlm::testing::make_tensor;
using kvlm::testing::message_of;
using kvlm::testing::normal_tensor;
using kvlm::testing::values_of;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RowScores : public ::testing::Test {
 protected:
  static std::vector<StoredRows> heads_of(const std::vector<Tensor>& tensors) {
    std::vector<StoredRows> heads;
    for (const Tensor& rows : tensors) {
      heads.push_back({rows.view().data(), rows.dtype(), rows.shape()[0]});
    }
    return heads;
  }

  ThreadPool pool_{3};
  Stream stream_{pool_};
};

TEST_F(RowScores, NormsOfEveryFormat) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<Tensor> tensors;
    tensors.push_back(make_tensor(dtype, {3, 2}, {3, 4, 0, 0, -5, 12}));
    tensors.push_back(make_tensor(dtype, {3, 2}, {1, 0, 8, 6, 0.5, 0}));
    std::vector<double> norms(6);
    row_norms(heads_of(tensors), 2, norms, stream_);
    EXPECT_THAT(norms, ElementsAre(5, 0, 13, 1, 10, 0.5));
  }
}

TEST_F(RowScores, RowsOnTheHostAreWidened) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<Tensor> tensors;
    tensors.push_back(make_tensor(dtype, {2, 3}, {3, -4, 0, 0.5, 12, -0.25}));
    EXPECT_THAT(rows_on_host(heads_of(tensors)[0], 3, stream_),
                ElementsAre(3, -4, 0, 0.5f, 12, -0.25f));
  }
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument, [&] { rows_on_host({}, 3, stream_); }),
              HasSubstr("rows_on_host: KV head 0 claims 0 rows"));
  const float row[1] = {1};
  const StoredRows one{reinterpret_cast<const std::byte*>(row), DType::kF32, 1};
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument, [&] { rows_on_host(one, 0, stream_); }),
              HasSubstr("0 channels"));
}

/// Rows (3, 4), (1, 0) and (0, -2): their directions add up to (1.6, -0.2), of length sqrt(2.6). A
/// row of zeros changes none of it.
TEST_F(RowScores, CosinesToTheMeanDirection) {
  const double length = std::sqrt(2.6);
  std::vector<Tensor> tensors;
  tensors.push_back(make_tensor(DType::kF16, {4, 2}, {3, 4, 1, 0, 0, 0, 0, -2}));
  std::vector<double> cosines(4);
  cosines_to_mean(heads_of(tensors), 2, cosines, stream_);
  EXPECT_THAT(cosines, ElementsAre(DoubleNear(0.8 / length, 1e-15), DoubleNear(1.6 / length, 1e-15),
                                   0, DoubleNear(0.2 / length, 1e-15)));
}

/// Directions that cancel have no mean to be like.
TEST_F(RowScores, NoMeanNoCosine) {
  std::vector<Tensor> tensors;
  tensors.push_back(make_tensor(DType::kF32, {2, 2}, {3, 0, -7, 0}));
  std::vector<double> cosines(2, 9);
  cosines_to_mean(heads_of(tensors), 2, cosines, stream_);
  EXPECT_THAT(cosines, ElementsAre(0, 0));
}

/// More rows than are widened at a time, and heads that differ.
TEST_F(RowScores, EqualPlainSums) {
  constexpr size_t kRows = 131;
  constexpr size_t kDim = 20;
  std::vector<Tensor> tensors;
  for (uint32_t head = 0; head < 3; ++head) {
    tensors.push_back(normal_tensor(DType::kF16, {kRows, kDim}, head + 1));
  }
  std::vector<double> norms(3 * kRows);
  std::vector<double> cosines(3 * kRows);
  row_norms(heads_of(tensors), kDim, norms, stream_);
  cosines_to_mean(heads_of(tensors), kDim, cosines, stream_);
  for (size_t head = 0; head < 3; ++head) {
    const auto x = values_of(tensors[head]);
    std::vector<double> length(kRows);
    std::vector<double> mean(kDim);
    for (size_t j = 0; j < kRows; ++j) {
      for (size_t i = 0; i < kDim; ++i) length[j] += x[j * kDim + i] * x[j * kDim + i];
      length[j] = std::sqrt(length[j]);
      for (size_t i = 0; i < kDim; ++i) mean[i] += x[j * kDim + i] / length[j] / kRows;
    }
    double square = 0;
    for (const double m : mean) square += m * m;
    for (size_t j = 0; j < kRows; ++j) {
      double product = 0;
      for (size_t i = 0; i < kDim; ++i) product += x[j * kDim + i] * mean[i];
      EXPECT_NEAR(norms[head * kRows + j], length[j], 1e-12);
      EXPECT_NEAR(cosines[head * kRows + j], product / length[j] / std::sqrt(square), 1e-12);
    }
  }
}

TEST_F(RowScores, RefuseWhatDoesNotFit) {
  std::vector<Tensor> tensors;
  tensors.push_back(make_tensor(DType::kF32, {2, 2}, {1, 2, 3, 4}));
  tensors.push_back(make_tensor(DType::kF32, {1, 2}, {1, 2}));
  std::vector<double> result(4);
  const auto refused = [&](std::span<const StoredRows> heads, int dim) {
    return message_of(ErrorCode::kInvalidArgument,
                      [&] { cosines_to_mean(heads, dim, result, stream_); });
  };
  std::vector<StoredRows> heads = heads_of(tensors);
  EXPECT_THAT(refused(heads, 2), HasSubstr("KV head 1 has 1 rows, expected 2 as in KV head 0"));
  EXPECT_THAT(refused({heads.data(), 1}, 2), HasSubstr("4 entries, expected 2"));
  EXPECT_THAT(refused({}, 2), HasSubstr("0 KV heads of 2 channels"));
  heads[0].dtype = DType::kI32;
  EXPECT_THAT(refused(heads, 2), HasSubstr("KV head 0 holds i32, expected f32, f16 or bf16"));
  heads[0] = {nullptr, DType::kF32, 2};
  EXPECT_THAT(refused(heads, 2), HasSubstr("2 rows but has no data"));
}

}  // namespace
}  // namespace kvlm
