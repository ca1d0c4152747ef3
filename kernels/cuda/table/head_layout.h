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

// Translates a TableHead into the segments, counters and kernel choice that the GPU reads.
namespace kvlm::cuda::packed {

/// Memory for the block lists and bitmaps of one KV head's fixed segments without even strides.
struct ListSpace {
  DeviceBlock* blocks;
  uint64_t* words;
  int first_block;           // index of blocks[0] in the list of all KV heads
  const uint64_t* words_at;  // GPU address of `words`
  int most_blocks;
  int most_words;
  int used_blocks = 0;
  int used_words = 0;

  /// Throws Error{kOutOfMemory} if so many more do not fit: TableLoad was too small.
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

/// Host memory for the entries of one KV head.
struct HeadSpace {
  int index;  // of the KV head, over all slots and layers
  DeviceHead* head;
  DeviceSegment* segments;  // of keys, then of values
  DeviceTail* tails;        // of keys, then of values
  ListSpace list;
};

/// Formats of a table's segments, which refer to them by index. Several threads may add formats.
class FormatList {
 public:
  /// Index of a format, which is added if new. `of` must outlive the list.
  int16_t place_of(const PackedFormat& of);
  /// Only while no thread adds any.
  const std::vector<PackedFormat>& all() const noexcept { return all_; }
  /// Channels of a token, at most.
  int channels(int head_dim) const noexcept;

 private:
  std::mutex mutex_;
  std::vector<PackedFormat> all_;
  std::vector<const PackedFormat*> known_;  // addresses of all_'s originals
};

/// Kernels of two passes that read the segments of one side of a KV head.
struct SideKernels {
  std::array<int8_t, kMostSideSegments> kernels{};  // by segment
  uint32_t all = 0;                                 // bitmap of kernels
};

/// Builds the GPU's entries of TableHeads, and in `bounds` the sizes that launches need.
class HeadLayout {
 public:
  /// `windows`, `rows_alone` and `formats` must outlive this and may be shared.
  ///   rows_alone      (layers,) row_splits.cu handles all of a layer's KV heads
  ///   fixed_segments  of a KV head's side, at most
  HeadLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
             std::span<const uint8_t> rows_alone, int fixed_segments, FormatList& formats);

  void lay(int layer, const TableHead& from, HeadSpace& to);
  /// Over all KV heads built so far.
  LaunchBounds bounds;

 private:
  int16_t format_of(const PackedFormat& format);
  bool is_alone(int layer) const { return rows_alone_[static_cast<size_t>(layer)] != 0; }
  void lay_head(int layer, const TableHead& from, HeadSpace& to);
  void lay_segment(const SlotSegment& from, int kernel, ListSpace& list, DeviceSegment& made);
  void place_blocks(const SlotSegment& from, int kernel, ListSpace& list, DeviceSegment& made);
  void list_blocks(const SlotSegment& from, int most, ListSpace& list, DeviceSegment& made);
  int lay_fixed(std::span<const SlotSegment> fixed, const SideKernels& kernels, ListSpace& list,
                DeviceSegment* made);
  void lay_gained(const GrowingRows& gained, const RowWindow& window, const SideKernels& kernels,
                  DeviceSegment* made, DeviceTail& tail);
  void lay_side(int layer, bool keys, const TableHead& head, const SideKernels& kernels,
                HeadSpace& to);
  void place_sources(FusedHead& made, size_t fixed, size_t segments) const;
  SideKernels kernels_of(bool keys, std::span<const SlotSegment> segments, size_t fixed,
                         int sources) const;
  void choose(int layer, const TableHead& head);

  TableShape shape_;
  std::span<const std::array<RowWindow, 2>> windows_;  // (layers,)
  std::span<const uint8_t> rows_alone_;
  FormatList& formats_;
  int fixed_segments_;
  int side_segments_;
  // choose()'s result for the current KV head:
  FusedHead fused_;                    // the one-pass kernel, if any
  int image_ = 0;                      // kernel of image_block.cu for its first segments; 0: none
  std::array<SideKernels, 2> passes_;  // otherwise the kernels of two passes
  std::vector<std::pair<const PackedFormat*, int16_t>> known_;  // cache of formats_, with indices
};

}  // namespace kvlm::cuda::packed
