#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"
#include "kernels/pack.h"
#include "kernels/packed_format.h"

// The arithmetic of every packed format, once, for host and device.
namespace kvlm::quantize {

/// The nearest integer, ties to even, of |x| < 2^22: beyond 2^23 a float has no fraction left.
VLM_HD inline float round_even(float x) noexcept {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  return (x + kShift) - kShift;
}

/// Writes element i of metadata of `meta`.
VLM_HD inline void store_meta(std::byte* to, DType meta, size_t i, float x) noexcept {
  if (meta == DType::kF16) {
    reinterpret_cast<f16*>(to)[i] = to_f16(x);
  } else {
    reinterpret_cast<float*>(to)[i] = x;
  }
}

/// Reads element i of metadata of `meta`.
VLM_HD inline float load_meta(const std::byte* from, DType meta, size_t i) noexcept {
  if (meta == DType::kF16) return to_float(reinterpret_cast<const f16*>(from)[i]);
  return reinterpret_cast<const float*>(from)[i];
}

/// The codes of a range: x maps to round((x - start) / step), held within [0, levels].
struct AffineRange {
  float start = 0;
  float step = 0;  ///< 0: the range is empty and every code is 0
  int levels = 0;  ///< M, the largest code

  VLM_HD int code(float x, Rounding rounding) const noexcept {
    if (step == 0) return 0;
    const auto top = static_cast<float>(levels);
    // A division, not a product with the inverse: ties must fall where the papers' do. NaN fails
    // the comparison and becomes the start of the range.
    const float scaled = (x - start) / step;
    if (!(scaled > 0)) return 0;
    if (scaled >= top) return levels;
    if (rounding == Rounding::kNearestEven) return static_cast<int>(round_even(scaled));
    return static_cast<int>(std::floor(rounding == Rounding::kFloor ? scaled : scaled + 0.5f));
  }
};

/// The range [low, high], both ends times kappa, in 2^bits - 1 steps. Ends of no numbers: 0 alone.
VLM_HD inline AffineRange affine_range(float low, float high, int levels, float kappa) noexcept {
  if (!(low <= high)) low = high = 0;
  AffineRange range;
  range.start = kappa * low;
  range.levels = levels;
  const float step = (kappa * high - range.start) / static_cast<float>(levels);
  if (step > 0 && std::isfinite(step)) range.step = step;
  return range;
}

/// What is stored of a range: the scale, and the zero point that code 0 means (docs/formulas.md,
/// "Range").
struct AffineMeta {
  float scale = 0;
  float zero = 0;
};

VLM_HD inline AffineMeta affine_meta(const AffineRange& range, const PackRule& rule) noexcept {
  const float span = rule.eta_of_step ? 1.0f : static_cast<float>(range.levels);
  return {(1 - 2 * rule.eta) * range.step, range.start + rule.eta * span * range.step};
}

/// PackRule::merge: the code stored for a new code and the stored one.
VLM_HD inline int merged_code(uint32_t merge, int stored, int code) noexcept {
  return static_cast<int>(merge >> 2 * (4 * stored + code) & 3);
}

/// Merges codes first..end, a byte each, with those packed in `row`.
VLM_HD inline void merge_codes(uint32_t merge, const uint8_t* row, CodeFormat format,
                               uint8_t* codes, int first, int end) noexcept {
  const int bits = code_bits(format);
  for (int i = first; i < end; ++i) {
    const int stored = row[i * bits / 8] >> i * bits % 8 & max_code(format);
    codes[i] = static_cast<uint8_t>(merged_code(merge, stored, codes[i]));
  }
}

/// The digit (-1, 0, 1, plus 1) of a ternary code: strictly beyond the threshold.
VLM_HD inline int ternary_digit(float x, float threshold) noexcept {
  return x > threshold ? 2 : x < -threshold ? 0 : 1;
}

/// The scale of a group of codes of a codebook whose greatest magnitude is `most`; 0 if that is not
/// finite: every code is that of 0 then.
VLM_HD inline float codebook_scale(float most) noexcept { return std::isfinite(most) ? most : 0; }

/// The stored code of x: how many midpoints of neighbouring numbers of the codebook lie below x /
/// scale, or under kNormCodebook not above it, with scale from norm_unit(). The divisions are as in
/// bitsandbytes' and vLLM's kernels.
VLM_HD inline int codebook_code(CodeFormat format, float x, float scale) noexcept {
  return with_code(format, [=](auto code) {
    int below = 0;
    if constexpr (codecs::Codebook<decltype(code)>) {
      constexpr auto kValues = code.kValues;
      constexpr bool kTiesUp = code.kRule == CodeRule::kNormCodebook;
      const float place = x / scale;
      if (scale == 0 || place != place) return code.kZeroCode;
      for (size_t i = 0; i + 1 < kValues.size(); ++i) {
        const float middle = (kValues[i] + kValues[i + 1]) / 2;
        below += place > middle || (kTiesUp && place == middle) ? 1 : 0;
      }
    }
    return below;
  });
}

/// What the numbers of a row are divided by before they are coded under kNormCodebook; 0 if its
/// norm is not finite: every code is that of 0 then.
///   squares  the sum of the squares of its `channels` numbers
VLM_HD inline float norm_unit(double squares, int channels) noexcept {
  const auto norm = static_cast<float>(sqrt(squares));
  if (!std::isfinite(norm)) return 0;
  return (norm + 1e-8f) / sqrtf(static_cast<float>(channels));
}

/// The square of the integer that a code of a codebook stands for: (c - 127)^2.
VLM_HD inline unsigned square_of(CodeFormat format, int code_of) noexcept {
  return with_code(format, [=](auto code) -> unsigned {
    if constexpr (codecs::Codebook<decltype(code)>) {
      constexpr auto kIntegers = code.kIntegers;
      const int e = kIntegers[static_cast<size_t>(code_of)] - 127;
      return static_cast<unsigned>(e * e);
    }
    return 0;
  });
}

/// The stored scale of a row under kNormCodebook: its norm, over that of its codes' numbers if the
/// rule says so.
///   code_squares  the sum of square_of() its codes
VLM_HD inline float norm_scale(CodeFormat format, const PackRule& rule, double squares,
                               unsigned code_squares, int channels) noexcept {
  const auto norm = static_cast<float>(sqrt(squares));
  if (!std::isfinite(norm)) return 0;
  if (!rule.corrects_norm) return norm;
  const auto slope = static_cast<double>(section_of(format, channels).slope);
  return static_cast<float>(sqrt(squares) / (slope * sqrt(static_cast<double>(code_squares))));
}

}  // namespace kvlm::quantize
