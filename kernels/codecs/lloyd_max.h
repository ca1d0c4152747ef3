#pragma once

#include "kernels/codecs/codebook.h"

namespace kvlm::codecs {

/// Indices into the 2^kBits numbers T that lose least of a normal distribution of variance 1 (Lloyd
/// and Max): a channel of a rotated row, divided by the norm of the row and times the root of its
/// channels, is nearly such a number. With m the greatest T, attention multiplies integers: code c
/// becomes 127 + e_c with e_c = round(127 T_c / m), so that x = s m (e_c / 127) / sqrt(channels).
/// Source: Zandieh et al. 2025, "TurboQuant", section 3.1; docs/formulas.md, "turboquant".
template <int kBits>
struct LloydMax : BitCode<kBits> {
  static constexpr CodeRule kRule = CodeRule::kNormCodebook;
  static constexpr bool kZeroStored = false;
  static constexpr bool kOfUnitRows = true;

  static constexpr std::array<float, 1 << kBits> kValues = [] {
    constexpr std::array<float, 8> kUpper =
        kBits == 3 ? std::array<float, 8>{0.245094f, 0.756005f, 1.343909f, 2.151946f}
                   : std::array<float, 8>{0.128395f, 0.388048f, 0.656759f, 0.942340f,
                                          1.256231f, 1.618046f, 2.069017f, 2.732590f};
    std::array<float, 1 << kBits> values{};
    constexpr size_t kHalf = values.size() / 2;
    for (size_t i = 0; i < kHalf; ++i) {
      values[kHalf + i] = kUpper[i];
      values[kHalf - 1 - i] = -kUpper[i];
    }
    return values;
  }();
  static constexpr int kZeroCode = 1 << (kBits - 1);  // ties go up
  static constexpr float kSlope = kValues.back() / 127;
  static constexpr float kOffset = -kValues.back();
  static constexpr std::array<uint8_t, 16> kIntegers = [] {
    std::array<uint8_t, 16> integers{};
    for (size_t i = 0; i < kValues.size(); ++i) {  // 127 + the nearest integer; none is a tie
      integers[i] = static_cast<uint8_t>(127 * (1 + kValues[i] / kValues.back()) + 0.5f);
    }
    return integers;
  }();

  VLM_HD static constexpr int at(const uint8_t* row, int i) noexcept {
    constexpr std::array<uint8_t, 16> kTable = kIntegers;
    return kTable[static_cast<size_t>(BitCode<kBits>::at(row, i))];
  }
};

template <>
struct Code<CodeFormat::kLloydMax3> : LloydMax<3> {};
template <>
struct Code<CodeFormat::kLloydMax4> : LloydMax<4> {};

template <int kDim>
using LloydMax3 = CodebookRow<CodeFormat::kLloydMax3, kDim>;
template <int kDim>
using LloydMax4 = CodebookRow<CodeFormat::kLloydMax4, kDim>;

}  // namespace kvlm::codecs
