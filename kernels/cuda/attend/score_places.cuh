#pragma once

#include <climits>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/log2.h"

// What lies between the two passes over a lane: the scores of its keys, in the order in which its
// values lie, and the ranges from which they are remapped. Scores are in units of log2: a score x
// weighs 2^x.
namespace kvlm::cuda::packed {

/// The slope of a remap of scores from `low` to `high`.
///   unit    of scores, in those of `remap`
///   counts  this thread is the one of its query head that counts clamped slopes
__device__ inline float remap_slope(const AttendArgs& args, const ScoreRemap& remap, float low,
                                    float high, bool counts, float unit = 1) {
  if (!(high > low)) return 0;
  const float slope = (high - low + (remap.tau_low - remap.tau_high) * unit) / (high - low);
  if (!remap.guarded || slope >= 0) return slope;
  if (counts && args.guarded != nullptr) atomicAdd(args.guarded, 1ull);
  return 0;
}

/// The ranges of remap `remap` of lane `number` of a step, by query.
__device__ inline ScoreRange* ranges_of(const AttendArgs& args, int number, int remap) {
  return args.ranges + (static_cast<int64_t>(number) * args.most_remaps + remap) * args.q_per_kv;
}

/// Slots up to `end` of a lane that belong to the same remap, or to none (-1).
struct RemapSlots {
  int remap = -1;
  int end = INT_MAX;

  RemapSlots() = default;
  /// Those from `slot` on.
  __device__ RemapSlots(const AttendArgs& args, const DeviceLane& lane, int slot) {
    for (int i = 0; i < lane.remaps; ++i) {
      const ScoreRemap& of = args.remaps[lane.first_remap + i];
      if (slot < of.first) {
        end = min(end, of.first);
      } else if (slot < of.first + of.slots) {
        remap = i;
        end = of.first + of.slots;
        return;
      }
    }
  }
};

/// What a remap makes of scores, of one query head.
struct RemappedScores {
  float slope = 1;
  float low = 0;
  float level = 0;  // of the least score

  RemappedScores() = default;
  /// Of remap `remap` of a lane, -1 for none, once its keys have been scored.
  __device__ RemappedScores(const AttendArgs& args, const DeviceLane& lane, int number, int remap,
                            int query, bool counts) {
    if (remap < 0) return;
    const ScoreRange range = ranges_of(args, number, remap)[query];
    const ScoreRemap of = args.remaps[lane.first_remap + remap];
    low = ScoreRange::score(range.least);
    slope = remap_slope(args, of, low, ScoreRange::score(range.greatest), counts, kLog2e);
    level = low - of.tau_low * kLog2e;
  }
  __device__ float operator()(float score) const { return slope * (score - low) + level; }
};

/// Counts the slopes of a lane's remaps that are clamped, for one query head.
__device__ inline void count_clamped(const AttendArgs& args, const DeviceLane& lane, int number,
                                     int query) {
  for (int i = 0; i < lane.remaps; ++i) {
    static_cast<void>(RemappedScores(args, lane, number, i, query, true));
  }
}

/// Where the value of key slot `first` + warp lane lies in a lane whose values select their slots:
/// those that the first run of a selection holds, then the others. By all threads of a warp.
__device__ inline int selected_slot(const AttendArgs& args, const DeviceLane& lane, int first) {
  const int thread = static_cast<int>(threadIdx.x % 32);
  int slot = first + thread;
  for (int i = lane.last_keys + 1; i <= lane.last_values; ++i) {
    const DeviceRun& run = args.runs[i];
    if (run.selected_of == 0) continue;
    const auto word = [&](int at) {
      return run.selected_bit ? run.selection[at] : ~run.selection[at];
    };
    const int whole = max(0, min(first - run.first_slot, run.selected_of)) / 64;
    int before = 0;  // chosen slots in words before the warp's
    for (int at = thread; at < whole; at += 32) before += __popcll(word(at));
    before = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(before)));
    const int at = first + thread - run.first_slot;
    if (at < 0 || at >= run.selected_of) continue;
    for (int i = whole; i < at / 64; ++i) before += __popcll(word(i));
    const uint64_t bits = word(at / 64);
    before += __popcll(bits & ((uint64_t{1} << at % 64) - 1));
    const bool chosen = (bits >> at % 64 & 1) != 0;
    slot = run.first_slot + (chosen ? before : run.slots + at - before);
  }
  return slot;
}

/// Where the score of the key at `place` + warp lane goes: to the place of its value. -1 where no
/// row is. By all threads of a warp.
///   at  the lane's, of all that a DecodeTable has
__device__ inline int score_place(const AttendArgs& args, const DeviceLane& lane, int at,
                                  int place) {
  if (lane.selects) return selected_slot(args, lane, place);
  place += static_cast<int>(threadIdx.x % 32);
  if (!lane.placed) return place;
  return place < args.places ? args.value_at[static_cast<int64_t>(at) * args.places + place] : -1;
}

}  // namespace kvlm::cuda::packed
