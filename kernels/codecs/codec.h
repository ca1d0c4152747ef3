#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/base/host_device.h"

// The contract of a code: how the small integers of a token are packed into bytes, and their
// values. The codes are the enumerators of CodeFormat. Each has a struct Code<> in a file of this
// folder, which list.h includes; packing, unpacking and attention on both devices use it.
//
//   kBits        bits of a stored code, lowest first; 0: another packing
//   kMaxCode     the greatest stored code
//   kUnitCodes, kUnitBytes
//                unit of packing: as many codes fill as many whole bytes
//   kRule        the rule that makes the codes; kSign makes those of 1 bit too
//   pack()       packs a unit of n codes, given one per byte; n < kUnitCodes at a token's end
//   at()         the integer c that attention multiplies for code i: the definition for decoders
//   kZeroStored, kSlope, kOffset
//                defaults of PackedSection: x = kSlope * s * c + z, z stored or kOffset * s
//   kValues      of a codebook: (2^kBits,) T, ascending, symmetric about 0 or with 0. x becomes the
//                code of the T nearest to x / max |x| (kCodebook; a tie goes down) or to
//                sqrt(channels) x / |x| (kNormCodebook; a tie goes up)
//   kIntegers    of a codebook: (16,) c of every stored code
//   kZeroCode    of a codebook: the code of 0 and of NaN
//   kOfUnitRows  of a codebook: a row of norm 1 is coded, times sqrt(channels): kSlope and kOffset
//                are divided by that root
//
// On the tensor cores (kernels/cuda/attend/fused_*.cuh) a struct of the same file reads the codes
// of a token from shared memory and widens them to integers of kWidth bits, lowest first in words.
// It is a template over the channels of a token, a multiple of 16, named in instances.cmake, with
//
//   kDim         the channels
//   kSections    the codes that it reads
//   kWidth       1, 2, 4 or 8: bits of a widened integer
//   kRowBytes    of a stored token
//   kStride      bytes to the next token in shared memory: kRowBytes, or a multiple of 16 above, to
//                avoid bank conflicts
//   quarter()    integers of a quarter of a token; bits after the last are undefined
//   four()       integers of 4 channels: part 0..7 of a group of 32. Bits above them are undefined
//                up to the 16th (kWidth up to 4). Not for V of whole 16 bytes (ValuesLayout)
//   widen_row(), kWideStride
//                optional: a thread widens a token of V before it is read, with kWideStride bytes
//                to the next one; 0: not widened
//   prepare()    optional: called by all threads of a block before they read codes
namespace kvlm {

/// The codes. A row packs those of one token, channel by channel, least significant bits first.
enum class CodeFormat : uint8_t {
  kBits1 = 1,
  kBits2,
  kBits3,
  kBits4,
  kBits5,
  kBits6,
  kBits7,
  kBits8,
  kTrit5,      ///< ternary digits 0..2, five to a byte: sum of digit_i * 3^i; padded with digit 1
  kTrit2b,     ///< ternary digits 0..2 as 2-bit codes
  kNf4,        ///< 4 bits: numbers of a table times the greatest magnitude of a group
  kLloydMax3,  ///< 3 bits: numbers of a table times the norm of a row (TurboQuant)
  kLloydMax4,  ///< the same at 4 bits
  kEnd,        ///< not a code: comes after the last
};

/// How numbers become codes.
enum class CodeRule : uint8_t {
  kAffine,        ///< equal steps over a range: min-max, quantiles, shrunk ranges
  kTernary,       ///< -1, 0, 1 about a threshold (VidKV eq. 6)
  kSign,          ///< 1 iff x >= 0, scale mean |x| (VidKV eq. 5)
  kCodebook,      ///< the nearest number of a table times max |x|, which is the scale (NF4)
  kNormCodebook,  ///< the nearest number of a table times the norm of a row (TurboQuant)
};

}  // namespace kvlm

namespace kvlm::codecs {

template <CodeFormat kFormat>
struct Code;

/// A code with a table of integers.
template <class C>
concept Codebook = requires {
  C::kIntegers;
};

/// sqrt(n) of whole n, in f32.
constexpr float root_of(int n) noexcept {
  double root = n;
  for (double next = (root + 1) / 2; next < root; next = (root + n / root) / 2) root = next;
  return static_cast<float>(root);
}

/// kSlope and kOffset of a section of `channels`.
template <class C>
constexpr float slope_of(int channels) noexcept {
  if constexpr (Codebook<C>) return C::kSlope / (C::kOfUnitRows ? root_of(channels) : 1);
  return C::kSlope;
}
template <class C>
constexpr float offset_of(int channels) noexcept {
  if constexpr (Codebook<C>) return C::kOffset / (C::kOfUnitRows ? root_of(channels) : 1);
  return C::kOffset;
}

/// Channels that are coded alike.
struct Section {
  CodeFormat code;
  int channels;
};

/// The code of a tensor-core struct of one section.
template <class C>
using CodeOf = Code<C::kSections[0].code>;

/// kStride of rows of codes of `width` bits.
constexpr int padded_stride(int row_bytes, int width) {
  return row_bytes % 64 != 0 ? row_bytes : row_bytes + (width == 8 ? 32 : 16);
}

/// Words of the codes of a quarter of a row, rounded up.
template <int kBits, int kDim>
constexpr int kQuarterWords = (kDim / 4 * kBits + 31) / 32;

#if defined(__CUDACC__)

template <class T>
__device__ inline T shared_at(const std::byte* at) {
  return *reinterpret_cast<const T*>(at);
}
template <class T>
__device__ inline void put_shared(std::byte* at, const T& x) {
  *reinterpret_cast<T*>(at) = x;
}

/// The widest type that divides kWords words.
template <int kWords>
using MovedWords = std::conditional_t<kWords % 4 == 0, uint4,
                                      std::conditional_t<kWords % 2 == 0, uint2, uint32_t>>;

/// Words from shared memory; `at` is aligned for MovedWords.
template <int kWords>
__device__ void load_shared(const std::byte* at, uint32_t (&to)[kWords]) {
  using Moved = MovedWords<kWords>;
#pragma unroll
  for (size_t i = 0; i < sizeof to; i += sizeof(Moved)) {
    const auto x = shared_at<Moved>(at + i);
#pragma unroll
    for (size_t j = 0; j < sizeof x / 4; ++j) {
      to[i / 4 + j] = reinterpret_cast<const uint32_t*>(&x)[j];
    }
  }
}

/// Words to shared memory, the same way.
template <int kWords>
__device__ void store_shared(std::byte* at, const uint32_t (&from)[kWords]) {
  using Moved = MovedWords<kWords>;
#pragma unroll
  for (size_t i = 0; i < sizeof from; i += sizeof(Moved)) {
    Moved x;
#pragma unroll
    for (size_t j = 0; j < sizeof x / 4; ++j) {
      reinterpret_cast<uint32_t*>(&x)[j] = from[i / 4 + j];
    }
    put_shared(at + i, x);
  }
}

/// The bits of a quarter of a row of kBits per channel; bits after them are undefined, and a word
/// after the row may be read.
template <int kBits, int kDim>
__device__ void load_quarter(const std::byte* row, int quarter,
                             uint32_t (&to)[kQuarterWords<kBits, kDim>]) {
  constexpr int kOwn = kDim / 4 * kBits;
  if constexpr (kOwn % 32 == 0) {
    load_shared(row + kOwn / 8 * quarter, to);
  } else {  // it may begin within a word
    static_assert(kOwn % 8 == 0, "rows are whole words");
    constexpr int kWords = kQuarterWords<kBits, kDim>;
    constexpr bool kOneMore = kOwn % 32 == 24;  // else no quarter reaches further
    const int bit = kOwn * quarter;
    uint32_t words[kWords + 1] = {};
#pragma unroll
    for (int i = 0; i < (kOneMore ? kWords + 1 : kWords); ++i) {
      words[i] = shared_at<uint32_t>(row + bit / 32 * 4 + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = __funnelshift_r(words[i], words[i + 1], bit % 32);
  }
}

/// four() of codes that are multiplied as stored.
template <int kWidth>
__device__ uint32_t four_of(const std::byte* row, int group, int part) {
  const std::byte* from = row + 4 * kWidth * group;
  if constexpr (kWidth == 1) {
    return static_cast<uint32_t>(shared_at<uint8_t>(from + part / 2)) >> part % 2 * 4;
  } else if constexpr (kWidth == 2) {
    return shared_at<uint8_t>(from + part);
  } else if constexpr (kWidth == 4) {
    return shared_at<uint16_t>(from + 2 * part);
  } else {
    return shared_at<uint32_t>(from + 4 * part);
  }
}

#endif

}  // namespace kvlm::codecs
