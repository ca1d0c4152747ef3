#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/plane/run_list.h"

namespace kvlm {

/// A ring of rows in full precision, oldest first, in memory that it is given.
class RowRing {
 public:
  /// Starts empty, in memory of so many rows.
  void place(std::byte* memory, int64_t places, size_t row_bytes) noexcept;

  int size() const noexcept { return size_; }
  int places() const noexcept { return places_; }
  int first() const noexcept { return first_; }  ///< place of the oldest row
  size_t bytes() const noexcept { return static_cast<size_t>(size_) * row_bytes_; }
  std::byte* begin() const noexcept { return memory_; }  ///< the first place
  /// Rows that lie side by side from row(0); the others do so from the first place.
  int before_wrap() const noexcept { return std::min(size_, places_ - first_); }
  int place_of(int row) const noexcept {
    const int place = first_ + row;  // no division: this is done for every KV head of a step
    return place < places_ ? place : place - places_;
  }
  /// Row i, 0 the oldest.
  std::byte* row(int i) const noexcept {
    assert(i >= 0 && i < size_);
    return at(i);
  }

  /// Room for `rows` more, the newest; the caller fills it. Several lie side by side: the ring has
  /// not wrapped yet.
  std::byte* push(int rows = 1) noexcept;
  /// Forgets the oldest.
  void pop(int rows) noexcept;
  /// Row i leaves a gap, which the caller closes before anything reads these rows.
  RowGap evict(int i) noexcept;
  /// So many rows are there now, the oldest in this place.
  void take(int first, int size) noexcept { first_ = first, size_ = size; }
  /// Becomes as long as another ring, of whose places, from its oldest row on, the first are
  /// copied. Rows lie as they do there if the rings are alike.
  ///   copies  returned, appended
  void copy(const RowRing& other, int places, std::vector<ByteRange>& copies);

  /// Appends its runs, oldest rows first: two at most.
  void add_to(RunList& runs, DType dtype) const noexcept;

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
