#pragma once

#include <cmath>
#include <span>

#include "kernels/base/host_device.h"

namespace kvlm {

/// Values instead of a slot to evict. kNoSlot: evict none. kLeastScore: evict the candidate of
/// least score or weight.
inline constexpr int kNoSlot = -1;
inline constexpr int kLeastScore = -2;

/// Candidates for eviction by attention weight (H2O, TOVA), by position in the order of arrival:
/// slots on the host, arrival numbers on a GPU. An empty place (INT32_MAX) is no candidate.
struct LeastWeight {
  int first = 0;   ///< positions before this one stay: the sinks
  int spared = 0;  ///< [spared, spared_end) stay: the prompt's last
  int spared_end = 0;
  int recent = 1;  ///< number of newest tokens that stay

  /// Whether the token at position `slot`, of `slots`, may be evicted.
  VLM_HD constexpr bool may_drop(int slot, int slots) const {
    return slot >= first && slot < slots - recent && (slot < spared || slot >= spared_end);
  }
};

/// The slot that goes, of weights.size(), ties to the newest; -1: none may. Weights that are no
/// numbers are the heaviest.
inline int least_weighed(const LeastWeight& of, std::span<const float> weights) noexcept {
  const auto slots = static_cast<int>(weights.size());
  int least = -1;
  for (int slot = 0; slot < slots; ++slot) {
    if (!of.may_drop(slot, slots)) continue;
    const auto weight = [&](int i) { return weights[static_cast<size_t>(i)]; };
    if (least < 0 || std::isnan(weight(least)) || weight(slot) <= weight(least)) least = slot;
  }
  return least;
}

}  // namespace kvlm
