#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cuda/device/pinned.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/head_layout.h"
#include "kernels/cuda/table/table_args.cuh"
#include "kernels/decode_table.h"

// Staging of a sequence's table entries in pinned memory. HeadLayout fills in each KV head.
namespace kvlm::cuda::packed {

/// What all drafts of a DecodeTable share.
struct DraftPlan {
  TableShape shape;
  TableLoad load;
  std::span<const std::array<RowWindow, 2>> windows;  ///< (layers,)
  int longest = 0;                  ///< slots of a KV head, at most, empty places included
  std::vector<uint8_t> rows_alone;  ///< (layers,) row_splits.cu handles all of a layer's KV heads
  // GPU arrays of all slots that KV heads point into; null if not used.
  const uint64_t* words = nullptr;     ///< (slots, load.words of each KV head)
  float* row_scores = nullptr;         ///< (slots, layers, kv_heads, load.weighed_rows)
  float* place_weights = nullptr;      ///< the same
  const uint32_t* row_bits = nullptr;  ///< (slots, layers, kv_heads, bit_words)
  int bit_words = 0;

  int side_segments() const noexcept { return load.fixed_segments + kGainedSegments; }
  int heads_of_slot() const noexcept { return shape.layers * shape.kv_heads; }
  bool weighs() const noexcept { return shape.weights != RowWeights::kNone; }
  /// Tokens have weights or scores.
  bool compares() const noexcept { return weighs() || shape.scored; }
};

/// The entries of one slot of a DecodeTable, built on the host. Each thread may build a draft of
/// its own.
class SlotDraft {
 public:
  /// `plan` and `formats` must outlive this. Call begin() next.
  SlotDraft(const DraftPlan& plan, FormatList& formats) : plan_(plan), formats_(formats) {}
  /// Allocates, and again after the plan has changed.
  void begin();
  size_t bytes() const noexcept { return bytes_; }

  /// Builds one layer of a slot, in layer order, after wait().
  void lay(int slot, int layer, std::span<const TableHead> heads);
  /// Marks the memory as in use by copies queued on `stream`.
  void lend(Stream& stream) { memory_.lend(stream); }
  /// Waits for these copies.
  void wait() const { memory_.wait(); }

  int slot = 0;
  // (layers, kv_heads, ...), pinned
  std::span<DeviceHead> heads;
  std::span<DeviceSegment> segments;
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
  int used_blocks = 0;        ///< of `blocks`
  int used_words = 0;         ///< of `words`
  bool out_of_order = false;  ///< packed tokens of some placed KV head are not in order

  // Over all slots built so far:
  LaunchBounds& bounds() noexcept { return layout_->bounds; }
  int ring_rows = 0;          ///< of KV heads that row_splits.cu handles, at most
  bool weighs_slots = false;  ///< some KV head is WeighedRows::by_slots

 private:
  HeadSpace space_of(int layer, size_t kv_head);
  void take_weighed(const WeighedRows& rows, HeadSpace& space);
  void take_by_slots(const WeighedRows& rows, const HeadSpace& space);
  void take_placed(const WeighedRows& rows, const HeadSpace& space);
  void find_values(std::span<const int> values_came);
  int scatter_numbers(const WeighedRows& rows, size_t number);
  void take_scores(const WeighedRows& rows, const HeadSpace& space);
  void take_fixed(const TableHead& head, const HeadSpace& space);
  void note_head(int layer, const TableHead& head, const HeadSpace& space);
  size_t number_of(const HeadSpace& space) const noexcept {
    return static_cast<size_t>(space.head - heads.data());
  }

  size_t carve(std::byte* memory);

  const DraftPlan& plan_;
  cuda::PinnedMemory memory_;
  size_t bytes_ = 0;
  FormatList& formats_;
  std::optional<HeadLayout> layout_;
  std::vector<int16_t> value_of_;  // place of a KV head's values, by arrival number
};

}  // namespace kvlm::cuda::packed
