#include "kernels/quantized/round.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantized/round.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

#ifndef KVLM_KERNELS_QUANTIZED_ROUND_CPP_ONCE_
#define KVLM_KERNELS_QUANTIZED_ROUND_CPP_ONCE_
namespace kvlm {

/// Inputs that share a scale.
constexpr size_t kRoundedGroup = 32;
/// A sum is of 8 partial sums, element i in partial sum i mod 8, whatever the width of a vector.
constexpr size_t kPartialSums = 8;

/// A group whose largest magnitude is below this has no reciprocal in f32, and codes of zero.
constexpr float kSmallest = 1e-30f;
/// The smallest f16, for a scale that f16 would make zero.
constexpr float kSmallestScale = 0x1p-24f;

}  // namespace kvlm
#endif

HWY_BEFORE_NAMESPACE();
namespace kvlm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using cpu::HWY_NAMESPACE::load_wide;

// At most 8 lanes, so that lane j of vector v is always element i = v * lanes + j, in partial sum
// i mod 8.
using Floats = hn::CappedTag<float, kPartialSums>;

/// ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)).
float sum_of(const float (&p)[kPartialSums]) {
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

/// Multiples of a scale in [low, high], as floats.
template <class V>
HWY_INLINE V levels_of(Floats d, V values, float low, float high) {
  return hn::Min(hn::Max(hn::Round(values), hn::Set(d, low)), hn::Set(d, high));
}

/// codes[i] = clamp(rne(w[i] / scale), low, high) + zero.
void code_group(const float* w, float scale, float low, float high, int zero, uint8_t* codes) {
  const Floats d;
  const hn::RebindToSigned<Floats> d32;
  int32_t levels[kRoundedGroup];
  for (size_t i = 0; i < kRoundedGroup; i += hn::Lanes(d)) {
    const auto level = levels_of(d, hn::Div(hn::LoadU(d, w + i), hn::Set(d, scale)), low, high);
    hn::StoreU(hn::ConvertTo(d32, level), d32, levels + i);
  }
  for (size_t i = 0; i < kRoundedGroup; ++i) codes[i] = static_cast<uint8_t>(levels[i] + zero);
}

/// The share of a group's energy that codes explain, and the scale with which they do.
struct Fit {
  float energy;
  float scale;
};

Fit fit_of(const float* w, float inverse) {
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  float products[kPartialSums] = {};
  float squares[kPartialSums] = {};
  for (size_t i = 0; i < kRoundedGroup; i += lanes) {
    const auto values = hn::LoadU(d, w + i);
    const auto level = levels_of(d, hn::Mul(values, hn::Set(d, inverse)), -8, 7);
    float* product = products + i % kPartialSums;
    float* square = squares + i % kPartialSums;
    hn::StoreU(hn::Add(hn::LoadU(d, product), hn::Mul(values, level)), d, product);
    hn::StoreU(hn::Add(hn::LoadU(d, square), hn::Mul(level, level)), d, square);
  }
  const float a = sum_of(products);
  const float b = sum_of(squares);
  return {a * a / b, a / b};
}

/// f16(scale), but not zero.
float scale_of(float scale) {
  const float rounded = to_float(to_f16(scale));
  return rounded == 0 ? kSmallestScale : rounded;
}

/// The value of the largest magnitude, the first of equals.
float largest_of(const float* w) {
  float largest = 0;
  for (size_t i = 0; i < kRoundedGroup; ++i) {
    if (std::fabs(w[i]) > std::fabs(largest)) largest = w[i];
  }
  return largest;
}

float round_to_4_bits(const float* w, uint8_t* codes) {
  const float largest = largest_of(w);
  if (std::fabs(largest) < kSmallest) {
    std::fill_n(codes, kRoundedGroup, uint8_t{8});
    return largest == 0 ? 0 : kSmallestScale;
  }
  Fit best{};
  for (const float step : {0.0f, -1.0f, 1.0f, -2.0f, 2.0f, -3.0f, 3.0f}) {
    const Fit fit = fit_of(w, -(8 + 0.3f * step) / largest);
    if (fit.energy > best.energy) best = fit;
  }
  const float scale = scale_of(best.scale);
  code_group(w, scale, -8, 7, 8, codes);
  return scale;
}

float round_to_8_bits(const float* w, uint8_t* codes) {
  const float largest = std::fabs(largest_of(w));
  if (largest == 0) {
    std::fill_n(codes, kRoundedGroup, uint8_t{128});
    return 0;
  }
  const float scale = scale_of(largest / 127);
  code_group(w, scale, -127, 127, 128, codes);
  return scale;
}

/// Widens `count` floats; false if one is not finite.
template <class T>
bool widen(const T* from, size_t count, float* to) {
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  auto finite = hn::FirstN(d, lanes);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto wide = load_wide(d, from + i);
    finite = hn::And(finite, hn::IsFinite(wide));
    hn::StoreU(wide, d, to + i);
  }
  bool rest = true;
  for (; i < count; ++i) {
    to[i] = to_float(from[i]);
    rest = rest && std::isfinite(to[i]);
  }
  return rest && hn::AllTrue(d, finite);
}

bool widen_row(const std::byte* from, DType dtype, size_t count, float* to) {
  switch (dtype) {
    case DType::kF16:
      return widen(reinterpret_cast<const f16*>(from), count, to);
    case DType::kBF16:
      return widen(reinterpret_cast<const bf16*>(from), count, to);
    default:
      return widen(reinterpret_cast<const float*>(from), count, to);
  }
}

/// Rounds a row of `in` floats. `wide` is for them, padded to whole groups; returns whether all are
/// finite.
bool round_row(const std::byte* from, DType dtype, size_t in, WeightCode code, float* wide,
               uint8_t* codes, float* scales) {
  if (!widen_row(from, dtype, in, wide)) return false;
  const auto round = code == WeightCode::kU4 ? &round_to_4_bits : &round_to_8_bits;
  uint8_t last[kRoundedGroup];
  for (size_t group = 0; group * kRoundedGroup < in; ++group) {
    const size_t first = group * kRoundedGroup;
    const bool whole = first + kRoundedGroup <= in;
    scales[group] = round(wide + first, whole ? codes + first : last);
    if (!whole) std::copy_n(last, in - first, codes + first);
  }
  return true;
}

}  // namespace kvlm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm {

HWY_EXPORT(round_row);

namespace {

class RoundedMatrix final : public QuantizedSource {
 public:
  RoundedMatrix(std::string name, ConstTensorView floats, WeightCode code, DType activations)
      : QuantizedSource(format_of(floats, code, activations)),
        name_(std::move(name)),
        floats_(floats) {}

  void read(int64_t first, int64_t count, QuantizedRows& to) const override {
    const auto in = static_cast<size_t>(format_.in);
    const auto groups = static_cast<size_t>(format_.groups());
    std::vector<float> wide(groups * kRoundedGroup);
    for (int64_t row = 0; row < count; ++row) {
      const std::byte* from = floats_.slice(first + row, 1).data();
      const auto at = static_cast<size_t>(row);
      const bool finite = HWY_DYNAMIC_DISPATCH(round_row)(from, floats_.dtype(), in, format_.code,
                                                          wide.data(), to.codes.data() + at * in,
                                                          to.scales.data() + at * groups);
      if (!finite) refuse(first + row, wide);
    }
  }

 private:
  static QuantizedFormat format_of(const ConstTensorView& floats, WeightCode code,
                                   DType activations) {
    QuantizedFormat format;
    format.code = code;
    format.out = floats.shape()[0];
    format.in = floats.shape()[1];
    format.group = kRoundedGroup;
    format.activations = activations;
    return format;
  }
  [[noreturn]] void refuse(int64_t row, const std::vector<float>& wide) const {
    const auto found = std::ranges::find_if(wide, [](float w) { return !std::isfinite(w); });
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("tensor {}: the number in row {}, column {} is {}, which cannot be "
                            "rounded to {}; download the checkpoint again or load it without "
                            "--weights",
                            name_, row, found - wide.begin(), *found, code_name(format_.code)));
  }

  std::string name_;
  ConstTensorView floats_;
};

}  // namespace

std::unique_ptr<QuantizedSource> round_matrix(std::string name, ConstTensorView floats,
                                              WeightCode code, DType activations) {
  return std::make_unique<RoundedMatrix>(std::move(name), floats, code, activations);
}

}  // namespace kvlm
#endif  // HWY_ONCE
