#include "kernels/byte_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::normal_tensor;

/// Bytes of which every value is among the first 256.
Tensor bytes_of(const Shape& shape) {
  Tensor bytes(DType::kU8, shape);
  for (int64_t i = 0; i < shape.elements(); ++i) {
    bytes.as<uint8_t>()[i] = static_cast<uint8_t>(i * 37 + i / 256);
  }
  return bytes;
}

TEST(PlaceBytes, IsATableForEveryGroupOfColumns) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t rows : {1, 5, 300}) {
    for (const int64_t groups : {1, 3}) {
      for (const int64_t width : {12, 15}) {
        constexpr int64_t kColumns = 12;
        const Tensor from = bytes_of({rows, kColumns});
        const Tensor values = normal_tensor(DType::kF32, {groups, 256}, 1);
        for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          Tensor to = normal_tensor(dtype, {rows, width}, 2);
          place_bytes(to, from, values, stream);
          const auto placed = testing::values_of(to);
          for (int64_t i = 0; i < rows * width; ++i) {
            const int64_t column = i % width;
            float expected = 0;
            if (column < kColumns) {
              const int64_t byte = from.as<uint8_t>()[i / width * kColumns + column];
              expected = values.as<float>()[column / (kColumns / groups) * 256 + byte];
              if (dtype == DType::kF16) expected = to_float(from_float<f16>(expected));
              if (dtype == DType::kBF16) expected = to_float(from_float<bf16>(expected));
            }
            ASSERT_EQ(placed[static_cast<size_t>(i)], expected)
                << rows << " rows, " << groups << " groups, " << dtype_name(dtype) << ", " << i;
          }
        }
      }
    }
  }
}

TEST(PlaceBytes, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor from = bytes_of({2, 12});
  const Tensor values = normal_tensor(DType::kF32, {3, 256}, 1);
  Tensor to(DType::kF32, {2, 12});
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  const auto refusal = [&](TensorView y, ConstTensorView bytes, ConstTensorView table) {
    return message_of(kInvalid, [&] { place_bytes(y, bytes, table, stream); });
  };
  Tensor narrow(DType::kF32, {2, 11});
  EXPECT_THAT(refusal(narrow, from, values),
              HasSubstr("(2, 12) on cpu cannot be converted to (2, 11)"));
  Tensor few(DType::kF32, {1, 12});
  EXPECT_THAT(refusal(few, from, values), HasSubstr("cannot be converted to (1, 12)"));
  const Tensor five = normal_tensor(DType::kF32, {5, 256}, 1);
  EXPECT_THAT(refusal(to, from, five), HasSubstr("with 5 tables"));
  const Tensor half = normal_tensor(DType::kF32, {3, 128}, 1);
  EXPECT_THAT(refusal(to, from, half), HasSubstr("a value for each byte"));
  EXPECT_THAT(refusal(to, to, values), HasSubstr("u8"));
  EXPECT_THAT(refusal(to, from, from), HasSubstr("f32"));
}

}  // namespace
}  // namespace kvlm
