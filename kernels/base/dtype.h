#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/base/host_device.h"

namespace kvlm {

/// Element type of a tensor. Half formats are stored as their 16 bits.
enum class DType : uint8_t { kF32, kF16, kBF16, kI32, kU8 };

/// Bytes of one element.
constexpr size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

/// "f32", "f16", "bf16", "i32", "u8".
constexpr std::string_view dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

/// An IEEE half, as its bits.
struct f16 {
  uint16_t bits = 0;
};

/// A bfloat16 (the upper half of an IEEE single), as its bits.
struct bf16 {
  uint16_t bits = 0;
};

template <class T>
constexpr DType kDTypeOf = [] {
  if constexpr (sizeof(T) == 1) return DType::kU8;
  return DType::kI32;
}();
template <>
inline constexpr DType kDTypeOf<float> = DType::kF32;
template <>
inline constexpr DType kDTypeOf<f16> = DType::kF16;
template <>
inline constexpr DType kDTypeOf<bf16> = DType::kBF16;

/// Exact widening of a bfloat16.
VLM_HD constexpr float to_float(bf16 x) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

/// Exact widening of an IEEE half, subnormals, infinities and NaN included.
VLM_HD constexpr float to_float(f16 x) noexcept {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x0400u) {  // zero or subnormal: magnitude * 2^-24, exact in float
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

VLM_HD constexpr float to_float(float x) noexcept { return x; }

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
VLM_HD constexpr bf16 to_bf16(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Rounds to the nearest IEEE half, ties to even; overflow gives infinity, NaN stays NaN.
VLM_HD constexpr f16 to_f16(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal half: let the float adder round at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // ulp of 0.5 is 2^-24
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

/// from_float<T>: rounds to T (float, f16 or bf16).
template <class T>
VLM_HD constexpr T from_float(float x) noexcept;
template <>
VLM_HD constexpr float from_float<float>(float x) noexcept {
  return x;
}
template <>
VLM_HD constexpr f16 from_float<f16>(float x) noexcept {
  return to_f16(x);
}
template <>
VLM_HD constexpr bf16 from_float<bf16>(float x) noexcept {
  return to_bf16(x);
}

/// "f32" | "f16" | "bf16" (also torch's spellings "float32", "float16", "bfloat16").
constexpr std::optional<DType> parse_float_dtype(std::string_view name) noexcept {
  if (name == "f32" || name == "float32") return DType::kF32;
  if (name == "f16" || name == "float16") return DType::kF16;
  if (name == "bf16" || name == "bfloat16") return DType::kBF16;
  return std::nullopt;
}

}  // namespace kvlm
