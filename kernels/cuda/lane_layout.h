#pragma once

#include <span>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/fused_attention.h"
#include "kernels/cuda/launch_bounds.h"
#include "kernels/cuda/table_args.cuh"
#include "kernels/decode_table.h"

namespace kvlm::cuda::packed {

/// Where fixed runs of one lane list blocks that do not lie evenly, and bitmaps.
struct ListSpace {
  DeviceBlock* blocks;
  uint64_t* words;
  int first_block;           // of all lanes'
  const uint64_t* words_at;  // where `words` will be
  int most_blocks;
  int most_words;
  int used_blocks = 0;
  int used_words = 0;

  /// Throws Error{kOutOfMemory} without room for so many more: TableLoad was too small.
  void need(int blocks, int words) const {
    if (used_blocks + blocks <= most_blocks && used_words + words <= most_words) return;
    throw Error(ErrorCode::kOutOfMemory,
                "DecodeTable::set: a sequence lists more blocks, or bits of their rows, than "
                "reserve() was told; tell it of the longest");
  }
  const uint64_t* add_words(const uint64_t* from, int bits) {
    const int count = (bits + 63) / 64;
    std::copy_n(from, count, words + used_words);
    used_words += count;
    return words_at + used_words - count;
  }
};

/// Where the GPU's description of one lane is made.
struct LaneSpace {
  int index;  // of the lane, of all slots and layers
  DeviceLane* lane;
  DeviceRun* runs;    // of keys, then of values
  DeviceTail* tails;  // of keys, of values
  ListSpace list;
};

/// Says of TableLanes what the GPU keeps of them, and to `bounds` what launches have to reach.
class LaneLayout {
 public:
  /// `windows` must stay.
  ///   fixed_runs  of a lane's side, at most
  ///   longest     slots of a lane, at most
  LaneLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
             int fixed_runs, int longest, LaunchBounds& bounds);

  void lay(int layer, const TableLane& from, LaneSpace& to);
  /// Formats that runs name by their place here.
  const std::vector<PackedFormat>& formats() const noexcept { return formats_; }
  /// Channels of a packed row, at most.
  int channels() const noexcept { return channels_; }

 private:
  int16_t format_of(const PackedFormat& format);
  void lay_run(const SlotRun& from, bool keys, bool in_order, int slots, bool fused,
               ListSpace& list, DeviceRun& made);
  void list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made);
  void lay_gained(const GrowingRows& gained, const RowWindow& window, bool keys, DeviceRun* made,
                  DeviceTail& tail);
  void set_side(int layer, bool keys, const TableLane& lane, bool in_order, int slots, bool fused,
                ListSpace& list, DeviceRun* made, DeviceTail& tail);
  FusedLane served_in_one_pass(int layer, const TableLane& lane) const;

  TableShape shape_;
  std::span<const std::array<RowWindow, 2>> windows_;  // (layers,)
  LaunchBounds& bounds_;
  int fixed_runs_;
  int side_runs_;
  int longest_;
  int channels_;
  std::vector<PackedFormat> formats_;
  std::vector<const PackedFormat*> known_;  // where formats came from
};

}  // namespace kvlm::cuda::packed
