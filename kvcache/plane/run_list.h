#pragma once

#include <memory>
#include <span>

#include "kernels/attend_packed.h"

namespace kvlm {

/// The runs of a KV head, appended to memory that has room for them.
class RunList {
 public:
  explicit RunList(SlotRun* memory) : begin_(memory) {}
  int size() const noexcept { return size_; }
  SlotRun& operator[](int i) noexcept { return begin_[i]; }
  SlotRun& add() noexcept { return *std::construct_at(begin_ + size_++); }
  void insert(int at, const SlotRun& run) noexcept {
    for (int i = size_++; i > at; --i) begin_[i] = begin_[i - 1];
    begin_[at] = run;
  }
  std::span<const SlotRun> from(int first) const noexcept {
    return {begin_ + first, static_cast<size_t>(size_ - first)};
  }

 private:
  SlotRun* begin_;
  int size_ = 0;
};

}  // namespace kvlm
