#pragma once

#include <array>
#include <cstddef>

#include "kernels/packed_format.h"

// Layout of a packed format's channels in working memory, and tile sizes. Each section is padded to
// a multiple of 32 channels, so that it begins at a whole vector; widths count padded channels, and
// padding is multiplied by 0. A quad is the four codes in a dword that one product takes, a byte
// each: four channels of a key, or four rows of a channel of values.
namespace kvlm::cpu::vnni {

inline constexpr size_t kKeyRows = 32;       // of a tile of keys: two vectors of scores per query
inline constexpr size_t kValueRows = 64;     // of a tile of values
inline constexpr size_t kMostQueries = 4;    // of one pass over a tile
inline constexpr size_t kMaxKeyWidth = 512;  // padded channels of keys
/// Dwords from the bytes of one query to the next: a constant saves registers, and an odd number of
/// cache lines maps four queries to different sets of the L1 cache.
inline constexpr size_t kByteStride = kMaxKeyWidth + 16;
/// Bytes from a vector of 16 channels of a tile of values to the next.
inline constexpr size_t kTileStride = kValueRows * 16;
/// Bytes after a row of unpacked codes that may be written and read.
inline constexpr size_t kRowSlack = 64;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/// Whether five ternary digits of a code fill a byte.
template <class Code>
inline constexpr bool kIsTrits =
    Code::kUnitCodes == 5 && Code::kUnitBytes == 1 && Code::kMaxCode == 2;

struct PaddedSection {
  const PackedSection* stored = nullptr;
  size_t row_offset = 0;     // bytes of a row before it
  size_t first_channel = 0;  // of the format
  size_t first = 0;          // its first padded channel
  size_t width = 0;
  // Of keys:
  size_t codes_per_byte = 1;  // also 1 if codes are unpacked to bytes first
  bool unpack = true;
  size_t columns = 0;  // dwords of a row
};

struct PaddedFormat {
  std::array<PaddedSection, 2> section;
  size_t sections = 0;
  size_t width = 0;
};

PaddedFormat pad(const PackedFormat& format);

/// The padded channel of channel `c` of a section of keys.
inline size_t padded_channel(const PaddedSection& section, size_t c) {
  if (section.codes_per_byte != 5) return section.first + c;
  // Twenty trits are a dword of four bytes; every fifth is in the same quad.
  return section.first + c / 20 * 20 + c % 5 * 4 + c % 20 / 5;
}

/// Allocates arrays from scratch memory, aligned to cache lines.
class BumpAllocator {
 public:
  explicit BumpAllocator(std::byte* memory) : next_(memory) {}
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += round_up(count * sizeof(T), 64);
    return taken;
  }

 private:
  std::byte* next_;
};

}  // namespace kvlm::cpu::vnni
