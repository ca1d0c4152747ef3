#include "kernels/base/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace kvlm {
namespace {

/// The value of a half's bits by definition.
double half_value(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const double fraction = static_cast<double>(bits & 0x3ff) / 1024;
  double value =
      exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  if (exponent == 31) value = fraction == 0 ? HUGE_VAL : std::nan("");
  return bits & 0x8000 ? -value : value;
}

TEST(F16, EveryPatternHasItsValueAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16 half{static_cast<uint16_t>(bits)};
    const double want = half_value(bits);
    const float got = to_float(half);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_TRUE(std::isnan(to_float(to_f16(got)))) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(got), want) << bits;
      EXPECT_EQ(std::signbit(got), (bits & 0x8000) != 0) << bits;
      EXPECT_EQ(to_f16(got).bits, bits);
    }
  }
}

TEST(F16, RoundsToNearestAndTiesToEven) {
  // Every pair of neighbours, subnormals and the step to infinity included.
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const double low = half_value(bits);
    const double high = bits + 1 == 0x7c00 ? 65536.0 : half_value(bits + 1);
    const auto midway = static_cast<float>((low + high) / 2);  // exact in float
    const uint32_t even = bits + (bits & 1);
    EXPECT_EQ(to_f16(midway).bits, even) << bits;
    EXPECT_EQ(to_f16(std::nextafter(midway, 0.0f)).bits, bits);
    EXPECT_EQ(to_f16(std::nextafter(midway, HUGE_VALF)).bits, bits + 1);
    EXPECT_EQ(to_f16(-midway).bits, even | 0x8000);
  }
  EXPECT_EQ(to_f16(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(Bf16, EveryPatternHasItsValueAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float got = to_float(bf16{static_cast<uint16_t>(bits)});
    EXPECT_EQ(std::bit_cast<uint32_t>(got), bits << 16);
    if (std::isnan(got)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(got)))) << bits;
    } else {
      EXPECT_EQ(to_bf16(got).bits, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const uint32_t midway = (bits << 16) + 0x8000;
    const uint32_t even = bits + (bits & 1);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(midway)).bits, even) << bits;
    EXPECT_EQ(to_bf16(std::bit_cast<float>(midway - 1)).bits, bits);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(midway + 1)).bits, bits + 1);
    EXPECT_EQ(to_bf16(-std::bit_cast<float>(midway)).bits, even | 0x8000);
  }
  // A NaN whose payload lies in the lower half must not become infinity.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(DType, HasSizesNamesAndSpellings) {
  EXPECT_EQ(dtype_bytes(DType::kBF16), 2u);
  EXPECT_EQ(dtype_name(kDTypeOf<f16>), "f16");
  EXPECT_EQ(parse_float_dtype("bfloat16"), DType::kBF16);
  EXPECT_EQ(parse_float_dtype("f32"), DType::kF32);
  EXPECT_EQ(parse_float_dtype("i32"), std::nullopt);
  EXPECT_EQ(kDTypeOf<int32_t>, DType::kI32);
  EXPECT_EQ(kDTypeOf<uint8_t>, DType::kU8);
}

}  // namespace
}  // namespace kvlm
