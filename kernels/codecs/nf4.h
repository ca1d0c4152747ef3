#pragma once

#include "kernels/codecs/bits.h"

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

/// The same on tensor cores, widened to the 8-bit integers.
template <int kDim_>
struct Nf4 {
  static constexpr int kDim = kDim_;
  static constexpr std::array<Section, 1> kSections{{{CodeFormat::kNf4, kDim}}};
  static constexpr int kWidth = 8;
  static constexpr int kRowBytes = kDim / 2;
  static constexpr int kStride = padded_stride(kRowBytes, 4);
  static constexpr int kWideStride = kDim + 16;  // 8 tokens in different banks

#if defined(__CUDACC__)
  using Quarter = uint32_t[kQuarterWords<kWidth, kDim>];

  /// Integers 4 i to 4 i + 3 as a word.
  static constexpr uint32_t integers(int i) {
    uint32_t word = 0;
    for (int j = 3; j >= 0; --j) word = word << 8 | Code<CodeFormat::kNf4>::kIntegers[4 * i + j];
    return word;
  }
  /// The integers of the four codes in the lower 16 bits. Byte permutations look up both halves of
  /// the table by 3 bits; another one chooses by the fourth.
  static __device__ uint32_t widen(uint32_t codes) {
    constexpr uint32_t kTable[4] = {integers(0), integers(1), integers(2), integers(3)};
    const uint32_t of_eight = codes & 0x7777u;
    return __byte_perm(__byte_perm(kTable[0], kTable[1], of_eight),
                       __byte_perm(kTable[2], kTable[3], of_eight),
                       (codes & 0x8888u) >> 1 | 0x3210u);
  }
  static __device__ void quarter(const std::byte* row, int quarter, Quarter& to) {
    uint32_t words[kQuarterWords<4, kDim>];
    load_quarter<4, kDim>(row, quarter, words);
#pragma unroll
    for (int i = 0; i < kQuarterWords<kWidth, kDim>; ++i) {
      to[i] = widen(words[i / 2] >> i % 2 * 16);
    }
  }
  static __device__ void widen_row(const std::byte* row, std::byte* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Quarter words;
      quarter(row, i, words);
      store_shared(to + sizeof words * i, words);
    }
  }
  static __device__ uint32_t four(const std::byte* row, int group, int part) {
    return widen(shared_at<uint16_t>(row + 16 * group + 2 * part));
  }
#endif
};

}  // namespace kvlm::codecs
