#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "kernels/base/host_device.h"

// How packed KV heads are cut into splits, and splits into parts: one for each of a block's four
// warps. The cut depends on the KV head's length alone, so that its sums do not depend on the
// batch. Longer splits are faster if many KV heads fill the GPU, but leave it idle if few do. Also,
// tensor cores truncate every sum, so the error grows with the tokens that a warp adds.
namespace kvlm::cuda::packed {

/// Slots of each split of a KV head of `slots`, except the last.
VLM_HD constexpr int fused_split_slots(int slots) {
  return slots <= 4096 ? 256 : slots <= 16384 ? 512 : 1024;
}

/// Splits of a KV head of `slots`.
VLM_HD constexpr int fused_splits_of(int slots) {
  const int split = fused_split_slots(slots);
  return (slots + split - 1) / split;
}

/// Most splits of a KV head of up to `slots`.
constexpr int most_fused_splits(int slots) {
  int most = 1;
  for (const int limit : {slots, 4096, 16384}) {  // where splits become longer
    const int splits = fused_splits_of(slots < limit ? slots : limit);
    most = splits > most ? splits : most;
  }
  return most;
}

/// Parts of a split, one per warp of a block.
constexpr int kSplitParts = 4;
constexpr int kPartStep = 32;  // divides the slots of a part, except the last of a KV head

/// Consecutive slots of a KV head.
struct SlotRange {
  int first;
  int end;
};

/// Slots of a part of a split; may be empty at the end of a KV head. The state of a split is that
/// of its parts, merged in order.
VLM_HD constexpr SlotRange fused_part(int slots, int split, int part) {
  const int size = fused_split_slots(slots);
  const int first = split * size;
  const int end = first + size < slots ? first + size : slots;
  const int step =
      (end - first + kSplitParts * kPartStep - 1) / (kSplitParts * kPartStep) * kPartStep;
  const int from = first + part * step < end ? first + part * step : end;
  return {from, from + step < end ? from + step : end};
}

/// Whether parts are long enough for a warp to take a whole split, part by part, without waiting
/// for other warps. With parts of 64 slots this was no faster (VidKV: 2 % slower).
VLM_HD constexpr bool fused_parts_are_long(int slots) { return fused_split_slots(slots) > 256; }

/// The parts that a warp takes of a block's splits, one per turn. First whole splits, part by part,
/// as many for each warp; then its own part of each remaining split.
class WarpParts {
 public:
  /// Of splits [first_split, end_split). If not `may_be_alone`, warps share all of them.
  VLM_HD constexpr WarpParts(int first_split, int end_split, int warp, bool may_be_alone)
      : first_split_(first_split),
        turns_(end_split - first_split),
        alone_(may_be_alone ? turns_ / kSplitParts * kSplitParts : 0),
        warp_(warp) {}

  VLM_HD constexpr int turns() const { return turns_; }
  /// Whether the warp takes the whole split of this turn.
  VLM_HD constexpr bool alone(int turn) const { return turn < alone_; }
  VLM_HD constexpr int split(int turn) const {
    const int own = warp_ * (alone_ / kSplitParts) + turn / kSplitParts;
    return first_split_ + (alone(turn) ? own : turn);
  }
  VLM_HD constexpr int part(int turn) const { return alone(turn) ? turn % kSplitParts : warp_; }
  VLM_HD constexpr SlotRange slots(int turn, int head_slots) const {
    return fused_part(head_slots, split(turn), part(turn));
  }
  /// Whether the next turn's slots follow this one's.
  VLM_HD constexpr bool goes_on(int turn) const { return alone(turn + 1); }

 private:
  int first_split_;
  int turns_;
  int alone_;  // turns with alone()
  int warp_;
};

/// Blocks that share the up to `splits` splits of a KV head: the fastest number by a model of
/// waves, on a GPU with `resident` blocks and with KV heads of one length. No result depends on it.
///   heads  KV heads times fused_query_blocks()
inline int fused_blocks_of_head(int64_t heads, int splits, int resident) {
  // A last wave that is not full takes more than its share of a full one, every block has work
  // before its first split, and some have one split more. kAlone and kBegin are fitted to steps and
  // to `vlm-bench kernels` on an H100, with 8 to 48 sequences. kUneven, which changes none of those
  // choices, is from list scheduling (fused_splits_test.cpp).
  constexpr double kAlone = 0.6;  // time of one block alone, in waves
  constexpr double kBegin = 0.1;  // work before the first split, in splits
  constexpr double kUneven = 0.25;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int blocks = 1; blocks <= splits; ++blocks) {
    const double waves = static_cast<double>(heads * blocks) / resident;
    const double full = std::floor(waves);
    const double last = waves > full ? kAlone + (1 - kAlone) * (waves - full) : 0;
    const double mean = static_cast<double>(splits) / blocks;
    const double time = (full + last) * (mean + kUneven * (std::ceil(mean) - mean) + kBegin);
    if (time < least) {
      least = time;
      best = blocks;
    }
  }
  return best;
}

}  // namespace kvlm::cuda::packed
