#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/decode_table.h"
#include "kernels/packed_format.h"

// Arguments of the decode attention kernels, for one layer of a batch. A KV head here
// belongs to one sequence. Its keys and its values are segments: consecutive slots stored alike,
// unpacked or in packed blocks of one format.
//
// A slot is the position of a token in the order in which attention visits them; its place is the
// index of its storage. They differ only if packed tokens are evicted in place (`placed`): places
// of a ring then follow those of all reserved blocks, and empty places are slots too, whose codes
// are read and weigh nothing.
namespace kvlm::cuda::packed {

struct DeviceBlock {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* zeros;
  const uint64_t* live;
  int rows;
  int first_slot;
};

/// Consecutive slots of one KV head whose keys (or values) are stored alike.
struct DeviceSegment {
  const std::byte* rows;  // null: packed
  const float* q;
  const uint64_t* selection;
  // Block 0 of blocks at even strides. Else block_rows is 0 and AttendArgs::blocks lists them.
  DeviceBlock first_block;
  int code_stride;
  int scale_stride;
  int block_rows;
  int packed_rows;
  int listed;  // index of the first block in the list
  int units;   // blocks in the list
  int slots;
  int first_slot;
  int first_place;  // place of the first slot; the slot itself unless DeviceHead::placed
  int selected_of;
  int16_t format;
  DType dtype;
  bool selected_bit;
  // In two passes: the kernel that reads the segment (two_pass.h). -1: none, since it is always
  // empty or row_splits.cu reads it. For values also the index of that kernel among those of the KV
  // head.
  int8_t kernel;
  int8_t pass;
  // Keys: index of the query basis they are multiplied with (QuerySources), -1 for none.
  int8_t source;
};

constexpr int kMostPasses = 4;  // kernels that read the values of a KV head in two passes

/// Splits [first, end) of a KV head.
struct SplitRange {
  int16_t first;
  int16_t end;
};

struct DeviceHead {
  int64_t first_query;  // offset in floats of its (q_per_kv, head_dim) queries and outputs
  const float* q;       // q and out: set by head_of()
  float* out;
  float* weights;  // (q_per_kv, AttendArgs::score_stride): scores, by the value's place
  int slots;
  int first_remap, remaps;
  int first_keys, last_keys, last_values;  // in AttendArgs::segments
  // The one-pass kernel that processes the KV head (fused_table.h, image_choice.h). 0: `passes`
  // kernels of two_pass.h read its values, or row_splits.cu processes it (then `passes` is 1).
  int8_t fused;
  int8_t passes;
  SplitRange splits[kMostPasses];  // by pass over values: splits in which it has slots
  bool selects;                    // some segments of values select their slots
  bool placed;                     // packed tokens are evicted in place (TableHead.placed)
  // One pass, if placed: which packed slots hold a token (PackedRowBits). Null: all do.
  const uint32_t* live;
};

/// DeviceHead::live: the number of slots that hold a token, then a bit for each slot.
struct PackedRowBits {
  static constexpr int kBits = 2;  // index of the first word of bits
  /// Two words more than the bits need: from() reads the word after.
  static VLM_HD constexpr int words(int slots) { return kBits + (slots + 63) / 64 * 2 + 2; }
  /// Bits of slots [slot, slot + 32).
  static __device__ uint32_t from(const uint32_t* live, int slot) {
    const uint32_t* words = live + kBits + slot / 32;
    return __funnelshift_r(words[0], words[1], static_cast<unsigned>(slot));
  }
};

/// Least and greatest score of the slots of a remap, in units of log2. Stored as integers in the
/// same order, for atomicMin() and atomicMax().
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

/// Arguments of every launch of a layer.
struct AttendArgs {
  const DeviceHead* heads;
  const DeviceSegment* segments;
  const DeviceBlock* blocks;
  const PackedFormat* formats;
  const ScoreRemap* remaps;
  ScoreRange* ranges;           // (KV heads of the step, most_remaps, q_per_kv)
  unsigned long long* guarded;  // counts clamped slopes; null: not counted
  // If placed: the place of the value of each key's place, and the reverse (TableArgs).
  const int16_t* value_at;
  const int16_t* key_at;
  int places;
  int most_remaps;
  int score_stride;
  int q_per_kv;
  int head_dim;
  float scale;
  bool weighs;     // keeps scores and states for the attention weights (weigh_rows.h)
  const float* q;  // (rows of the step, kv_heads, q_per_kv, head_dim)
  float* out;      // as q
  // `heads` is (sequence slots, layers, kv_heads), with head_segments segments each. A launch
  // processes the sequences of `step`.
  const TableRow* step;
  int layer;
  int layers;
  int kv_heads;
  int head_segments;
};

/// Index in AttendArgs::heads of KV head `index` of a launch.
__device__ inline int head_at(const AttendArgs& args, int index) {
  return (args.step[index / args.kv_heads].slot * args.layers + args.layer) * args.kv_heads +
         index % args.kv_heads;
}

__device__ inline DeviceHead head_of(const AttendArgs& args, int index) {
  DeviceHead head = args.heads[index];
  head.q = args.q + head.first_query;
  head.out = args.out + head.first_query;
  return head;
}

/// Block `index` of a segment.
__device__ inline DeviceBlock block_of(const DeviceBlock* list, const DeviceSegment& segment,
                                       int index) {
  if (segment.block_rows == 0) return list[segment.listed + index];
  DeviceBlock block = segment.first_block;
  block.codes += static_cast<int64_t>(index) * segment.code_stride;
  block.scales += static_cast<int64_t>(index) * segment.scale_stride;
  if (block.zeros != nullptr) block.zeros += static_cast<int64_t>(index) * segment.scale_stride;
  block.rows = min(segment.block_rows, segment.packed_rows - index * segment.block_rows);
  block.first_slot += index * segment.block_rows;
  return block;
}

__device__ inline float meta_at(const std::byte* from, DType meta, size_t i) {
  return meta == DType::kF16 ? __half2float(reinterpret_cast<const __half*>(from)[i])
                             : reinterpret_cast<const float*>(from)[i];
}

}  // namespace kvlm::cuda::packed
