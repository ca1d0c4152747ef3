#include "kvcache/buffer/row_ring.h"

#include <utility>

namespace kvlm {

void RowRing::place(std::byte* memory, int64_t places, size_t row_bytes) noexcept {
  memory_ = memory;
  row_bytes_ = static_cast<uint32_t>(row_bytes);
  places_ = static_cast<int>(places);
  first_ = size_ = 0;
}

std::byte* RowRing::push(int rows) noexcept {
  assert(size_ + rows <= places_ && (rows == 1 || first_ + size_ + rows <= places_));
  std::byte* newest = at(size_);
  size_ += rows;
  return newest;
}

void RowRing::pop(int rows) noexcept {
  assert(rows <= size_);
  if (rows == 0) return;
  first_ = size_ == rows ? 0 : place_of(rows);
  size_ -= rows;
}

RowGap RowRing::evict(int i) noexcept {
  const bool from_front = 2 * i < size_;  // move the smaller part
  const RowGap gap{memory_, row_bytes_, places_, first_, size_, i, from_front};
  if (from_front) first_ = place_of(1);
  --size_;
  return gap;
}

void RowRing::copy(const RowRing& other, int places, std::vector<ByteRange>& copies) {
  size_ = other.size_;
  if (places_ == other.places_) first_ = other.first_;
  for (int row = 0; row < places;) {
    const int before_ends = std::min(places_ - place_of(row), other.places_ - other.place_of(row));
    const int rows = std::min(places - row, before_ends);
    copies.push_back({other.at(row), at(row), static_cast<size_t>(rows) * row_bytes_});
    row += rows;
  }
}

void RowRing::add_to(SegmentList& segments, DType dtype) const noexcept {
  const int first = before_wrap();
  for (const auto& [begin, count] : {std::pair(0, first), std::pair(first, size_ - first)}) {
    if (count == 0) continue;
    SlotSegment& segment = segments.add();
    segment.slots = count;
    segment.rows = row(begin);
    segment.dtype = dtype;
  }
}

}  // namespace kvlm
