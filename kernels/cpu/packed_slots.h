#pragma once

#include <cstddef>

#include "kernels/attend_packed.h"

namespace kvlm::cpu {

inline bool is_live(const PackedBlock& block, size_t row) noexcept {
  return block.live == nullptr || ((block.live[row / 64] >> (row % 64)) & 1) != 0;
}

/// The slots of a run of values, in order.
class SlotWalk {
 public:
  /// `first` is the slot where the run, or the selection that it belongs to, begins.
  SlotWalk(const SlotRun& run, size_t first) noexcept : run_(&run), next_(first), first_(first) {}

  /// The slot of the run's next row.
  size_t next() noexcept {
    if (run_->selection != nullptr) {
      while (selected(next_ - first_) != run_->selected_bit) ++next_;
    }
    return next_++;
  }

  /// Passes `rows` rows of a dense run.
  void skip(size_t rows) noexcept { next_ += rows; }

  /// Whether the slots follow each other without gaps.
  bool dense() const noexcept { return run_->selection == nullptr; }

 private:
  bool selected(size_t i) const noexcept {
    return ((run_->selection[i / 64] >> (i % 64)) & 1) != 0;
  }

  const SlotRun* run_;
  size_t next_;
  size_t first_;
};

/// The softmax weights of a lane: weight of query i and slot j at of[i * stride + j].
struct SlotWeights {
  const float* of = nullptr;
  size_t stride = 0;
  size_t queries = 0;
};

}  // namespace kvlm::cpu
