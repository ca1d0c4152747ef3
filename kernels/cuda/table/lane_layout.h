#pragma once

#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/launch_bounds.h"
#include "kernels/cuda/table/table_args.cuh"
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
                "internal error: DecodeTable::set got a sequence with more blocks or longer "
                "bitmaps than reserve() was called for; please report it");
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

/// The formats of a table's runs, which name them by their place here. Threads may add some.
class FormatList {
 public:
  /// Where a format is. `of` must stay.
  int16_t place_of(const PackedFormat& of);
  /// While no thread adds any.
  const std::vector<PackedFormat>& all() const noexcept { return all_; }
  /// Channels of a packed row, at most.
  int channels(int head_dim) const noexcept;

 private:
  std::mutex mutex_;
  std::vector<PackedFormat> all_;
  std::vector<const PackedFormat*> known_;  // where they came from
};

/// How a lane is laid: what all its runs have in common.
struct LaneWay {
  bool alone;     // row_pieces.cu attends to it, which reads no runs
  bool fused;     // it is attended in one pass
  bool in_order;  // DeviceLane::in_run_order
  int slots;      // it has them now
};

/// Says of TableLanes what the GPU keeps of them, and in `bounds` what launches have to reach.
class LaneLayout {
 public:
  /// `windows`, `rows_alone` and `formats`, which others may share, must stay.
  ///   rows_alone  (layers,) row_pieces.cu serves all of a layer's lanes
  ///   fixed_runs  of a lane's side, at most
  ///   longest     slots of a lane, at most
  LaneLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
             std::span<const uint8_t> rows_alone, int fixed_runs, int longest, FormatList& formats);

  void lay(int layer, const TableLane& from, LaneSpace& to);
  /// What launches have to reach, of all that was laid.
  LaunchBounds bounds;

 private:
  int16_t format_of(const PackedFormat& format);
  int16_t kernel_of(const SlotRun& run, bool keys, bool in_order) const;
  bool goes_in_order(const TableLane& lane) const;
  void lay_lane(const TableLane& from, const FusedLane& fused, const LaneWay& way, LaneSpace& to);
  void lay_run(const SlotRun& from, bool keys, const LaneWay& way, ListSpace& list,
               DeviceRun& made);
  void cut_run(const SlotRun& from, const LaneWay& way, ListSpace& list, DeviceRun& made);
  void list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made);
  int lay_fixed(int layer, bool keys, std::span<const SlotRun> fixed, const LaneWay& way,
                ListSpace& list, DeviceRun* made);
  void lay_gained(const GrowingRows& gained, const RowWindow& window, bool keys, DeviceRun* made,
                  DeviceTail& tail);
  void lay_side(int layer, bool keys, const TableLane& lane, const LaneWay& way, LaneSpace& to);
  void place_sources(FusedLane& made, size_t fixed, size_t runs) const;
  FusedLane served_in_one_pass(int layer, const TableLane& lane) const;

  TableShape shape_;
  std::span<const std::array<RowWindow, 2>> windows_;  // (layers,)
  std::span<const uint8_t> rows_alone_;
  FormatList& formats_;
  int fixed_runs_;
  int side_runs_;
  int longest_;
  std::vector<std::pair<const PackedFormat*, int16_t>> known_;  // of formats_, and their places
};

}  // namespace kvlm::cuda::packed
