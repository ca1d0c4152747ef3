#include "kernels/rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::normal_tensor;
using testing::normalised_error;
using testing::values_of;

TEST(Rotate, EqualsTheReference) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t head_dim : {2, 33, 48, 64, 80, 96, 128}) {
    for (const int64_t half : {int64_t{1}, head_dim / 4, head_dim / 2}) {
      for (const int64_t rows : {1, 5, 70}) {
        Tensor x = normal_tensor(DType::kF32, {rows, 7, head_dim}, 1);
        const Tensor cos = normal_tensor(DType::kF32, {rows, half}, 2);
        const Tensor sin = normal_tensor(DType::kF32, {rows, half}, 3);
        const auto want = reference::rotate(
            values_of(x.view()), values_of(cos), values_of(sin), static_cast<size_t>(rows), 7,
            static_cast<size_t>(head_dim), static_cast<size_t>(half));
        rotate(std::array{TensorView(x)}, cos, sin, stream);
        EXPECT_LT(normalised_error(values_of(x.view()), want), 2e-7)
            << head_dim << " half " << half << " rows " << rows;
      }
    }
  }
}

TEST(Rotate, LeavesTheChannelsBeyondTheRotaryOnes) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor x = normal_tensor(DType::kF32, {1, 2, 80}, 4);
  const auto before = values_of(x.view());
  rotate(std::array{TensorView(x)}, normal_tensor(DType::kF32, {1, 16}, 5),
         normal_tensor(DType::kF32, {1, 16}, 6), stream);
  const auto after = values_of(x.view());
  for (size_t i = 0; i < 160; ++i) {
    if (i % 80 >= 32) {
      EXPECT_EQ(after[i], before[i]) << i;
    } else {
      EXPECT_NE(after[i], before[i]) << i;
    }
  }
}

TEST(Rotate, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor x = normal_tensor(DType::kF32, {2, 3, 8}, 1);
  const auto refused = [&](const Shape& cos, const Shape& sin) {
    return message_of(ErrorCode::kInvalidArgument, [&] {
      rotate(std::array{TensorView(x)}, Tensor(DType::kF32, cos), Tensor(DType::kF32, sin), stream);
    });
  };
  EXPECT_THAT(refused({2, 5}, {2, 5}), HasSubstr("rotate 10 channels, but a head of x has 8"));
  EXPECT_THAT(refused({3, 4}, {3, 4}), HasSubstr("cos has shape (3, 4), expected (2, 4)"));
  EXPECT_THAT(refused({2, 4}, {2, 3}), HasSubstr("sin has shape (2, 3)"));
}

}  // namespace
}  // namespace kvlm
