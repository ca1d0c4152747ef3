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
    return static_cast<int>(rounding == Rounding::kFloor ? std::floor(scaled) : round_even(scaled));
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

/// The digit (-1, 0, 1, plus 1) of a ternary code: strictly beyond the threshold.
VLM_HD inline int ternary_digit(float x, float threshold) noexcept {
  return x > threshold ? 2 : x < -threshold ? 0 : 1;
}

/// The scale of a group of codes of a codebook whose greatest magnitude is `most`; 0 if that is not
/// finite: every code is that of 0 then.
VLM_HD inline float codebook_scale(float most) noexcept { return std::isfinite(most) ? most : 0; }

/// The stored code of x under a scale that is not rounded yet: how many midpoints of neighbouring
/// numbers of the codebook lie below x / scale. The division is as in bitsandbytes' kernels.
VLM_HD inline int codebook_code(CodeFormat format, float x, float scale) noexcept {
  return with_code(format, [=](auto code) {
    int below = 0;
    if constexpr (codecs::Codebook<decltype(code)>) {
      constexpr auto kValues = code.kValues;
      const float place = x / scale;
      if (scale == 0 || place != place) return code.kZeroCode;
      for (size_t i = 0; i + 1 < kValues.size(); ++i) {
        below += place > (kValues[i] + kValues[i + 1]) / 2 ? 1 : 0;
      }
    }
    return below;
  });
}

}  // namespace kvlm::quantize
