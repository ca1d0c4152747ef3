#include "kernels/blend_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;
using testing::normal_tensor;
using testing::normal_values;

TEST(BlendRows, WorkedExample) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = make_tensor(DType::kF32, {3, 2}, {1, 2, 10, 20, 100, 200});
  Tensor y(DType::kF32, {2, 2});
  blend_rows(y, x, {2, {0, 2, 1, 1}, {0.5f, 2.0f, 1.0f, -0.5f}}, stream);
  EXPECT_THAT(std::vector<float>(y.as<float>(), y.as<float>() + 4),
              ::testing::ElementsAre(200.5f, 401, 5, 10));
}

/// Products and sums are rounded one by one, on every processor and with any number of threads.
TEST(BlendRows, EqualsTheScalarSumBitForBit) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    Stream stream(pool);
    for (const int terms : {1, 2, 3, 4}) {
      for (const int64_t dim : {1, 7, 16, 33, 1152}) {
        for (const int64_t rows : {1, 3, 200}) {
          const Tensor x = normal_tensor(DType::kF32, {37, dim}, 1);
          RowBlend blend;
          blend.terms = terms;
          blend.weights = normal_values(static_cast<size_t>(rows * terms), 2);
          for (size_t i = 0; i < blend.weights.size(); ++i) {
            blend.indices.push_back(static_cast<int32_t>(i * 11 % 37));
          }
          Tensor y(DType::kF32, {rows, dim});
          blend_rows(y, x, blend, stream);
          for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
            for (size_t i = 0; i < static_cast<size_t>(dim); ++i) {
              float sum = 0;
              for (size_t term = 0; term < static_cast<size_t>(terms); ++term) {
                const size_t at = row * static_cast<size_t>(terms) + term;
                const float product =
                    blend.weights[at] * x.as<float>()[static_cast<size_t>(blend.indices[at]) *
                                                          static_cast<size_t>(dim) +
                                                      i];
                sum = term == 0 ? product : sum + product;
              }
              ASSERT_EQ(y.as<float>()[row * static_cast<size_t>(dim) + i], sum)
                  << terms << " terms of " << dim;
            }
          }
        }
      }
    }
  }
}

TEST(BlendRows, OfNoRowsDoesNothing) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor y(DType::kF32, {0, 5});
  blend_rows(y, normal_tensor(DType::kF32, {2, 5}, 1), {4, {}, {}}, stream);
}

TEST(BlendRows, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {4, 3}, 1);
  Tensor y(DType::kF32, {2, 3});
  const auto refused = [&](ConstTensorView from, const RowBlend& blend) {
    return message_of(ErrorCode::kInvalidArgument, [&] { blend_rows(y, from, blend, stream); });
  };
  for (const int32_t bad : {-1, 4, std::numeric_limits<int32_t>::min()}) {
    EXPECT_THAT(refused(x, {2, {0, 0, 0, bad}, {1, 1, 1, 1}}),
                HasSubstr("in row 1 is outside the 4 rows of x"));
  }
  EXPECT_THAT(refused(x, {1, {0}, {1}}), HasSubstr("y has shape (2, 3), expected (1, 3)"));
  EXPECT_THAT(refused(x, {2, {0, 1, 2}, {1, 1, 1}}), HasSubstr("not whole rows of 2 terms"));
  EXPECT_THAT(refused(x, {1, {0, 1}, {1}}), HasSubstr("2 indices and 1 weights"));
  EXPECT_THAT(refused(x, {0, {}, {}}), HasSubstr("1 to 4 terms"));
  refused(x, {5, std::vector<int32_t>(10), std::vector<float>(10)});
  EXPECT_THAT(refused(Tensor(DType::kF16, {4, 3}), {1, {0, 1}, {1, 1}}), HasSubstr("x holds f16"));
  EXPECT_THAT(refused(y, {1, {0, 1}, {1, 1}}), HasSubstr("overlap"));
}

}  // namespace
}  // namespace kvlm
