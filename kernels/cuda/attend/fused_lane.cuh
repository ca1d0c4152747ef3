#pragma once

#include "kernels/codecs/codec.h"
#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/packed_mma.cuh"
#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/device/launch.cuh"

// What a block of the fused decode attention (fused_kernel.cuh) is given to do: splits of a lane,
// whose parts its warps cut into items.
namespace kvlm::cuda::packed {

constexpr int kItemSlots = 32;
constexpr int kItemTiles = kItemSlots / kTileSlots;
static_assert(kSplitParts == kWarps && kPartStep == kItemSlots);

/// Groups of 32 channels of a row. The last may be half of one, which takes one product, not two.
constexpr int channel_groups(int dim) { return (dim + kChannelGroup - 1) / kChannelGroup; }

/// Scales of a token whose channels share them in groups.
constexpr int scale_groups(Scaled scaled, int dim) {
  return scaled == Scaled::kToken64 ? dim / 64 : channel_groups(dim);
}

/// Bytes between the quarters of a row's scales in shared memory, which four threads read at a
/// time: without them two would lie in the same banks.
constexpr int quarter_pad(int dim) { return dim / 2 % 64 == 0 ? 16 : 0; }
/// Where a quarter begins then.
template <int kDim>
constexpr __device__ int apart_quarter(int quarter) {
  return quarter * (kDim / 2 + quarter_pad(kDim));
}

/// What a warp asks of a run for every item, in one register.
class RunFacts {
 public:
  RunFacts() = default;
  /// Of any run, as if it were of f16 rows; that of codes take()s its format then.
  __device__ RunFacts(int run, int8_t source)
      : bits_(static_cast<uint32_t>(run) | static_cast<uint32_t>(source) << kSourceBit) {}
  __device__ void take(const PackedFormat& format) {
    bits_ |= kCoded;
    if (format.sections == 2) bits_ |= kTwoSections;
    for (int i = 0; i < 2; ++i) {
      if (format.section[i].zero_stored) bits_ |= 1u << (kStoredBit + i);
    }
  }

  __device__ int run() const { return static_cast<int>(bits_ & kRuns); }  ///< of the block's runs
  __device__ bool coded() const { return (bits_ & kCoded) != 0; }         ///< or f16 rows
  __device__ bool two_sections() const { return (bits_ & kTwoSections) != 0; }
  __device__ bool zero_stored(int section) const {
    return (bits_ >> (kStoredBit + section) & 1) != 0;
  }
  /// The run is another kernel's.
  __device__ void pass_by() { bits_ = (bits_ & ~kCoded) | kPassedBy; }
  __device__ bool passed_by() const { return (bits_ & kPassedBy) != 0; }
  /// Which queries keys meet; values meet none, and nobody asks.
  __device__ int source() const { return static_cast<int>(bits_ >> kSourceBit); }

 private:
  static constexpr uint32_t kRuns = 0xff;
  static constexpr uint32_t kCoded = 1 << 8;
  static constexpr uint32_t kTwoSections = 1 << 9;
  static constexpr int kStoredBit = 10;  // and the next one
  static constexpr uint32_t kPassedBy = 1 << 12;
  static constexpr int kSourceBit = 16;
  static_assert(kMostFusedRuns <= kRuns);

  uint32_t bits_;
};

/// A run of a lane, in shared memory.
struct LaneRun {
  DeviceRun run;
  PackedFormat format;  // of codes
  int meta;             // Place::meta
  RunFacts facts;

  /// Takes run `index` of a table, which is run `number` of the block.
  __device__ void take(const AttendArgs& args, int index, int number) {
    run = args.runs[index];
    facts = RunFacts(number, run.source);
    if (run.rows != nullptr || run.slots == 0) return;
    format = args.formats[run.format];
    facts.take(format);
    meta = format.axis == ScaleAxis::kChannel ? static_cast<int>(format.zeros(1))
           : format.axis == ScaleAxis::kToken ? 1
                                              : 0;
  }
  /// Where the scores of a slot of this segment are stored.
  __device__ int place_of(int slot) const { return run.first_place + (slot - run.first_slot); }
};

/// Rows of values as they are added: as they were copied, or each widened by a thread before.
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

/// Where a warp is on one side of its lane: rows that are stored alike, in blocks at even strides.
/// It lies in shared memory: all threads of a warp have the same, and registers are scarce.
struct alignas(16) Place {
  const std::byte* codes;  // of the first block; or f16 rows
  const std::byte* scales;
  const std::byte* zeros;
  int code_stride;  // bytes from a block to the next
  int scale_stride;
  int begin;  // of the lane's slots
  RunFacts facts;
  int meta;         // zero points that a block of channels stores; of tokens 1, and 0 of a head
  int first_block;  // where the slot was that it was made for
  int first_row;

  /// Of the rows of a run around a slot: all of them, or where blocks are listed those of one
  /// block. Gives the rows of a block, and the slot behind the rows.
  __device__ void take(const AttendArgs& args, const LaneRun* runs, int index, int slot,
                       int& block_rows, int& end) {
    take_run(args, runs[index], slot, block_rows, end);
    facts = runs[index].facts;
    first_block = (slot - begin) / block_rows;
    first_row = slot - begin - first_block * block_rows;
  }

 private:
  __device__ void take_run(const AttendArgs& args, const LaneRun& lane_run, int slot,
                           int& block_rows, int& end) {
    const DeviceRun& run = lane_run.run;
    meta = lane_run.meta;
    begin = run.first_slot;
    end = begin + run.slots;
    if (run.rows != nullptr || lane_run.facts.passed_by()) {
      codes = run.rows;
      scales = zeros = nullptr;
      code_stride = scale_stride = 0;
      block_rows = run.slots;
      return;
    }
    code_stride = run.code_stride;
    scale_stride = run.scale_stride;
    block_rows = run.block_rows;
    if (block_rows != 0) return take_block(run.first_block);
    int index = 0;  // the last block of the list that begins at or before the slot
    int behind = run.units;
    while (behind - index > 1) {
      const int middle = (index + behind) / 2;
      (args.blocks[run.listed + middle].first_slot <= slot ? index : behind) = middle;
    }
    const DeviceBlock& block = args.blocks[run.listed + index];
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

/// Both sides of a warp's lane. What every item asks lies together.
struct Places {
  Place of[kSides];
  alignas(16) int block_rows[kSides];
  int end[kSides];  // the slot behind the place
};

/// Up to kItemSlots slots of a lane whose keys lie in one block, and whose values do.
struct Item {
  int slot;  // the first
  int rows;
  RunFacts facts[kSides];
  int block[kSides];    // of the place
  int row[kSides];      // of the block
  bool begins[kSides];  // the first item of a warp's part in its block
  bool ends[kSides];    // and the last
};

/// Walks over the items of a warp, one behind the other, on the sides [kFirst, kEnd) of a lane.
template <int kFirst, int kEnd>
class ItemWalk {
 public:
  ///   runs  of the keys, then from first_values on of the values; those of one side alone from 0
  __device__ ItemWalk(const AttendArgs& args, const LaneRun* runs, int first_values, Places& places)
      : args_(args), runs_(runs), first_values_(first_values), places_(places) {}

  /// Makes the first item of slots [first, end), which lie behind those before. False if there is
  /// none.
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

  /// The item made last.
  __device__ const Item& item() const { return item_; }
  __device__ const Place& place(Side side) const { return places_.of[side]; }
  /// Makes the item behind it, of slots before `end`. False if there is none.
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
      find(item_.facts[kKeySide].run(), item_.facts[kValueSide].run());
    }
    measure(end);
    return true;
  }

 private:
  /// The slot behind the places of both sides.
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
  /// The places of the slot, in the runs `keys` and `values` or behind them.
  __device__ void find(int keys, int values) {
    __syncwarp();  // nobody reads the ones before
    if (const int side = static_cast<int>(threadIdx.x % 32); side >= kFirst && side < kEnd) {
      int at = side == kKeySide ? keys : values;
      while (item_.slot >= runs_[at].run.first_slot + runs_[at].run.slots) ++at;
      places_.of[side].take(args_, runs_, at, item_.slot, places_.block_rows[side],
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
  const LaneRun* runs_;  // of keys, then of values
  int first_values_;
  Places& places_;
  Item item_{};
};

/// Whether one of a pair of halves is at least `bound`, which is a half.
__device__ inline bool any_at_least(__half2 pair, float bound) {
  return __hge2_mask(pair, __float2half2_rn(bound)) != 0;
}

/// Products of pairs of halves, and sums with one rounding.
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

/// The scales, or zero points, of a row's groups of channels, in pairs.
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

/// A number as a higher and a lower half, rounded to nearest.
struct TwoHalves {
  uint32_t higher;  // of a pair of numbers
  uint32_t lower;

  __device__ TwoHalves(float x, float y) {
    const __half2 high = __floats2half2_rn(x, y);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
    higher = *reinterpret_cast<const uint32_t*>(&high);
    lower = *reinterpret_cast<const uint32_t*>(&low);
  }
};

/// Which part of products a thread has. A number is kept as halves x and y, the higher and the
/// lower part. Times a scale s it is an operand again: threads of the higher part have round(x s),
/// those of the lower part what that leaves, y s + (x s - round(x s)). Both take the same three
/// instructions, a product and two sums, where the numbers of the sums are 0 for the higher part.
struct PartOf {
  uint32_t sign;  // flips the sign of x for the lower part
  uint32_t mask;  // all bits for the lower part

  __device__ explicit PartOf(bool lower)
      : sign(lower ? 0x80008000u : 0u), mask(lower ? 0xffffffffu : 0u) {}
  __device__ uint32_t plain(uint32_t x, uint32_t y) const { return (x & ~mask) | (y & mask); }
};

}  // namespace kvlm::cuda::packed
