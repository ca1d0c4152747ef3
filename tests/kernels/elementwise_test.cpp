#include "kernels/elementwise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <limits>
#include <numeric>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;
using testing::normal_tensor;
using testing::same_bits;
using testing::values_of;

TEST(GatherRows, WidensTheRowsAskedFor) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t dim : {1, 33, 80, 1000}) {
      const Tensor table = normal_tensor(dtype, {11, dim}, 1);
      const auto entries = values_of(table);
      std::vector<int32_t> ids(70);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7 % 11);
      Tensor y(DType::kF32, {70, dim});
      gather_rows(y, table, ids, stream);
      for (size_t row = 0; row < ids.size(); ++row) {
        for (size_t i = 0; i < static_cast<size_t>(dim); ++i) {
          ASSERT_EQ(static_cast<double>(y.as<float>()[row * static_cast<size_t>(dim) + i]),
                    entries[static_cast<size_t>(ids[row]) * static_cast<size_t>(dim) + i]);
        }
      }
    }
  }
}

TEST(GatherRows, RefusesAnIdOutsideTheTable) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor table = normal_tensor(DType::kF32, {4, 3}, 1);
  Tensor y(DType::kF32, {2, 3});
  for (const int32_t bad : {-1, 4, std::numeric_limits<int32_t>::min()}) {
    EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                           [&] {
                             gather_rows(y, table, std::array{0, bad}, stream);
                           }),
                HasSubstr("at position 1 is outside the table of 4 entries"));
  }
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] { gather_rows(y, table, std::array{0}, stream); }),
              HasSubstr("y has shape (2, 3), expected (1, 3)"));
}

TEST(Add, AddsEveryElementOnce) {
  ThreadPool pool(3);
  Stream stream(pool);
  for (const int64_t count : {1, 15, 16, 17, 1000, 16384, 16385, 100'003}) {
    Tensor y = normal_tensor(DType::kF32, {count}, 2);
    const Tensor x = normal_tensor(DType::kF32, {count}, 3);
    const Tensor before =
        make_tensor(DType::kF32, {count}, std::vector<float>(y.as<float>(), y.as<float>() + count));
    add(y, x, stream);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(y.as<float>()[i], before.as<float>()[i] + x.as<float>()[i]) << i;
    }
  }
  Tensor y = normal_tensor(DType::kF32, {4}, 2);
  EXPECT_THAT(
      message_of(ErrorCode::kInvalidArgument, [&] { add(y, Tensor(DType::kF32, {5}), stream); }),
      HasSubstr("add: x has shape (5), expected (4)"));
}

TEST(AddScaled, ScalesEveryColumnByItsOwn) {
  ThreadPool pool(3);
  Stream stream(pool);
  for (const int64_t rows : {1, 3, 700}) {
    for (const int64_t dim : {1, 15, 16, 17, 100, 1024}) {
      Tensor y = normal_tensor(DType::kF32, {rows, dim}, 2);
      const Tensor x = normal_tensor(DType::kF32, {rows, dim}, 3);
      const Tensor scale = normal_tensor(DType::kF32, {dim}, 4);
      const std::vector<float> before(y.as<float>(), y.as<float>() + rows * dim);
      add_scaled(y, x, scale, stream);
      for (int64_t i = 0; i < rows * dim; ++i) {
        const double expected =
            static_cast<double>(before[static_cast<size_t>(i)]) +
            static_cast<double>(x.as<float>()[i]) * static_cast<double>(scale.as<float>()[i % dim]);
        ASSERT_NEAR(static_cast<double>(y.as<float>()[i]), expected, 1e-6) << i;
      }
    }
  }
  Tensor y = normal_tensor(DType::kF32, {4, 6}, 2);
  const Tensor x = normal_tensor(DType::kF32, {4, 6}, 3);
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] { add_scaled(y, x, Tensor(DType::kF32, {4}), stream); }),
              HasSubstr("add_scaled: scale has shape (4), expected (6)"));
}

/// Floats that try every rounding: all halves and bfloat16s, the points midway between neighbours
/// and the floats on either side of those, and special values.
std::vector<float> telling_floats() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const auto place = std::bit_cast<uint32_t>(to_float(f16{half}));
    // A half's ulp is 2^13 float ulps (more among the subnormals, where 1 of them is not midway).
    for (const uint32_t step : {0x0fffu, 0x1000u, 0x1001u}) {
      values.push_back(std::bit_cast<float>(place + step));
    }
    values.push_back(to_float(f16{half}));
    for (const uint32_t step : {0x0000u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>((bits << 16) + step));
    }
    // Midway between subnormal halves, and the floats beside that.
    if (bits < 0x800) {
      const float midway = (static_cast<float>(bits) + 0.5f) * 0x1p-24f;
      for (const int step : {-1, 0, 1}) {
        const uint32_t beside = std::bit_cast<uint32_t>(midway) + static_cast<uint32_t>(step);
        values.push_back(std::bit_cast<float>(beside));
        values.push_back(-values.back());
      }
    }
  }
  return values;
}

TEST(Convert, EqualsTheScalarConversionOfEveryTellingValue) {
  ThreadPool pool(2);
  Stream stream(pool);
  const std::vector<float> values = telling_floats();
  const Shape shape{static_cast<int64_t>(values.size())};
  const Tensor x = make_tensor(DType::kF32, shape, values);
  Tensor halves(DType::kF16, shape);
  Tensor brains(DType::kBF16, shape);
  convert(halves, x, stream);
  convert(brains, x, stream);
  for (size_t i = 0; i < values.size(); ++i) {
    const f16 half = halves.as<f16>()[i];
    const bf16 brain = brains.as<bf16>()[i];
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(to_float(half)) && std::isnan(to_float(brain))) << i;
    } else {
      ASSERT_EQ(half.bits, to_f16(values[i]).bits) << values[i];
      ASSERT_EQ(brain.bits, to_bf16(values[i]).bits) << values[i];
    }
  }
}

TEST(Convert, WidensEveryBitPattern) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Tensor x(dtype, {65536});
    auto* bits = reinterpret_cast<uint16_t*>(x.view().data());
    std::iota(bits, bits + 65536, uint16_t{0});
    Tensor y(DType::kF32, {65536});
    convert(y, x, stream);
    for (int i = 0; i < 65536; ++i) {
      const float want =
          dtype == DType::kF16 ? to_float(x.as<f16>()[i]) : to_float(x.as<bf16>()[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(y.as<float>()[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(y.as<float>()[i]), std::bit_cast<uint32_t>(want)) << i;
      }
    }
  }
}

TEST(Convert, GoesBetweenAllFormatsAtEveryLength) {
  ThreadPool pool(1);
  Stream stream(pool);
  const DType formats[] = {DType::kF32, DType::kF16, DType::kBF16};
  for (const DType from : formats) {
    for (const DType to : formats) {
      for (const int64_t count : {0, 1, 7, 15, 16, 17, 33, 100}) {
        const Tensor x = normal_tensor(from, {count}, 4);
        Tensor y(to, {count});
        convert(y, x, stream);
        std::vector<float> wide;
        for (const double value : values_of(x)) wide.push_back(static_cast<float>(value));
        EXPECT_TRUE(count == 0 || same_bits(y.view(), make_tensor(to, {count}, wide)))
            << dtype_name(from) << " to " << dtype_name(to) << ", " << count;
      }
    }
  }
}

TEST(Convert, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor y(DType::kF32, {4});
  const auto refused = [&](ConstTensorView x) {
    return message_of(ErrorCode::kInvalidArgument, [&] { convert(y, x, stream); });
  };
  EXPECT_THAT(refused(Tensor(DType::kF32, {5})), HasSubstr("x has shape (5), expected (4)"));
  EXPECT_THAT(refused(Tensor(DType::kI32, {4})), HasSubstr("x holds i32"));
  EXPECT_THAT(refused(y), HasSubstr("overlap"));
}

}  // namespace
}  // namespace kvlm
