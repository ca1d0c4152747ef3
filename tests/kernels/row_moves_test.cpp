#include "kernels/row_moves.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

TEST(RowMoves, ThereAndBackInAnyOrder) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int dim : {1, 20, 128}) {
      const Tensor from = testing::normal_tensor(dtype, {50, dim}, 1);
      std::vector<const std::byte*> rows;
      for (int64_t i = 0; i < 50; ++i) rows.push_back(from.view().slice(i * 7 % 50, 1).data());
      Tensor floats(DType::kF32, {50, dim});
      widen_rows(rows, dtype, dim, floats.as<float>(), stream);
      const auto expected = testing::values_of(from);
      const auto width = static_cast<size_t>(dim);
      for (size_t i = 0; i < 50 * width; ++i) {
        EXPECT_EQ(static_cast<double>(floats.as<float>()[i]),
                  expected[i / width * 7 % 50 * width + i % width]);
      }
      Tensor to(dtype, {50, dim});
      std::vector<std::byte*> back;
      for (int64_t i = 0; i < 50; ++i) back.push_back(to.view().slice(i * 7 % 50, 1).data());
      narrow_rows(back, dtype, dim, floats.as<float>(), stream);
      EXPECT_EQ(testing::values_of(to), expected);
    }
  }
}

TEST(RowMoves, RefusesWhatIsNoFloat) {
  ThreadPool pool(1);
  Stream stream(pool);
  const std::byte byte{};
  const std::byte* row = &byte;
  float out = 0;
  testing::message_of(ErrorCode::kInvalidArgument, [&] {
    widen_rows({&row, 1}, DType::kU8, 1, &out, stream);
  });
  testing::message_of(ErrorCode::kInvalidArgument, [&] {
    widen_rows({&row, 1}, DType::kF32, 0, &out, stream);
  });
}

}  // namespace
}  // namespace kvlm
