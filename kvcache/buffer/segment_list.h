#pragma once

#include <memory>
#include <span>

#include "kernels/attend_packed.h"

namespace kvlm {

/// Appends segments of a KV head to memory that the caller has reserved.
class SegmentList {
 public:
  explicit SegmentList(SlotSegment* memory) : begin_(memory) {}
  int size() const noexcept { return size_; }
  SlotSegment& operator[](int i) noexcept { return begin_[i]; }
  SlotSegment& add() noexcept { return *std::construct_at(begin_ + size_++); }
  void insert(int at, const SlotSegment& segment) noexcept {
    for (int i = size_++; i > at; --i) begin_[i] = begin_[i - 1];
    begin_[at] = segment;
  }
  std::span<const SlotSegment> from(int first) const noexcept {
    return {begin_ + first, static_cast<size_t>(size_ - first)};
  }

 private:
  SlotSegment* begin_;
  int size_ = 0;
};

}  // namespace kvlm
