#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/base/tensor.h"

namespace kvlm {

/// What a byte or half a byte of a quantized matrix stands for.
enum class WeightCode : uint8_t {
  kU4,    ///< 0..15; without zero points of its own a group has 8
  kU8,    ///< 0..255; 128
  kE4M3,  ///< a float of 8 bits: 4 of exponent (bias 7), 3 of mantissa, no infinity; no zero points
};

/// Bits of a code.
constexpr int64_t code_bits(WeightCode code) noexcept { return code == WeightCode::kU4 ? 4 : 8; }

/// The zero point of groups that have none of their own.
constexpr int zero_of(WeightCode code) noexcept {
  return code == WeightCode::kU4 ? 8 : code == WeightCode::kU8 ? 128 : 0;
}

/// "int4", "int8", "fp8".
constexpr std::string_view code_name(WeightCode code) noexcept {
  return code == WeightCode::kU4 ? "int4" : code == WeightCode::kU8 ? "int8" : "fp8";
}

/// The value of a finite e4m3 code: its bits moved into a float, and the bias of the exponent made
/// good.
constexpr float e4m3_value(uint8_t code) noexcept {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = static_cast<uint32_t>(code & 0x7fu) << 20;
  return std::bit_cast<float>(sign | magnitude) * 0x1p120f;
}

/// The format of a quantized matrix (out, in): w[o, i] = scale[o, i / group] * (code[o, i] -
/// zero[o, i / group]), exactly, in f32.
struct QuantizedFormat {
  WeightCode code = WeightCode::kU8;
  int64_t out = 0;
  int64_t in = 0;
  int64_t group = 32;               ///< inputs that share a scale: 32, 64, 128, or all of them
  DType scale = DType::kF16;        ///< f16, bf16 or f32
  bool has_zeros = false;           ///< whether each group has a zero point, 0..255
  DType activations = DType::kF32;  ///< what x is rounded to in products on a GPU: f16 or bf16

  int64_t groups() const noexcept { return group == 0 ? 0 : (in + group - 1) / group; }
  /// The zero point of groups that have none of their own.
  int zero() const noexcept { return zero_of(code); }
  Shape shape() const noexcept { return {out, in}; }
  friend bool operator==(const QuantizedFormat&, const QuantizedFormat&) = default;
};

/// Borrows a quantized matrix in the layout of its device (layout.h).
struct QuantizedMatrix {
  QuantizedFormat format;
  const std::byte* data = nullptr;
  Device device;
  /// Whether the CPU multiplies f32 activations with it, instead of activations that are rounded to
  /// 8 bits per row and 32 inputs. e4m3 codes always are.
  bool exact = false;
};

}  // namespace kvlm
