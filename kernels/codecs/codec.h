#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/packed_format.h"

// How the fused decode attention (kernels/cuda/fused_*.cuh) reads codes of rows of 128 channels
// from shared memory. A codec widens what is stored to codes of kWidth bits, side by side in words,
// lowest first; everything behind is written once for each width. A codec is a struct with
//
//   kSections  the codes that it reads
//   kWidth     1, 2, 4 or 8: bits of a code once it is widened
//   kRowBytes  of a row as it is stored
//   kStride    bytes from a row to the next in shared memory: kRowBytes, or a multiple of 16 above,
//              so that rows fall into other banks
//   quarter()  codes of 32 neighbouring channels of a row
//   four()     codes of 4 neighbouring channels: part 0..7 of a group of 32; bits above them are
//              anything up to the 16th (kWidth up to 4)
//   widen_row(), kWideStride
//              if they are there: what a thread does with a row of values before four() reads it,
//              and the bytes from a widened row to the next
//   prepare()  if it is there: what a block of threads does before it reads codes
//
// and is named in kernels/cuda/fused_table.h.
namespace kvlm::codecs {

/// Channels that are coded alike.
struct Section {
  CodeFormat code;
  int channels;
};

#if defined(__CUDACC__)

template <class T>
__device__ inline T shared_at(const std::byte* at) {
  return *reinterpret_cast<const T*>(at);
}
template <class T>
__device__ inline void put_shared(std::byte* at, const T& x) {
  *reinterpret_cast<T*>(at) = x;
}

#endif

}  // namespace kvlm::codecs
