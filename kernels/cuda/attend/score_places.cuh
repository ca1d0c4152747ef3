#pragma once

#include <climits>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/log2.h"

// Between the two passes over a KV head: scores are stored by the place of the token's value, with
// the ranges from which they are remapped. Scores are in units of log2: a score x weighs 2^x.
namespace kvlm::cuda::packed {

/// Slope of a remap (ScoreRemap) of scores from `low` to `high`.
///   counts  this thread counts clamped slopes for its query head
///   unit    of `low` and `high`, per unit of `remap`: kLog2e for scores in units of log2
__device__ inline float remap_slope(const AttendArgs& args, const ScoreRemap& remap, float low,
                                    float high, bool counts, float unit = 1) {
  if (!(high > low)) return 0;
  const float slope = (high - low + (remap.tau_low - remap.tau_high) * unit) / (high - low);
  if (!remap.guarded || slope >= 0) return slope;
  if (counts && args.guarded != nullptr) atomicAdd(args.guarded, 1ull);
  return 0;
}

/// Ranges of remap `remap` of KV head `number` of a step, by query.
__device__ inline ScoreRange* ranges_of(const AttendArgs& args, int number, int remap) {
  return args.ranges + (static_cast<int64_t>(number) * args.most_remaps + remap) * args.q_per_kv;
}

/// Slots up to `end` of a KV head that have the same remap, or none (-1).
struct RemapSlots {
  int remap = -1;
  int end = INT_MAX;

  RemapSlots() = default;
  /// Those from `slot` on.
  __device__ RemapSlots(const AttendArgs& args, const DeviceHead& head, int slot) {
    for (int i = 0; i < head.remaps; ++i) {
      const ScoreRemap& of = args.remaps[head.first_remap + i];
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

/// The remap of scores of one query head: slope * (score - low) + level.
struct RemappedScores {
  float slope = 1;
  float low = 0;
  float level = 0;  // remapped least score

  RemappedScores() = default;
  /// Remap `remap` of a KV head, -1 for none, after its keys have been scored.
  __device__ RemappedScores(const AttendArgs& args, const DeviceHead& head, int number, int remap,
                            int query, bool counts) {
    if (remap < 0) return;
    const ScoreRange range = ranges_of(args, number, remap)[query];
    const ScoreRemap of = args.remaps[head.first_remap + remap];
    low = ScoreRange::score(range.least);
    slope = remap_slope(args, of, low, ScoreRange::score(range.greatest), counts, kLog2e);
    level = low - of.tau_low * kLog2e;
  }
  __device__ float operator()(float score) const { return slope * (score - low) + level; }
};

/// Counts the clamped slopes of a KV head's remaps, for one query head.
__device__ inline void count_clamped(const AttendArgs& args, const DeviceHead& head, int number,
                                     int query) {
  for (int i = 0; i < head.remaps; ++i) {
    static_cast<void>(RemappedScores(args, head, number, i, query, true));
  }
}

/// Slot of the value of key slot `first` + warp lane, in a KV head whose values select their slots:
/// first the slots of the selection's first segment, then the others. By all threads of a warp.
__device__ inline int selected_slot(const AttendArgs& args, const DeviceHead& head, int first) {
  const int thread = static_cast<int>(threadIdx.x % 32);
  int slot = first + thread;
  for (int i = head.last_keys + 1; i <= head.last_values; ++i) {
    const DeviceSegment& segment = args.segments[i];
    if (segment.selected_of == 0) continue;
    const auto word = [&](int at) {
      return segment.selected_bit ? segment.selection[at] : ~segment.selection[at];
    };
    const int whole = max(0, min(first - segment.first_slot, segment.selected_of)) / 64;
    int before = 0;  // chosen slots in words before the warp's
    for (int at = thread; at < whole; at += 32) before += __popcll(word(at));
    before = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(before)));
    const int at = first + thread - segment.first_slot;
    if (at < 0 || at >= segment.selected_of) continue;
    for (int i = whole; i < at / 64; ++i) before += __popcll(word(i));
    const uint64_t bits = word(at / 64);
    before += __popcll(bits & ((uint64_t{1} << at % 64) - 1));
    const bool chosen = (bits >> at % 64 & 1) != 0;
    slot = segment.first_slot + (chosen ? before : segment.slots + at - before);
  }
  return slot;
}

/// Place of the value whose key is at `place` + warp lane; -1 if there is none. By all threads of a
/// warp.
///   at  index of the KV head in AttendArgs::heads
__device__ inline int score_place(const AttendArgs& args, const DeviceHead& head, int at,
                                  int place) {
  if (head.selects) return selected_slot(args, head, place);
  place += static_cast<int>(threadIdx.x % 32);
  if (!head.placed) return place;
  return place < args.places ? args.value_at[static_cast<int64_t>(at) * args.places + place] : -1;
}

}  // namespace kvlm::cuda::packed
