#pragma once

#include <cstddef>

#include "kernels/attend_packed.h"

namespace kvlm::cpu {

/// Whether a row of a block is not evicted.
inline bool is_live(const PackedBlock& block, size_t row) noexcept {
  return block.live == nullptr || ((block.live[row / 64] >> (row % 64)) & 1) != 0;
}

/// The slots of a segment of values, in order.
class SlotWalk {
 public:
  /// `first`: slot at which the segment, or its selection, begins.
  SlotWalk(const SlotSegment& segment, size_t first) noexcept
      : segment_(&segment), next_(first), first_(first) {}

  /// The slot of the segment's next row.
  size_t next() noexcept {
    if (segment_->selection != nullptr) {
      while (selected(next_ - first_) != segment_->selected_bit) ++next_;
    }
    return next_++;
  }

  /// Skips `rows` rows of a dense segment.
  void skip(size_t rows) noexcept { next_ += rows; }

  /// Whether the slots are consecutive.
  bool dense() const noexcept { return segment_->selection == nullptr; }

 private:
  bool selected(size_t i) const noexcept {
    return ((segment_->selection[i / 64] >> (i % 64)) & 1) != 0;
  }

  const SlotSegment* segment_;
  size_t next_;
  size_t first_;
};

/// The softmax weights of a KV head: weight of query i and slot j at of[i * stride + j].
struct SlotWeights {
  const float* of = nullptr;
  size_t stride = 0;
  size_t queries = 0;
};

}  // namespace kvlm::cpu
