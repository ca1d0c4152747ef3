// Builds the GPU's entries of a KV head: segments and counters, and the kernel that reads each
// segment (docs/gpu-decode.md, "Attention"). The choice holds for all of decode, so segments that
// are still empty count too.
//
// - no packed tokens in the layer: row_splits.cu reads the ring, and segments stay empty;
// - an image packed once: a kernel of image_block.cu, and for tokens after it row_splits.cu if all
//   are unpacked in the ring, else two passes;
// - a pair of formats with a one-pass kernel: FusedHead. If tokens are weighed or evicted in place,
//   both must be scaled by token;
// - otherwise two passes, with a kernel per format.
#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "kernels/cuda/attend/format_choice.h"
#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/attend/two_pass.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/head_layout.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kAnyBlockRows = 256;  // tokens of a packed block for any_format.cu

/// Whether a KV head is one fixed segment and a ring that holds keys and values in the same places.
bool has_image_rows(const TableHead& head) {
  const GrowingRows& keys = head.keys_gained;
  const GrowingRows& values = head.values_gained;
  return head.keys.size() == 1 && keys.first == values.first && keys.full == values.full &&
         keys.ring_rows == values.ring_rows;
}

/// Bitmap words of at most `most` rows of a block from `row` on.
int part_words(const PackedBlock& block, int row, int most) {
  return block.live == nullptr ? 0 : (std::min(most, block.rows - row) + 63) / 64;
}

/// Whether the table packs full windows of a side.
bool is_packed(const GrowingRows& gained, const RowWindow& window) {
  return window.format != nullptr && gained.scales != nullptr;
}

/// Packed tokens that a KV head gains, as a segment of one block, stored in `block`.
SlotSegment packed_segment(const PackedFormat& format, const GrowingRows& rows,
                           PackedBlock& block) {
  block.codes = rows.codes;
  block.scales = rows.scales;
  block.zeros = rows.zeros;
  block.rows = block.live_rows = rows.block_rows;
  SlotSegment segment;
  segment.slots = rows.block_rows;
  segment.format = &format;
  segment.blocks = {&block, 1};
  segment.code_stride = rows.code_stride;
  segment.scale_stride = rows.scale_stride;
  return segment;
}

/// The ring, as an unpacked segment.
SlotSegment full_rows(const std::byte* ring, DType dtype) {
  SlotSegment segment;
  segment.rows = ring;
  segment.dtype = dtype;
  return segment;
}

/// Rows [row, row + rows) of a block as a separate block.
PackedBlock part_of(const PackedFormat& format, const PackedBlock& block, int row, int rows) {
  if (rows == block.rows) return block;
  PackedBlock part = block;
  part.rows = part.live_rows = rows;
  part.codes += static_cast<size_t>(row) * format.row_bytes();
  if (format.axis == ScaleAxis::kToken) {
    const size_t offset =
        static_cast<size_t>(row) * static_cast<size_t>(format.groups()) * dtype_bytes(format.meta);
    part.scales += offset;
    if (part.zeros != nullptr) part.zeros += offset;
  }
  if (block.live == nullptr) return part;
  part.live = block.live + row / 64;
  part.live_rows = 0;
  for (int i = 0; i < rows; ++i) {
    part.live_rows += static_cast<int>(part.live[i / 64] >> (i % 64) & 1);
  }
  return part;
}

/// Whether the key and the value of every token of a placed KV head have the same place, now and
/// later: both sides pack and evict at the same time.
bool lies_alike(const TableHead& head, const std::array<RowWindow, 2>& windows) {
  const auto same_blocks = [](const SlotSegment& keys, const SlotSegment& values) {
    return std::equal(keys.blocks.begin(), keys.blocks.end(), values.blocks.begin(),
                      values.blocks.end(),
                      [](const PackedBlock& a, const PackedBlock& b) { return a.rows == b.rows; });
  };
  const GrowingRows& keys = head.keys_gained;
  const GrowingRows& values = head.values_gained;
  return windows[0].trigger == windows[1].trigger && windows[0].rows == windows[1].rows &&
         std::equal(head.keys.begin(), head.keys.end(), head.values.begin(), head.values.end(),
                    same_blocks) &&
         keys.ring_rows == values.ring_rows && keys.first == values.first &&
         keys.full == values.full && keys.block_rows == values.block_rows &&
         keys.most_blocks == values.most_blocks && keys.blocks == values.blocks &&
         keys.filling == values.filling && keys.filled == values.filled &&
         std::equal(head.weighed.came.begin(), head.weighed.came.end(),
                    head.weighed.values_came.begin(), head.weighed.values_came.end());
}

/// Initial counters of the tokens after `fixed_slots`.
DeviceTail tail_of(const GrowingRows& gained, int fixed_slots, bool placed) {
  DeviceTail tail{};
  static_cast<GrowingRows&>(tail) = gained;
  tail.placed = placed;
  tail.vacated = -1;
  tail.fixed_slots = fixed_slots;
  return tail;
}

/// All segments of one side of a KV head, in slot order; the ring is one segment here.
struct SideSegments {
  // Constructed on demand: a prompt has thousands of KV heads with one or two segments each.
  alignas(SlotSegment) std::byte segments[kMostSegments / 2 * sizeof(SlotSegment)];
  size_t count = 0;
  PackedBlock block;  // of the tokens that the table packs

  SideSegments(std::span<const SlotSegment> fixed, const GrowingRows& gained,
               const RowWindow& window, DType dtype) {
    for (const SlotSegment& segment : fixed) add(segment);
    if (is_packed(gained, window)) add(packed_segment(*window.format, gained, block));
    add(full_rows(gained.ring, dtype));
  }
  SideSegments(const SideSegments&) = delete;  // a segment points to the block
  std::span<const SlotSegment> all() const { return {begin(), count}; }

 private:
  const SlotSegment* begin() const {
    return std::launder(reinterpret_cast<const SlotSegment*>(segments));
  }
  void add(const SlotSegment& segment) {
    assert(count < kMostSegments / 2);
    std::construct_at(reinterpret_cast<SlotSegment*>(segments) + count++, segment);
  }
};

}  // namespace

int16_t FormatList::place_of(const PackedFormat& of) {
  const std::lock_guard lock(mutex_);
  const auto at = std::find(known_.begin(), known_.end(), &of) - known_.begin();
  if (at == static_cast<std::ptrdiff_t>(known_.size())) {
    known_.push_back(&of);
    all_.push_back(of);
  }
  return static_cast<int16_t>(at);
}

int FormatList::channels(int head_dim) const noexcept {
  for (const PackedFormat& format : all_) head_dim = std::max(head_dim, format.channels());
  return head_dim;
}

HeadLayout::HeadLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
                       std::span<const uint8_t> rows_alone, int fixed_segments, FormatList& formats)
    : bounds(shape.layers),
      shape_(shape),
      windows_(windows),
      rows_alone_(rows_alone),
      formats_(formats),
      fixed_segments_(fixed_segments),
      side_segments_(fixed_segments + kGainedSegments) {}

void HeadLayout::lay(int layer, const TableHead& from, HeadSpace& to) {
  if (!is_alone(layer)) choose(layer, from);
  lay_side(layer, true, from, passes_[0], to);
  lay_side(layer, false, from, passes_[1], to);
  lay_head(layer, from, to);
}

/// Builds the DeviceHead, after its segments, and adds its kernels to `bounds`.
void HeadLayout::lay_head(int layer, const TableHead& from, HeadSpace& to) {
  DeviceHead& head = *to.head = DeviceHead();
  assert(from.remaps.size() <= static_cast<size_t>(shape_.remaps));
  assert(std::all_of(from.remaps.begin(), from.remaps.end(), [&](const ScoreRemap& remap) {
    return remap.first + remap.slots <= to.tails[0].fixed_slots;
  }));
  head.first_remap = to.index * shape_.remaps;
  head.remaps = static_cast<int>(from.remaps.size());
  head.first_keys = to.index * 2 * side_segments_;
  head.last_keys = head.first_keys + side_segments_ - 1;
  head.last_values = head.last_keys + side_segments_;
  head.placed = from.placed;
  head.passes = is_alone(layer) ? 1 : 0;
  if (is_alone(layer)) return;
  const DeviceSegment* values = to.segments + side_segments_;
  head.selects = std::any_of(values, values + side_segments_,
                             [](const DeviceSegment& segment) { return segment.selected_of > 0; });
  head.fused = static_cast<int8_t>(fused_.pair);
  for (int i = 0; i < side_segments_; ++i)
    to.segments[i].source = fused_.source[static_cast<size_t>(i)];
  HeadKernels kinds;
  if (fused_.pair != 0) {
    kinds.fused = 1u << fused_.pair;
    kinds.sources[static_cast<size_t>(fused_.pair)] = fused_.sources;
    const bool weighed = from.weighed.weights != nullptr;
    kinds.lose_rows = (head.placed || weighed) && !is_image(fused_.pair);
    kinds.image_rows = is_image(fused_.pair);
    head.passes = kinds.image_rows ? 1 : 0;
  } else {
    kinds.keys = passes_[0].all;
    kinds.values = passes_[1].all;
    kinds.pass_sources = fused_.sources;
    kinds.passes = std::popcount(kinds.values) + (image_ != 0 ? 1 : 0);
    head.passes = static_cast<int8_t>(kinds.passes);
  }
  if (image_ != 0) {
    kinds.fused |= 1u << image_;
    kinds.image_slots = from.keys[0].slots;
  }
  bounds.note(layer, kinds);
}

/// Index of a format; asks the shared list once for each.
int16_t HeadLayout::format_of(const PackedFormat& format) {
  for (const auto& [known, place] : known_) {
    if (known == &format) return place;
  }
  return known_.emplace_back(&format, formats_.place_of(format)).second;
}

/// Builds a fixed segment.
void HeadLayout::lay_segment(const SlotSegment& from, int kernel, ListSpace& list,
                             DeviceSegment& made) {
  made.slots = from.slots;
  made.q = from.q;
  if (from.selection != nullptr) {
    list.need(0, (from.selected_of + 63) / 64);
    made.selection = list.add_words(from.selection, from.selected_of);
    made.selected_of = from.selected_of;
    made.selected_bit = from.selected_bit;
  }
  if (from.format == nullptr) {
    made.rows = from.rows;
    made.dtype = from.dtype;
    return;
  }
  made.format = format_of(*from.format);
  place_blocks(from, kernel, list, made);
}

/// Sets the blocks of a packed fixed segment: even strides if possible, else a list.
void HeadLayout::place_blocks(const SlotSegment& from, int kernel, ListSpace& list,
                              DeviceSegment& made) {
  const PackedBlock& block = from.blocks[0];
  made.first_block = {block.codes, block.scales, block.zeros, nullptr, block.rows, 0};
  const int most = kernel == kAnyKernel ? kAnyBlockRows : std::numeric_limits<int>::max();
  const bool is_single = from.blocks.size() == 1 && block.live == nullptr;
  if ((from.code_stride == 0 && !is_single) || block.rows > most) {
    return list_blocks(from, most, list, made);
  }
  made.code_stride = static_cast<int>(from.code_stride);
  made.scale_stride = static_cast<int>(from.scale_stride);
  made.block_rows = block.rows;
  made.packed_rows = from.slots;
}

/// Lists the blocks of a segment, divided into blocks of at most `most` rows.
void HeadLayout::list_blocks(const SlotSegment& from, int most, ListSpace& list,
                             DeviceSegment& made) {
  made.block_rows = 0;
  made.listed = list.first_block + list.used_blocks;
  int slot = made.first_slot;
  for (const PackedBlock& block : from.blocks) {
    for (int row = 0; row < block.rows; row += std::min(most, block.rows)) {
      list.need(1, part_words(block, row, most));
      const PackedBlock part = part_of(*from.format, block, row, std::min(most, block.rows - row));
      const uint64_t* live = part.live == nullptr ? nullptr : list.add_words(part.live, part.rows);
      list.blocks[list.used_blocks++] = {part.codes, part.scales, part.zeros,
                                         live,       part.rows,   slot};
      slot += part.live_rows;
    }
  }
  made.units = list.first_block + list.used_blocks - made.listed;
}

/// Builds the segments of the tokens that a KV head gains.
void HeadLayout::lay_gained(const GrowingRows& gained, const RowWindow& window,
                            const SideKernels& kernels, DeviceSegment* made, DeviceTail& tail) {
  const auto at = static_cast<size_t>(fixed_segments_);
  if (is_packed(gained, window)) {
    PackedBlock block;
    static_cast<void>(packed_segment(*window.format, gained, block));
    made[0].kernel = kernels.kernels[at];
    made[0].format = tail.format = format_of(*window.format);
    made[0].first_block = {block.codes, block.scales, block.zeros, nullptr, block.rows, 0};
    made[0].code_stride = tail.code_stride;
    made[0].scale_stride = tail.scale_stride;
    made[0].block_rows = gained.block_rows;
  }
  for (const size_t i : {size_t{1}, size_t{2}}) {
    made[i].kernel = kernels.kernels[at + i];
    made[i].rows = gained.ring;
    made[i].dtype = shape_.rows;
  }
}

/// Builds the fixed segments of a side; returns their slots.
int HeadLayout::lay_fixed(std::span<const SlotSegment> fixed, const SideKernels& kernels,
                          ListSpace& list, DeviceSegment* made) {
  assert(fixed.size() <= static_cast<size_t>(fixed_segments_));
  int slot = 0;
  bool selects = false;  // the selection continues from the segment before
  for (size_t i = 0; i < fixed.size(); ++i) {
    made[i].first_slot = made[i].first_place = slot;
    made[i].kernel = kernels.kernels[i];
    lay_segment(fixed[i], made[i].kernel, list, made[i]);
    made[i].first_block.first_slot = slot;
    if (selects) made[i].selected_of = 0;  // only the first segment has the size of a selection
    selects = fixed[i].selection != nullptr && !fixed[i].selection_ends;
    slot += fixed[i].slots;
  }
  return slot;
}

/// Builds the keys or the values of a KV head.
void HeadLayout::lay_side(int layer, bool keys, const TableHead& head, const SideKernels& kernels,
                          HeadSpace& to) {
  const int side = keys ? 0 : 1;
  DeviceSegment* made = to.segments + side * side_segments_;
  for (int i = 0; i < side_segments_; ++i) {
    made[i] = DeviceSegment();
    made[i].kernel = -1;
    made[i].source = -1;
  }
  const int slots = lay_fixed(keys ? head.keys : head.values, kernels, to.list, made);
  const GrowingRows& gained = keys ? head.keys_gained : head.values_gained;
  const RowWindow& window = windows_[static_cast<size_t>(layer)][static_cast<size_t>(side)];
  to.tails[side] = tail_of(gained, slots, head.placed);
  if (is_alone(layer)) return;
  lay_gained(gained, window, kernels, made + fixed_segments_, to.tails[side]);
  for (int i = 0; i < side_segments_; ++i) {
    DeviceSegment& segment = made[i];
    if (is_image_segment(segment.kernel)) {
      segment.pass = static_cast<int8_t>(std::popcount(kernels.all));
    } else if (segment.kernel > 0) {
      segment.pass = static_cast<int8_t>(std::popcount(kernels.all & ((1u << segment.kernel) - 1)));
    }
  }
}

/// Chooses the kernels that attend to a KV head, and the query source of each key segment.
void HeadLayout::choose(int layer, const TableHead& head) {
  const std::array<RowWindow, 2>& windows = windows_[static_cast<size_t>(layer)];
  const SideSegments keys(head.keys, head.keys_gained, windows[0], shape_.rows);
  const SideSegments values(head.values, head.values_gained, windows[1], shape_.rows);
  PackedHead whole;
  whole.keys = keys.all();
  whole.values = values.all();
  whole.remaps = head.remaps;
  whole.slots = 1;
  whole.weights_wanted = head.weighed.weights != nullptr;
  passes_ = {};
  fused_ = {};
  image_ = image_kernel(whole, shape_.head_dim, image_limits());
  if (image_ != 0 && has_image_rows(head) && has_rows_behind(whole)) {
    fused_.pair = image_;
    for (SideKernels& side : passes_) side.kernels[0] = image_segment(image_);
    return;
  }
  fused_ = fused_head(whole, shape_.head_dim, most_shared_bytes(), head.placed);
  if (head.placed && !lies_alike(head, windows)) fused_.pair = 0;
  if (2 * side_segments_ > kMostFusedSegments) fused_.pair = 0;
  if (fused_.pair != 0 || head.placed) image_ = 0;
  if (fused_.pair == 0) {
    fused_ = {};
    const bool found = find_sources(whole.keys, fused_);
    passes_[0] = kernels_of(true, whole.keys, head.keys.size(), found ? fused_.sources : 0);
    passes_[1] = kernels_of(false, whole.values, head.values.size(), 1);
  }
  place_sources(fused_, head.keys.size(), keys.count);
}

/// Kernels of two passes for the segments of a side, the first `fixed` of them fixed. The kernel of
/// the first packed segment also reads unpacked f16 tokens.
///   sources  of queries; 0: more than the kernels support
SideKernels HeadLayout::kernels_of(bool keys, std::span<const SlotSegment> segments, size_t fixed,
                                   int sources) const {
  const int most_shared = most_shared_bytes();
  std::array<int, kMostSideSegments> found{};
  int of_rows = row_kernel(keys, shape_.head_dim);
  bool is_first = true;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].format == nullptr || (i == 0 && image_ != 0)) continue;
    found[i] = sources == 0 ? kAnyKernel
                            : pass_kernel(segments[i], keys, shape_.head_dim, sources, most_shared);
    if (found[i] != kAnyKernel && std::exchange(is_first, false)) of_rows = found[i];
  }
  SideKernels made;
  for (size_t i = 0; i < segments.size(); ++i) {
    const bool is_half = segments[i].format == nullptr && is_placed_well(segments[i]);
    if (segments[i].format == nullptr) found[i] = is_half && sources > 0 ? of_rows : kAnyKernel;
    if (i > 0 || image_ == 0) made.all |= 1u << found[i];
  }
  if (std::popcount(made.all) + (image_ != 0 ? 1 : 0) >
      kMostPasses) {  // too many: one kernel for any format
    found.fill(kAnyKernel);
    made.all = 1u << kAnyKernel;
  }
  // Positions in the table: the ring, last in `segments`, becomes two segments.
  const auto gained = static_cast<size_t>(fixed_segments_);
  if (image_ != 0) found[0] = image_segment(image_);
  const auto at = [&](size_t i) { return static_cast<int8_t>(found[i]); };
  for (size_t i = 0; i < fixed; ++i) made.kernels[i] = at(i);
  if (segments.size() > fixed + 1) made.kernels[gained] = at(segments.size() - 2);
  made.kernels[gained + 1] = made.kernels[gained + 2] = at(segments.size() - 1);
  return made;
}

/// Moves the query sources of `made` to the segments' positions in the table. Of `segments` the
/// first `fixed` are fixed, and the last is the ring.
void HeadLayout::place_sources(FusedHead& made, size_t fixed, size_t segments) const {
  const std::array<int8_t, kMostFusedSegments> by_segment = made.source;
  made.source.fill(-1);
  std::copy_n(by_segment.begin(), fixed, made.source.begin());
  const auto gained = static_cast<size_t>(fixed_segments_);
  if (segments > fixed + 1) made.source[gained] = by_segment[segments - 2];
  made.source[gained + 1] = made.source[gained + 2] = by_segment[segments - 1];
}

}  // namespace kvlm::cuda::packed
