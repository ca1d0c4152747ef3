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

/// Consecutive slots of one lane whose keys (or values) are stored alike.
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
  int units;   // blocks in the list
  int slots;
  int first_slot;
  int first_place;  // the place of the first slot (DeviceTail), of a lane that is not placed itself
  int selected_of;
  int16_t format;
  DType dtype;
  bool selected_bit;
  // Of a lane that two passes serve: which kernel of that side reads the run (two_pass.h), -1 if it
  // is empty for good; and of values, which of the lane's kernels that is.
  int8_t kernel;
  int8_t pass;
  // Of keys: which of the lane's queries they meet (fused_keys.cuh), -1 of none.
  int8_t source;
};

constexpr int kMostPasses = 4;  // kernels that read the values of a lane that two passes serve

/// Splits [first, end) of a lane.
struct SplitRange {
  int16_t first;
  int16_t end;
};

struct DeviceLane {
  int64_t first_query;  // floats from the queries of the step to the lane's, (q_per_kv, head_dim)
  const float* q;       // them, and their outputs: lane_of() says where
  float* out;
  float* weights;  // (q_per_kv, AttendArgs::score_stride) scores, by places of values
  int slots;
  int first_remap, remaps;
  int first_keys, last_keys, last_values;  // runs
  // The kernel that serves the lane in one pass (fused_table.h, picture_choice.h); 0: two passes
  // do, in which `passes` kernels read values, or row_pieces.cu does, which is one pass.
  int8_t fused;
  int8_t passes;
  SplitRange splits[kMostPasses];  // of each pass over values, those in which it has slots
  bool selects;                    // some runs of values select their slots
  bool placed;                     // TableLane.placed
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

/// The least and the greatest score of the slots of a remap, in units of log2, so that integers
/// compare as the scores do.
struct ScoreRange {
  int least;
  int greatest;

  static __device__ int ordered(float score) {
    const int bits = __float_as_int(score);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
  }
  static __device__ float score(int ordered) {
    return __int_as_float(ordered >= 0 ? ordered : ordered ^ 0x7fffffff);
  }
};

/// Everything a launch reads.
struct AttendArgs {
  const DeviceLane* lanes;
  const DeviceRun* runs;
  const DeviceBlock* blocks;
  const PackedFormat* formats;
  const ScoreRemap* remaps;
  ScoreRange* ranges;           // (lanes of the step, most_remaps, q_per_kv)
  unsigned long long* guarded;  // counts slopes that were clamped; null: nobody asks
  // TableArgs: of lanes that are placed, where the other half of each place's row is.
  const int16_t* value_at;
  const int16_t* key_at;
  int places;
  int most_remaps;
  int score_stride;
  int q_per_kv;
  int head_dim;
  float scale;
  bool weighs;     // scores and states are kept, from which weights follow (weigh_rows.h)
  const float* q;  // (rows of the step, heads, q_per_kv, head_dim)
  float* out;
  // Lanes are (slots, layers, heads), with as many runs each. A launch serves those of a step.
  const TableRow* step;
  int layer;
  int layers;
  int heads;
  int lane_runs;
};

/// The lane that is number `index` of a launch.
__device__ inline int lane_at(const AttendArgs& args, int index) {
  return (args.step[index / args.heads].slot * args.layers + args.layer) * args.heads +
         index % args.heads;
}

__device__ inline DeviceLane lane_of(const AttendArgs& args, int index) {
  DeviceLane lane = args.lanes[index];
  lane.q = args.q + lane.first_query;
  lane.out = args.out + lane.first_query;
  return lane;
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

__device__ inline float meta_at(const std::byte* from, DType meta, size_t i) {
  return meta == DType::kF16 ? __half2float(reinterpret_cast<const __half*>(from)[i])
                             : reinterpret_cast<const float*>(from)[i];
}

}  // namespace kvlm::cuda::packed
