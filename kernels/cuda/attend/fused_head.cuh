#pragma once

#include "kernels/codecs/codec.h"
#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/packed_mma.cuh"
#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/device/launch.cuh"

// How a warp of fused_kernel.cuh or two_pass.cuh walks over its slots: in items of up to 32, each
// within one packed block (or one segment of f16 tokens) of keys, of values, or of both. Then the
// half-precision arithmetic that keys and values share.
namespace kvlm::cuda::packed {

constexpr int kItemSlots = 32;
constexpr int kItemTiles = kItemSlots / kTileSlots;
static_assert(kSplitParts == kWarps && kPartStep == kItemSlots);

/// Groups of 32 channels of a token. If the last is half a group, it takes one product, not two.
constexpr int channel_groups(int dim) { return (dim + kChannelGroup - 1) / kChannelGroup; }

/// Scales of a token with one scale for each group of channels.
constexpr int scale_groups(Scaled scaled, int dim) {
  return scaled == Scaled::kToken64 ? dim / 64 : channel_groups(dim);
}

/// Padding in bytes between the quarters of the channels' scales in shared memory. Four threads
/// read them at a time, in different banks.
constexpr int quarter_pad(int dim) { return dim / 2 % 64 == 0 ? 16 : 0; }
/// Offset in bytes of a padded quarter.
template <int kDim>
constexpr __device__ int apart_quarter(int quarter) {
  return quarter * (kDim / 2 + quarter_pad(kDim));
}

/// Properties of a segment that a warp reads for every item, in one register.
class SegmentFacts {
 public:
  SegmentFacts() = default;
  /// A segment of f16 tokens, until take() adds a packed format.
  __device__ SegmentFacts(int segment, int8_t source)
      : bits_(static_cast<uint32_t>(segment) | static_cast<uint32_t>(source) << kSourceBit) {}
  __device__ void take(const PackedFormat& format) {
    bits_ |= kCoded;
    if (format.sections == 2) bits_ |= kTwoSections;
    for (int i = 0; i < 2; ++i) {
      if (format.section[i].zero_stored) bits_ |= 1u << (kStoredBit + i);
    }
  }

  __device__ int segment() const { return static_cast<int>(bits_ & kSegments); }  ///< index
  __device__ bool coded() const { return (bits_ & kCoded) != 0; }  ///< else f16 tokens
  __device__ bool two_sections() const { return (bits_ & kTwoSections) != 0; }
  __device__ bool zero_stored(int section) const {
    return (bits_ >> (kStoredBit + section) & 1) != 0;
  }
  /// Marks a segment that another kernel reads.
  __device__ void pass_by() { bits_ = (bits_ & ~kCoded) | kPassedBy; }
  __device__ bool passed_by() const { return (bits_ & kPassedBy) != 0; }
  /// Index of the query basis; unused for V.
  __device__ int source() const { return static_cast<int>(bits_ >> kSourceBit); }

 private:
  static constexpr uint32_t kSegments = 0xff;
  static constexpr uint32_t kCoded = 1 << 8;
  static constexpr uint32_t kTwoSections = 1 << 9;
  static constexpr int kStoredBit = 10;  // section 0; then section 1
  static constexpr uint32_t kPassedBy = 1 << 12;
  static constexpr int kSourceBit = 16;
  static_assert(kMostFusedSegments <= kSegments);

  uint32_t bits_;
};

/// A segment in shared memory.
struct HeadSegment {
  DeviceSegment segment;
  PackedFormat format;  // if packed
  int meta;             // Place::meta
  SegmentFacts facts;

  /// Reads AttendArgs::segments[index], which becomes segment `number` of the block.
  __device__ void take(const AttendArgs& args, int index, int number) {
    segment = args.segments[index];
    facts = SegmentFacts(number, segment.source);
    if (segment.rows != nullptr || segment.slots == 0) return;
    format = args.formats[segment.format];
    facts.take(format);
    meta = format.axis == ScaleAxis::kChannel ? static_cast<int>(format.zeros(1))
           : format.axis == ScaleAxis::kToken ? 1
                                              : 0;
  }
  /// Place of a slot of this segment; its scores are stored there.
  __device__ int place_of(int slot) const {
    return segment.first_place + (slot - segment.first_slot);
  }
};

/// Codes of V as they are multiplied: as copied, or widened first, one token per thread.
template <class C>
struct WideRows {
  static constexpr int kStride = C::kStride;
  static constexpr int kBytes = 0;
};
template <class C>
requires(C::kWideStride > 0) struct WideRows<C> {
  static constexpr int kStride = C::kWideStride;
  static constexpr int kBytes = kItemSlots * C::kWideStride;
};

enum Side { kKeySide, kValueSide, kSides };

/// The memory from which a warp currently reads keys (or values): blocks at even strides. Stored
/// in shared memory, since all threads of a warp have the same and registers are scarce.
struct alignas(16) Place {
  const std::byte* codes;  // of the first block; or f16 tokens
  const std::byte* scales;
  const std::byte* zeros;
  int code_stride;  // bytes from a block to the next
  int scale_stride;
  int begin;  // first slot
  SegmentFacts facts;
  int meta;         // kChannel: zero points stored in a block; kToken: 1; kHead: 0
  int first_block;  // block and row of the slot that take() looked up
  int first_row;

  /// Looks up a slot of a segment: the whole segment, or its one block with the slot if blocks are
  /// listed. Sets the rows of a block, and the slot at which the memory ends.
  __device__ void take(const AttendArgs& args, const HeadSegment* segments, int index, int slot,
                       int& block_rows, int& end) {
    take_segment(args, segments[index], slot, block_rows, end);
    facts = segments[index].facts;
    first_block = (slot - begin) / block_rows;
    first_row = slot - begin - first_block * block_rows;
  }

 private:
  __device__ void take_segment(const AttendArgs& args, const HeadSegment& head_segment, int slot,
                               int& block_rows, int& end) {
    const DeviceSegment& segment = head_segment.segment;
    meta = head_segment.meta;
    begin = segment.first_slot;
    end = begin + segment.slots;
    if (segment.rows != nullptr || head_segment.facts.passed_by()) {
      codes = segment.rows;
      scales = zeros = nullptr;
      code_stride = scale_stride = 0;
      block_rows = segment.slots;
      return;
    }
    code_stride = segment.code_stride;
    scale_stride = segment.scale_stride;
    block_rows = segment.block_rows;
    if (block_rows != 0) return take_block(segment.first_block);
    int index = 0;  // bisection: the last block that begins at or before the slot
    int behind = segment.units;
    while (behind - index > 1) {
      const int middle = (index + behind) / 2;
      (args.blocks[segment.listed + middle].first_slot <= slot ? index : behind) = middle;
    }
    const DeviceBlock& block = args.blocks[segment.listed + index];
    take_block(block);
    block_rows = block.rows;
    begin = block.first_slot;
    end = begin + block_rows;
  }
  __device__ void take_block(const DeviceBlock& block) {
    codes = block.codes;
    scales = block.scales;
    zeros = block.zeros;
  }
};

/// Keys and values. What every item reads is contiguous.
struct Places {
  Place of[kSides];
  alignas(16) int block_rows[kSides];
  int end[kSides];  // first slot after the place
};

/// Up to kItemSlots slots of a KV head: their keys are in one block, and so are their values.
struct Item {
  int slot;  // the first
  int rows;
  SegmentFacts facts[kSides];
  int block[kSides];    // index from Place::codes on
  int row[kSides];      // in the block
  bool begins[kSides];  // first of the warp's items in its block
  bool ends[kSides];    // last of them
};

/// Walks over the items of a warp, on the sides [kFirst, kEnd) of a KV head.
template <int kFirst, int kEnd>
class ItemWalk {
 public:
  ///   segments  of keys, then, from first_values on, of values; one side alone begins at 0
  __device__ ItemWalk(const AttendArgs& args, const HeadSegment* segments, int first_values,
                      Places& places)
      : args_(args), segments_(segments), first_values_(first_values), places_(places) {}

  /// Moves to the first item of slots [first, end), which never go backwards. False if none.
  __device__ bool start(int first, int end) {
    const int passed = first - item_.slot;
    const bool found = item_.rows > 0;
    item_.slot = first;
    item_.rows = 0;
    if (first >= end) return false;
    if (found && first < places_end()) {
#pragma unroll
      for (int side = kFirst; side < kEnd; ++side) {
        const int row = item_.row[side] + passed;
        const int blocks = row / places_.block_rows[side];
        item_.block[side] += blocks;
        item_.row[side] = row - blocks * places_.block_rows[side];
      }
    } else {
      find(0, first_values_);
    }
#pragma unroll
    for (int side = kFirst; side < kEnd; ++side) item_.begins[side] = true;
    measure(end);
    return true;
  }

  /// The current item.
  __device__ const Item& item() const { return item_; }
  __device__ const Place& place(Side side) const { return places_.of[side]; }
  /// Moves to the next item of slots before `end`. False if none.
  __device__ bool next(int end) {
    item_.slot += item_.rows;
#pragma unroll
    for (int side = kFirst; side < kEnd; ++side) {
      item_.row[side] += item_.rows;
      if (item_.row[side] == places_.block_rows[side]) {
        item_.row[side] = 0;
        ++item_.block[side];
      }
      item_.begins[side] = item_.row[side] == 0;
    }
    if (item_.slot >= end) return false;
    if (item_.slot == places_end()) {
      find(item_.facts[kKeySide].segment(), item_.facts[kValueSide].segment());
    }
    measure(end);
    return true;
  }

 private:
  /// Slot at which the place of either side ends.
  __device__ int places_end() const {
    if (kEnd - kFirst == 1) return places_.end[kFirst];
    return min(places_.end[kKeySide], places_.end[kValueSide]);
  }
  __device__ void measure(int end) {
    int rows = min(end - item_.slot, kItemSlots);
#pragma unroll
    for (int side = kFirst; side < kEnd; ++side) {
      rows = min(rows,
                 min(places_.block_rows[side] - item_.row[side], places_.end[side] - item_.slot));
    }
    item_.rows = rows;
#pragma unroll
    for (int side = kFirst; side < kEnd; ++side) {
      const int behind = item_.slot + rows;
      item_.ends[side] = item_.row[side] + rows == places_.block_rows[side] ||
                         behind == places_.end[side] || behind == end;
    }
  }
  /// Finds the places of the slot, from segments `keys` and `values` on.
  __device__ void find(int keys, int values) {
    __syncwarp();  // the previous places have been read
    if (const int side = static_cast<int>(threadIdx.x % 32); side >= kFirst && side < kEnd) {
      int at = side == kKeySide ? keys : values;
      while (item_.slot >= segments_[at].segment.first_slot + segments_[at].segment.slots) ++at;
      places_.of[side].take(args_, segments_, at, item_.slot, places_.block_rows[side],
                            places_.end[side]);
    }
    __syncwarp();
#pragma unroll
    for (int side = kFirst; side < kEnd; ++side) {
      const Place& place = places_.of[side];
      item_.facts[side] = place.facts;
      item_.block[side] = place.first_block;
      item_.row[side] = place.first_row;
      item_.begins[side] = true;
    }
  }

  const AttendArgs& args_;
  const HeadSegment* segments_;  // of keys, then of values
  int first_values_;
  Places& places_;
  Item item_{};
};

/// Whether either half is at least `bound`, which is exact in half precision.
__device__ inline bool any_at_least(__half2 pair, float bound) {
  return __hge2_mask(pair, __float2half2_rn(bound)) != 0;
}

/// Product, then fused multiply-add, of pairs of halves.
__device__ inline uint32_t half2_mul(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
__device__ inline uint32_t half2_fma(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}

/// x - y z
__device__ inline uint32_t half2_subtract(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t d;
  asm("{\n.reg .b32 t;\nneg.f16x2 t, %2;\nfma.rn.f16x2 %0, t, %3, %1;\n}"
      : "=r"(d)
      : "r"(x), "r"(y), "r"(z));
  return d;
}

/// Scales (or zero points) of a token's groups of channels, in pairs.
///   of_slots  (slots, kGroups) halves in shared memory
template <int kGroups>
struct GroupHalves {
  uint32_t pairs[(kGroups + 1) / 2] = {};

  __device__ GroupHalves(const std::byte* of_slots, int slot) {
    const std::byte* from = of_slots + slot * (2 * kGroups);
    if constexpr (kGroups % 2 == 0) {
      codecs::load_shared(from, pairs);
    } else {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const uint32_t half = codecs::shared_at<uint16_t>(from + 2 * i);
        pairs[i / 2] |= half << i % 2 * 16;
      }
    }
  }

  __device__ float operator[](int group) const {
    const float2 pair = two_floats(pairs[group / 2]);
    return group % 2 == 0 ? pair.x : pair.y;
  }
};

/// Floats as the sum of a high and a low half, rounded to nearest.
struct TwoHalves {
  uint32_t higher;  // of both floats
  uint32_t lower;

  __device__ TwoHalves(float x, float y) {
    const __half2 high = __floats2half2_rn(x, y);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
    higher = *reinterpret_cast<const uint32_t*>(&high);
    lower = *reinterpret_cast<const uint32_t*>(&low);
  }
};

/// Which half of a number a thread multiplies with: a number is the sum of a high half x and a low
/// half y. Times a scale s, it becomes two halves again: threads of the high half have round(x s),
/// threads of the low half y s + (x s - round(x s)). Both execute the same product and two fused
/// multiply-adds, whose terms are 0 for the high half.
struct PartOf {
  uint32_t sign;  // flips the sign of x for the low half
  uint32_t mask;  // all bits for the low half

  __device__ explicit PartOf(bool lower)
      : sign(lower ? 0x80008000u : 0u), mask(lower ? 0xffffffffu : 0u) {}
  __device__ uint32_t plain(uint32_t x, uint32_t y) const { return (x & ~mask) | (y & mask); }
};

}  // namespace kvlm::cuda::packed
