#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cuda/device/pinned.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/lane_layout.h"
#include "kernels/cuda/table/table_args.cuh"
#include "kernels/decode_table.h"

namespace kvlm::cuda::packed {

/// What the drafts of a DecodeTable have in common.
struct DraftPlan {
  TableShape shape;
  TableLoad load;
  std::span<const std::array<RowWindow, 2>> windows;  ///< (layers,)
  int longest = 0;                  ///< slots of a lane, at most, empty places among them
  std::vector<uint8_t> rows_alone;  ///< (layers,) row_pieces.cu serves all of a layer's lanes
  // Of all slots, what lanes point to on the GPU; null: nothing of the kind.
  const uint64_t* words = nullptr;     ///< (slots, load.words of each lane)
  float* row_scores = nullptr;         ///< (slots, layers, kv_heads, load.weighed_rows)
  float* place_weights = nullptr;      ///< the same
  const uint32_t* row_bits = nullptr;  ///< (slots, layers, kv_heads, bit_words)
  int bit_words = 0;

  int side_runs() const noexcept { return load.fixed_runs + kGainedRuns; }
  int lanes_of_slot() const noexcept { return shape.layers * shape.kv_heads; }
  bool weighs() const noexcept { return shape.weights != RowWeights::kNone; }
  /// Rows have weights or scores, by which they go.
  bool compares() const noexcept { return weighs() || shape.scored; }
};

/// One slot of a DecodeTable as the GPU is to find it, on its way there. Threads may each lay a
/// draft of their own.
class SlotDraft {
 public:
  /// `plan` and `formats` must stay. begin() follows.
  SlotDraft(const DraftPlan& plan, FormatList& formats) : plan_(plan), formats_(formats) {}
  /// Begins, or begins anew after the plan has changed.
  void begin();
  size_t bytes() const noexcept { return bytes_; }

  /// Takes one layer of a slot, the layers of a slot in their order, after wait().
  void lay(int slot, int layer, std::span<const TableLane> lanes);
  /// `stream` has been told to copy what was laid.
  void lend(Stream& stream) { memory_.lend(stream); }
  /// Waits until it is copied.
  void wait() const { memory_.wait(); }

  int slot = 0;
  // (layers, kv_heads, ...), pinned
  std::span<DeviceLane> lanes;
  std::span<DeviceRun> runs;
  std::span<DeviceTail> tails;
  std::span<ScoreRemap> remaps;
  std::span<DeviceBlock> blocks;
  std::span<uint64_t> words;
  std::span<DeviceWeighed> weighed;
  std::span<int> came;
  std::span<int16_t> value_at, key_at;
  std::span<DeviceFixedBlock> fixed;
  std::span<float> scores;
  std::span<TurnedRows> turned;
  int used_blocks = 0;  ///< of `blocks`, and words of `words`
  int used_words = 0;
  bool out_of_order = false;  ///< some lane's packed rows do not lie in order

  // Of all that was laid so far:
  LaunchBounds& bounds() noexcept { return layout_->bounds; }
  int ring_rows = 0;          ///< of lanes whose full rows row_pieces.cu serves, at most
  bool weighs_slots = false;  ///< some lane is WeighedRows::by_slots

 private:
  LaneSpace space_of(int layer, size_t head);
  void take_weighed(const WeighedRows& rows, LaneSpace& space);
  void take_by_slots(const WeighedRows& rows, const LaneSpace& space);
  void take_placed(const WeighedRows& rows, const LaneSpace& space);
  void find_values(std::span<const int> values_came);
  int scatter_numbers(const WeighedRows& rows, size_t number);
  void take_scores(const WeighedRows& rows, const LaneSpace& space);
  void take_fixed(const TableLane& lane, const LaneSpace& space);
  void note_lane(int layer, const TableLane& lane, const LaneSpace& space);
  size_t number_of(const LaneSpace& space) const noexcept {
    return static_cast<size_t>(space.lane - lanes.data());
  }

  size_t carve(std::byte* memory);

  const DraftPlan& plan_;
  cuda::PinnedMemory memory_;
  size_t bytes_ = 0;
  FormatList& formats_;
  std::optional<LaneLayout> layout_;
  std::vector<int16_t> value_of_;  // by number, of a lane
};

}  // namespace kvlm::cuda::packed
