#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/buffer/segment_list.h"

namespace kvlm {

/// A ring buffer of unpacked tokens, oldest first, in memory passed to place().
class RowRing {
 public:
  /// Starts empty, with capacity for `places` tokens.
  void place(std::byte* memory, int64_t places, size_t row_bytes) noexcept;

  int size() const noexcept { return size_; }
  int places() const noexcept { return places_; }
  int first() const noexcept { return first_; }  ///< place of the oldest token
  size_t bytes() const noexcept { return static_cast<size_t>(size_) * row_bytes_; }
  std::byte* begin() const noexcept { return memory_; }  ///< address of place 0
  /// Tokens from row(0) up to the end of the memory; the others continue at place 0.
  int before_wrap() const noexcept { return std::min(size_, places_ - first_); }
  int place_of(int row) const noexcept {
    const int place = first_ + row;  // no division: runs for every KV head of a step
    return place < places_ ? place : place - places_;
  }
  /// Token i; 0 is the oldest.
  std::byte* row(int i) const noexcept {
    assert(i >= 0 && i < size_);
    return at(i);
  }

  /// Appends `rows` tokens, which the caller writes to the returned address. More than one must not
  /// wrap.
  std::byte* push(int rows = 1) noexcept;
  /// Removes the oldest tokens.
  void pop(int rows) noexcept;
  /// Removes token i; the caller closes the gap before any access.
  RowGap evict(int i) noexcept;
  /// Sets the place of the oldest token and the number of tokens.
  void take(int first, int size) noexcept { first_ = first, size_ = size; }
  /// Copies the first `places` ring entries of another ring, from its oldest token on. Entries keep
  /// their places if both rings have the same capacity.
  ///   copies  output, appended
  void copy(const RowRing& other, int places, std::vector<ByteRange>& copies);

  /// Appends one segment, or two if the ring wraps, oldest tokens first.
  void add_to(SegmentList& segments, DType dtype) const noexcept;

 private:
  std::byte* at(int i) const noexcept {
    return memory_ + static_cast<size_t>(place_of(i)) * row_bytes_;
  }

  std::byte* memory_ = nullptr;
  uint32_t row_bytes_ = 0;
  int places_ = 0;
  int first_ = 0;
  int size_ = 0;
};

}  // namespace kvlm
