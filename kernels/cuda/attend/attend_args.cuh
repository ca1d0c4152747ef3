#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/decode_table.h"
#include "kernels/packed_format.h"

// A layer of a batch as the host describes it to the kernels of packed lanes: lanes (each is
// one KV head of one sequence), their runs of slots that are stored alike, blocks and formats.
namespace kvlm::cuda::packed {

struct DeviceBlock {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* zeros;
  const uint64_t* live;
  int rows;
  int first_slot;  // of the lane
};

/// Slots of one lane whose keys (or values) are stored alike, cut into splits of work.
struct DeviceRun {
  const std::byte* rows;  // null: packed
  const float* q;
  const uint64_t* selection;
  // Blocks that lie evenly, counted from this one; else block_rows is 0 and they are listed.
  DeviceBlock first_block;
  int code_stride;
  int scale_stride;
  int block_rows;
  int packed_rows;
  int listed;  // index of the first block in the list
  int units;   // blocks, or of full rows slots
  int step;    // units of a split
  int splits;
  int first_part;  // of values: where the sums of split 0 go
  int lane;
  int slots;
  int first_slot;
  int selected_of;
  int16_t format;
  DType dtype;
  bool selected_bit;
  int16_t range;  // of a deferred lane: 0, or 1 + the remap that all its slots belong to
  // Of a DecodeTable: the kernel that serves the run, -1 if it is empty for good; and its Cut.
  int16_t kernel;
  int8_t cut;
  // Of a fused lane: which of its queries these keys meet (fused_keys.cuh), -1 of none.
  int8_t source;
};

struct DeviceLane {
  const float* q;
  float* weights;
  float* out;
  int slots;
  int first_remap, remaps;
  int first_weighting;                     // of a deferred lane: those of no remap, then of each
  int first_part, parts;                   // partial outputs
  int first_keys, last_keys, last_values;  // runs
  // Scores become weights when values are added, not by a pass of their own.
  bool deferred;
  // Weights lie in the order of the runs of values, some of which select their slots.
  bool in_run_order;
  // The kernel that serves the lane in one pass (fused_table.h, picture_choice.h); 0: the others
  // do.
  int8_t fused;
  bool placed;  // TableLane.placed: weigh_places() makes its weights, if no kernel in one pass does
  // Which packed slots of a placed lane that a kernel serves in one pass have rows (PackedRowBits);
  // null: all have.
  const uint32_t* live;
};

/// What DeviceLane::live points to: how many slots have rows, and a bit for each slot.
struct PackedRowBits {
  static constexpr int kBits = 2;  // the first word of bits
  /// With two words more than bits need, so that 32 bits from any of them on can be read.
  static VLM_HD constexpr int words(int slots) { return kBits + (slots + 63) / 64 * 2 + 2; }
  /// The bits of 32 slots from `slot` on.
  static __device__ uint32_t from(const uint32_t* live, int slot) {
    const uint32_t* words = live + kBits + slot / 32;
    return __funnelshift_r(words[0], words[1], static_cast<unsigned>(slot));
  }
};

/// Scores s of a range of slots weigh 2^(slope (s - top) + level).
struct ScoreWeighting {
  float slope;
  float top;
  float level;

  __device__ float operator()(float score) const {
    float weight;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(fmaf(slope, score - top, level)));
    return weight;
  }
};

/// A split of a run: units [first, first + count).
struct Split {
  int lane;
  int run;
  int first;
  int count;
  int part;
};

/// Everything a launch reads.
struct AttendArgs {
  const DeviceLane* lanes;
  const DeviceRun* runs;
  const DeviceBlock* blocks;
  const PackedFormat* formats;
  const ScoreRemap* remaps;
  float* parts;   // (splits of values, q_per_kv, head_dim)
  float* masses;  // (splits of values, q_per_kv) sums of weights, of deferred lanes
  float2* ends;   // (splits of keys, q_per_kv) least and greatest score, of deferred lanes
  ScoreWeighting* weightings;   // (lanes' ranges, q_per_kv)
  unsigned long long* guarded;  // counts slopes that were clamped; null: nobody asks
  int q_per_kv;
  int head_dim;
  float scale;
  int64_t q_moved;    // floats from where queries were
  int64_t out_moved;  // and outputs
  // Lanes are (slots, layers, heads) and have as many runs each. A launch serves the lanes of a
  // step, of their runs those at some positions that are of its kernel.
  const TableRow* step;
  int layer;
  int layers;
  int heads;
  int lane_runs;
  int kernel;
  int position_count;
  uint64_t positions;  // 4 bits each
};

/// The lane that is number `index` of a launch.
__device__ inline int lane_at(const AttendArgs& args, int index) {
  return (args.step[index / args.heads].slot * args.layers + args.layer) * args.heads +
         index % args.heads;
}

__device__ inline DeviceLane lane_of(const AttendArgs& args, int index) {
  DeviceLane lane = args.lanes[index];
  lane.q += args.q_moved;
  lane.out += args.out_moved;
  return lane;
}

/// How the scores of a run of a deferred lane are weighed, by query head.
__device__ inline ScoreWeighting* weightings_of(const AttendArgs& args, int lane, int range) {
  return args.weightings +
         static_cast<int64_t>(args.lanes[lane].first_weighting + range) * args.q_per_kv;
}

/// Piece blockIdx.y of run blockIdx.x of a launch; false if there is none.
__device__ inline bool find_split(const AttendArgs& args, Split& split) {
  const auto index = static_cast<int>(blockIdx.x);
  const auto position = static_cast<int>(args.positions >> (index % args.position_count * 4) & 15);
  split.run = lane_at(args, index / args.position_count) * args.lane_runs + position;
  if (args.runs[split.run].kernel != args.kernel) return false;
  const DeviceRun& run = args.runs[split.run];
  const auto number = static_cast<int>(blockIdx.y);
  if (number >= run.splits) return false;
  split.lane = run.lane;
  split.first = number * run.step;
  split.count = max(0, min(run.step, run.units - split.first));
  split.part = run.first_part + number;
  return true;
}

/// Block `index` of a run, or of the list where it does not lie evenly.
__device__ inline DeviceBlock block_of(const DeviceBlock* list, const DeviceRun& run, int index) {
  if (run.block_rows == 0) return list[run.listed + index];
  DeviceBlock block = run.first_block;
  block.codes += static_cast<int64_t>(index) * run.code_stride;
  block.scales += static_cast<int64_t>(index) * run.scale_stride;
  if (block.zeros != nullptr) block.zeros += static_cast<int64_t>(index) * run.scale_stride;
  block.rows = min(run.block_rows, run.packed_rows - index * run.block_rows);
  block.first_slot += index * run.block_rows;
  return block;
}

/// The slope of a remap of scores from `low` to `high`. `counts`: this thread is the one of its
/// query head that counts clamped slopes.
__device__ inline float remap_slope(const AttendArgs& args, const ScoreRemap& remap, float low,
                                    float high, bool counts) {
  if (!(high > low)) return 0;
  const float slope = (high - low + remap.tau_low - remap.tau_high) / (high - low);
  if (!remap.guarded || slope >= 0) return slope;
  if (counts && args.guarded != nullptr) atomicAdd(args.guarded, 1ull);
  return 0;
}

__device__ inline float meta_at(const std::byte* from, DType meta, size_t i) {
  return meta == DType::kF16 ? __half2float(reinterpret_cast<const __half*>(from)[i])
                             : reinterpret_cast<const float*>(from)[i];
}

}  // namespace kvlm::cuda::packed
