#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/dtype.h"

// Independent: rounding to a half format by arithmetic, where kernels/base/dtype.h works on bits.
namespace kvlm::reference {

/// `x` to the nearest number with `fraction` bits behind the point, ties to even; below the
/// exponent `least` the spacing stays that of it (subnormals). Beyond `most` lies infinity.
inline float rounded(float x, int fraction, int least, double most) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double value = static_cast<double>(x);
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(value), least) - fraction);
  const double result = std::nearbyint(value / spacing) * spacing;
  if (std::abs(result) <= most) return static_cast<float>(result);
  return std::copysign(std::numeric_limits<float>::infinity(), x);
}

inline float as_f16(float x) { return rounded(x, 10, -14, 65504); }
inline float as_bf16(float x) { return rounded(x, 7, -126, 0x1.fep127); }

/// A value as a cache of `format` gives it back.
inline float stored(float x, DType format) {
  if (format == DType::kF16) return as_f16(x);
  if (format == DType::kBF16) return as_bf16(x);
  return x;
}

}  // namespace kvlm::reference
