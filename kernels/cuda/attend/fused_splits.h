#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "kernels/base/host_device.h"

// How the fused decode attention cuts a lane into splits, which it joins at last. It depends on the
// lane's own length alone, so that a lane's sums do not depend on the rest of the batch. Longer
// splits are faster where many lanes fill a GPU, but leave it idle where few do; and the tensor
// cores cut off digits of every sum, so that the error grows with the rows that a warp adds up.
namespace kvlm::cuda::packed {

/// Slots of a split of a lane of `slots`, of all but the last one.
VLM_HD constexpr int fused_split_slots(int slots) {
  return slots <= 4096 ? 256 : slots <= 16384 ? 512 : 1024;
}

/// Splits of a lane of `slots`.
VLM_HD constexpr int fused_splits_of(int slots) {
  const int split = fused_split_slots(slots);
  return (slots + split - 1) / split;
}

/// Splits of a lane of up to `slots`, at most.
constexpr int most_fused_splits(int slots) {
  int most = 1;
  for (const int limit : {slots, 4096, 16384}) {  // where splits become longer
    const int splits = fused_splits_of(slots < limit ? slots : limit);
    most = splits > most ? splits : most;
  }
  return most;
}

/// Parts of a split, one for each warp of a block of threads.
constexpr int kSplitParts = 4;
constexpr int kPartStep = 32;  // a part has a multiple of it, but for the last ones of a lane

/// Consecutive slots of a lane.
struct SlotRange {
  int first;
  int end;
};

/// The slots of a part of a split, of which there may be none at the end of a lane. The state of a
/// split is made of those of its parts, merged in order.
VLM_HD constexpr SlotRange fused_part(int slots, int split, int part) {
  const int size = fused_split_slots(slots);
  const int first = split * size;
  const int end = first + size < slots ? first + size : slots;
  const int step =
      (end - first + kSplitParts * kPartStep - 1) / (kSplitParts * kPartStep) * kPartStep;
  const int from = first + part * step < end ? first + part * step : end;
  return {from, from + step < end ? from + step : end};
}

/// Whether the parts of a lane are long enough for a warp to take a whole split, part by part. It
/// waits for no other warp then, but parts of 64 slots were no faster (VidKV's were 2 % slower).
VLM_HD constexpr bool fused_parts_are_long(int slots) { return fused_split_slots(slots) > 256; }

/// Which parts of a block's splits a warp takes, one a turn: first whole splits, part by part, as
/// many as every warp can have for itself, then its part of each one that is left.
class WarpParts {
 public:
  /// Of splits [first_split, end_split). If not `may_be_alone`, warps share all.
  VLM_HD constexpr WarpParts(int first_split, int end_split, int warp, bool may_be_alone)
      : first_split_(first_split),
        turns_(end_split - first_split),
        alone_(may_be_alone ? turns_ / kSplitParts * kSplitParts : 0),
        warp_(warp) {}

  VLM_HD constexpr int turns() const { return turns_; }
  /// Whether the warp has the whole split for itself.
  VLM_HD constexpr bool alone(int turn) const { return turn < alone_; }
  VLM_HD constexpr int split(int turn) const {
    const int own = warp_ * (alone_ / kSplitParts) + turn / kSplitParts;
    return first_split_ + (alone(turn) ? own : turn);
  }
  VLM_HD constexpr int part(int turn) const { return alone(turn) ? turn % kSplitParts : warp_; }
  VLM_HD constexpr SlotRange slots(int turn, int lane_slots) const {
    return fused_part(lane_slots, split(turn), part(turn));
  }
  /// Whether the next turn's slots are those behind this one's.
  VLM_HD constexpr bool goes_on(int turn) const { return alone(turn + 1); }

 private:
  int first_split_;
  int turns_;
  int alone_;  // turns in which it is
  int warp_;
};

/// Blocks of threads that share the up to `splits` splits of a lane: as many as a model finds
/// fastest on a GPU that holds `resident` of them, if all lanes are as long. The splits of a block
/// follow each other, which saves the work between them. No result depends on it.
///   lanes  times the blocks that the queries of one take
inline int fused_blocks_of_lane(int64_t lanes, int splits, int resident) {
  // Blocks run in waves. The last one, which is not full, takes more than its share of a full one,
  // every block has something to do before its first split, and some have a split more than others.
  // The first two are fitted to steps and to `vlm-bench kernels` on an H100, with 8 to 48
  // sequences; the last one, which changes none of those choices, is from list scheduling
  // (fused_splits_test.cpp).
  constexpr double kAlone = 0.6;  // of a wave: what one block takes
  constexpr double kBegin = 0.1;  // of a split
  constexpr double kUneven = 0.25;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int blocks = 1; blocks <= splits; ++blocks) {
    const double waves = static_cast<double>(lanes * blocks) / resident;
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
