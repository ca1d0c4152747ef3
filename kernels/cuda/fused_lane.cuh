#pragma once

#include "kernels/codecs/codec.h"
#include "kernels/cuda/attend_args.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/packed_mma.cuh"
#include "kernels/cuda/packed_tiles.cuh"

// What a block of the fused decode attention (fused_kernel.cuh) is given to do: a split of a lane,
// which its warps cut into items.
namespace kvlm::cuda::packed {

/// Slots of a split of a lane of `slots`. It depends on nothing else, so that a lane's sums do not
/// depend on the rest of the batch.
VLM_HD constexpr int fused_split_slots(int slots) {
  return slots <= 4096 ? 256 : slots <= 16384 ? 512 : 1024;
}

constexpr int kItemSlots = 32;
constexpr int kItemTiles = kItemSlots / kTileSlots;

/// Groups of 32 channels of a row. The last may be half of one, which takes one product, not two.
constexpr int channel_groups(int dim) { return (dim + kChannelGroup - 1) / kChannelGroup; }

/// Brings the description of lane `index` nearer while kernels ahead still run, unless one of them
/// may write it.
__device__ inline void prefetch_lane(const AttendArgs& args, int index) {
  if (args.step != nullptr) return;
  const auto prefetch = [](const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
  const DeviceLane* lane = args.lanes + index;
  if (threadIdx.x == 0) prefetch(lane);
  if (threadIdx.x == 1) prefetch(args.formats);
  const int first = __ldcg(&lane->first_keys);
  const int last = __ldcg(&lane->last_values);
  const int run = first + static_cast<int>(threadIdx.x / 2);
  if (run <= last && static_cast<int>(threadIdx.x) < 2 * kMostFusedRuns) {
    prefetch(reinterpret_cast<const std::byte*>(args.runs + run) + threadIdx.x % 2 * 128);
  }
}

/// A run of a lane, in shared memory.
struct LaneRun {
  DeviceRun run;
  PackedFormat format;  // of codes
  int zeros;            // that a block stores, if its channels are scaled

  __device__ void take(const AttendArgs& args, int index) {
    run = args.runs[index];
    if (run.rows != nullptr || run.slots == 0) return;
    format = args.formats[run.format];
    zeros = static_cast<int>(format.zeros(1));
  }
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

/// Where the rows from a slot on lie: codes (or f16 numbers), and what scales them.
struct alignas(16) Spot {
  const std::byte* codes;   // of the block's first row
  const std::byte* scales;  // of the block
  const std::byte* zeros;
  int row;   // of the block
  int left;  // rows from there to the end of the block
};

/// Slot `slot` of a run.
__device__ inline Spot find_spot(const AttendArgs& args, const DeviceRun& run, int slot) {
  const int at = slot - run.first_slot;
  if (run.rows != nullptr) return {run.rows, nullptr, nullptr, at, run.slots - at};
  int index = 0;
  if (run.block_rows != 0) {
    index = at / run.block_rows;
  } else {  // the last block of the list that begins at or before the slot
    int behind = run.units;
    while (behind - index > 1) {
      const int middle = (index + behind) / 2;
      (args.blocks[run.listed + middle].first_slot <= slot ? index : behind) = middle;
    }
  }
  const DeviceBlock block = block_of(args.blocks, run, index);
  const int row = slot - block.first_slot;
  return {block.codes, block.scales, block.zeros, row, block.rows - row};
}

enum Side { kKeySide, kValueSide, kSides };

/// Up to kItemSlots slots of a lane whose keys lie in one block, and whose values do. It lies in
/// shared memory: all threads of a warp have the same, and registers are scarce.
struct Item {
  Spot spot[kSides];
  int run[kSides];  // among the block's runs
};

/// Walks over the items of a warp, one behind the other. A thread makes the keys' part, another one
/// the values'.
class Items {
 public:
  /// Makes the first item, in items[0].
  __device__ Items(const AttendArgs& args, const LaneRun* runs, int key_runs, int first, int last,
                   Item (&items)[2])
      : args_(args), runs_(runs), items_(items), slot_(first), last_(last) {
    if (first >= last) return;
    if (const int side = static_cast<int>(threadIdx.x % 32); side < kSides) {
      find(side == kKeySide ? 0 : key_runs, items_[0], side);
    }
    measure(items_[0]);
  }

  __device__ bool there() const { return slot_ < last_; }
  /// Slots of the item made last.
  __device__ int rows() const { return rows_; }
  /// Makes the item behind items[turn] in the other one, which nobody reads any more.
  __device__ void next(int turn) {
    slot_ += rows_;
    if (slot_ >= last_) return;
    Item& to = items_[turn ^ 1];
    if (const int side = static_cast<int>(threadIdx.x % 32); side < kSides) {
      advance(items_[turn], to, side);
    }
    measure(to);
  }

 private:
  __device__ void measure(const Item& item) {
    __syncwarp();  // it has been written
    rows_ = min(min(item.spot[kKeySide].left, item.spot[kValueSide].left),
                min(last_ - slot_, kItemSlots));
  }
  /// The part of `side` at the slot, which is in run `at` or behind it.
  __device__ void find(int at, Item& to, int side) {
    while (slot_ >= runs_[at].run.first_slot + runs_[at].run.slots) ++at;
    to.run[side] = at;
    to.spot[side] = find_spot(args_, runs_[at].run, slot_);
  }
  __device__ void advance(const Item& from, Item& to, int side) {
    Spot spot = from.spot[side];
    const int at = from.run[side];
    spot.row += rows_;
    spot.left -= rows_;
    if (spot.left == 0) {
      const DeviceRun& run = runs_[at].run;
      const int left = run.first_slot + run.slots - slot_;
      if (left <= 0 || run.block_rows == 0) return find(at, to, side);
      spot.codes += run.code_stride;
      spot.scales += run.scale_stride;
      spot.zeros += run.scale_stride;
      spot.row = 0;
      spot.left = min(left, run.block_rows);
    }
    to.run[side] = at;
    to.spot[side] = spot;
  }

  const AttendArgs& args_;
  const LaneRun* runs_;  // of keys, then of values
  Item (&items_)[2];
  int slot_;
  int last_;
  int rows_ = 0;
};

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
