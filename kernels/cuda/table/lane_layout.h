#pragma once

#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/attend/fused_choice.h"
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

/// The kernels of two passes that serve the runs of a side of a lane.
struct SideKernels {
  std::array<int8_t, kMostSideRuns> kernels{};  // by position
  uint32_t all = 0;                             // bits
};

/// Says of TableLanes what the GPU keeps of them, and in `bounds` what launches have to reach.
class LaneLayout {
 public:
  /// `windows`, `rows_alone` and `formats`, which others may share, must stay.
  ///   rows_alone  (layers,) row_pieces.cu serves all of a layer's lanes
  ///   fixed_runs  of a lane's side, at most
  LaneLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
             std::span<const uint8_t> rows_alone, int fixed_runs, FormatList& formats);

  void lay(int layer, const TableLane& from, LaneSpace& to);
  /// What launches have to reach, of all that was laid.
  LaunchBounds bounds;

 private:
  int16_t format_of(const PackedFormat& format);
  bool is_alone(int layer) const { return rows_alone_[static_cast<size_t>(layer)] != 0; }
  void lay_lane(int layer, const TableLane& from, LaneSpace& to);
  void lay_run(const SlotRun& from, int kernel, ListSpace& list, DeviceRun& made);
  void place_blocks(const SlotRun& from, int kernel, ListSpace& list, DeviceRun& made);
  void list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made);
  int lay_fixed(std::span<const SlotRun> fixed, const SideKernels& kernels, ListSpace& list,
                DeviceRun* made);
  void lay_gained(const GrowingRows& gained, const RowWindow& window, const SideKernels& kernels,
                  DeviceRun* made, DeviceTail& tail);
  void lay_side(int layer, bool keys, const TableLane& lane, const SideKernels& kernels,
                LaneSpace& to);
  void place_sources(FusedLane& made, size_t fixed, size_t runs) const;
  SideKernels kernels_of(bool keys, std::span<const SlotRun> runs, size_t fixed, int sources) const;
  void choose(int layer, const TableLane& lane);

  TableShape shape_;
  std::span<const std::array<RowWindow, 2>> windows_;  // (layers,)
  std::span<const uint8_t> rows_alone_;
  FormatList& formats_;
  int fixed_runs_;
  int side_runs_;
  FusedLane fused_;                    // of the lane that is being laid
  int picture_ = 0;                    // the kernel of picture_lanes.cu that reads its first runs
  std::array<SideKernels, 2> passes_;  // and if no kernel serves it in one pass
  std::vector<std::pair<const PackedFormat*, int16_t>> known_;  // of formats_, and their places
};

}  // namespace kvlm::cuda::packed
