#pragma once

#include "kernels/codecs/codebook.h"

namespace kvlm::codecs {

/// NF4: 4-bit indices into 16 quantiles T of a normal distribution, times the greatest magnitude s
/// of a group. Attention multiplies integers instead: code c becomes 127 + e_c with e_c = round(127
/// T_c), so that x = s (127 + e_c) / 127 - s differs from s T_c by at most 0.0037 s. Source:
/// Dettmers et al. 2023, "QLoRA", appendix E, and bitsandbytes/functional.py.
template <>
struct Code<CodeFormat::kNf4> : BitCode<4> {
  static constexpr int kUnitCodes = 2;
  static constexpr int kUnitBytes = 1;
  static constexpr CodeRule kRule = CodeRule::kCodebook;
  static constexpr bool kOfUnitRows = false;
  static constexpr bool kZeroStored = false;
  static constexpr float kSlope = 1.0f / 127;
  static constexpr float kOffset = -1;

  static constexpr std::array<float, 16> kValues{-1.0f,
                                                 -0.6961928009986877f,
                                                 -0.5250730514526367f,
                                                 -0.39491748809814453f,
                                                 -0.28444138169288635f,
                                                 -0.18477343022823334f,
                                                 -0.09105003625154495f,
                                                 0.0f,
                                                 0.07958029955625534f,
                                                 0.16093020141124725f,
                                                 0.24611230194568634f,
                                                 0.33791524171829224f,
                                                 0.44070982933044434f,
                                                 0.5626170039176941f,
                                                 0.7229568362236023f,
                                                 1.0f};
  static constexpr int kZeroCode = 7;  // of 0 and of NaN
  static constexpr std::array<uint8_t, 16> kIntegers = [] {
    std::array<uint8_t, 16> integers{};
    for (size_t i = 0; i < 16; ++i) {  // 127 + the nearest integer; none is a tie
      integers[i] = static_cast<uint8_t>(127 * (1 + kValues[i]) + 0.5f);
    }
    return integers;
  }();

  VLM_HD static constexpr int at(const uint8_t* row, int i) noexcept {
    constexpr std::array<uint8_t, 16> kTable = kIntegers;
    return kTable[static_cast<size_t>(BitCode<4>::at(row, i))];
  }
};

template <int kDim>
using Nf4 = CodebookRow<CodeFormat::kNf4, kDim>;

}  // namespace kvlm::codecs
