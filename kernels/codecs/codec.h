#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/packed_format.h"

// How the fused decode attention (kernels/cuda/fused_*.cuh) reads codes of rows from shared memory.
// A codec widens what is stored to codes of kWidth bits, side by side in words, lowest first;
// everything behind is written once for each width. A codec is a template over the channels of a
// row, a multiple of 16, with
//
//   kDim       the channels
//   kSections  the codes that it reads
//   kWidth     1, 2, 4 or 8: bits of a code once it is widened
//   kRowBytes  of a row as it is stored
//   kStride    bytes from a row to the next in shared memory: kRowBytes, or a multiple of 16 above,
//              so that rows fall into other banks
//   quarter()  codes of a quarter of a row, neighbouring channels; bits behind them are anything
//   four()     codes of 4 neighbouring channels: part 0..7 of a group of 32; bits above them are
//              anything up to the 16th (kWidth up to 4). Rows of values that are whole 16 bytes, of
//              kWidth bits a channel or widened, are read without it, by columns of shared memory
//              (ValuesLayout in kernels/cuda/attend/fused_values.cuh)
//   widen_row(), kWideStride
//              if they are there: what a thread does with a row of values before it is read, after
//              which codes of kWidth bits lie side by side; and the bytes to the next widened row
//   prepare()  if it is there: what a block of threads does before it reads codes
//
// and is named in kernels/cuda/attend/instances.cmake.
namespace kvlm::codecs {

/// Channels that are coded alike.
struct Section {
  CodeFormat code;
  int channels;
};

/// kStride of rows of codes of `width` bits.
constexpr int padded_stride(int row_bytes, int width) {
  return row_bytes % 64 != 0 ? row_bytes : row_bytes + (width == 8 ? 32 : 16);
}

/// Words that the codes of a quarter of a row fill, the last of them maybe in part.
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

/// As many words as one instruction moves where there are kWords.
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

/// The bits of a quarter of a row of kBits a channel; behind them is anything, and a
/// word behind the row may be read.
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

/// four() of codes that lie as they are multiplied.
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
