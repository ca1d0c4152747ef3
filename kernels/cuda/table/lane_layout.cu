// What a sequence holds, as the GPU will find it: fixed runs, the runs of the rows that it gains,
// and which kernel serves each. Whoever asks for less than a lane's longest life would have to lay
// it again.
#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "kernels/cuda/attend/format_choice.h"
#include "kernels/cuda/attend/picture_choice.h"
#include "kernels/cuda/attend/two_pass.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/lane_layout.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kAnyBlockRows =
    256;  // of blocks that any_format.cu reads, each by a block of threads

/// Full rows of a picture's lane are those of its ring alone, keys and values in the same places.
bool has_picture_rows(const TableLane& lane) {
  const GrowingRows& keys = lane.keys_gained;
  const GrowingRows& values = lane.values_gained;
  return lane.keys.size() == 1 && keys.first == values.first && keys.full == values.full &&
         keys.ring_rows == values.ring_rows;
}

/// Words of the bitmap of at most `most` rows of a block from `row` on.
int part_words(const PackedBlock& block, int row, int most) {
  return block.live == nullptr ? 0 : (std::min(most, block.rows - row) + 63) / 64;
}

/// The table packs the rows of a side when its window is full.
bool is_packed(const GrowingRows& gained, const RowWindow& window) {
  return window.format != nullptr && gained.scales != nullptr;
}

/// Rows that are packed evenly, as a run of one block, which will be in `block`.
SlotRun packed_run(const PackedFormat& format, const GrowingRows& rows, PackedBlock& block) {
  block.codes = rows.codes;
  block.scales = rows.scales;
  block.zeros = rows.zeros;
  block.rows = block.live_rows = rows.block_rows;
  SlotRun run;
  run.slots = rows.block_rows;
  run.format = &format;
  run.blocks = {&block, 1};
  run.code_stride = rows.code_stride;
  run.scale_stride = rows.scale_stride;
  return run;
}

/// Full rows of `dtype` from `ring` on, as a run.
SlotRun full_rows(const std::byte* ring, DType dtype) {
  SlotRun run;
  run.rows = ring;
  run.dtype = dtype;
  return run;
}

/// Rows [row, row + rows) of a block as a block of their own.
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

/// Whether the key and the value of every row of a lane that is placed lie in the same place, and
/// will: they come and go together.
bool lies_alike(const TableLane& lane, const std::array<RowWindow, 2>& windows) {
  const auto same_blocks = [](const SlotRun& keys, const SlotRun& values) {
    return std::equal(keys.blocks.begin(), keys.blocks.end(), values.blocks.begin(),
                      values.blocks.end(),
                      [](const PackedBlock& a, const PackedBlock& b) { return a.rows == b.rows; });
  };
  const GrowingRows& keys = lane.keys_gained;
  const GrowingRows& values = lane.values_gained;
  return windows[0].trigger == windows[1].trigger && windows[0].rows == windows[1].rows &&
         std::equal(lane.keys.begin(), lane.keys.end(), lane.values.begin(), lane.values.end(),
                    same_blocks) &&
         keys.ring_rows == values.ring_rows && keys.first == values.first &&
         keys.full == values.full && keys.block_rows == values.block_rows &&
         keys.most_blocks == values.most_blocks && keys.blocks == values.blocks &&
         keys.filling == values.filling && keys.filled == values.filled &&
         std::equal(lane.weighed.came.begin(), lane.weighed.came.end(),
                    lane.weighed.values_came.begin(), lane.weighed.values_came.end());
}

/// The counters of the rows that a lane gains behind `fixed_slots`, none of them yet.
DeviceTail tail_of(const GrowingRows& gained, int fixed_slots, bool placed) {
  DeviceTail tail{};
  static_cast<GrowingRows&>(tail) = gained;
  tail.placed = placed;
  tail.vacated = -1;
  tail.fixed_slots = fixed_slots;
  return tail;
}

/// The runs of one side of a lane as one pass over it would find them, in their order.
struct SideRuns {
  // Made when they are there: a prompt has thousands of lanes of a run or two.
  alignas(SlotRun) std::byte runs[kMostRuns / 2 * sizeof(SlotRun)];
  size_t count = 0;
  PackedBlock block;  // of the rows that the table has packed

  SideRuns(std::span<const SlotRun> fixed, const GrowingRows& gained, const RowWindow& window,
           DType dtype) {
    for (const SlotRun& run : fixed) add(run);
    if (is_packed(gained, window)) add(packed_run(*window.format, gained, block));
    add(full_rows(gained.ring, dtype));
  }
  SideRuns(const SideRuns&) = delete;  // a run points to the block
  std::span<const SlotRun> all() const { return {begin(), count}; }

 private:
  const SlotRun* begin() const { return std::launder(reinterpret_cast<const SlotRun*>(runs)); }
  void add(const SlotRun& run) {
    assert(count < kMostRuns / 2);
    std::construct_at(reinterpret_cast<SlotRun*>(runs) + count++, run);
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

LaneLayout::LaneLayout(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
                       std::span<const uint8_t> rows_alone, int fixed_runs, FormatList& formats)
    : bounds(shape.layers),
      shape_(shape),
      windows_(windows),
      rows_alone_(rows_alone),
      formats_(formats),
      fixed_runs_(fixed_runs),
      side_runs_(fixed_runs + kGainedRuns) {}

void LaneLayout::lay(int layer, const TableLane& from, LaneSpace& to) {
  if (!is_alone(layer)) choose(layer, from);
  lay_side(layer, true, from, passes_[0], to);
  lay_side(layer, false, from, passes_[1], to);
  lay_lane(layer, from, to);
}

/// The lane itself, whose runs have been laid, and what launches have to know of it.
void LaneLayout::lay_lane(int layer, const TableLane& from, LaneSpace& to) {
  DeviceLane& lane = *to.lane = DeviceLane();
  assert(from.remaps.size() <= static_cast<size_t>(shape_.remaps));
  assert(std::all_of(from.remaps.begin(), from.remaps.end(), [&](const ScoreRemap& remap) {
    return remap.first + remap.slots <= to.tails[0].fixed_slots;
  }));
  lane.first_remap = to.index * shape_.remaps;
  lane.remaps = static_cast<int>(from.remaps.size());
  lane.first_keys = to.index * 2 * side_runs_;
  lane.last_keys = lane.first_keys + side_runs_ - 1;
  lane.last_values = lane.last_keys + side_runs_;
  lane.placed = from.placed;
  lane.passes = is_alone(layer) ? 1 : 0;
  if (is_alone(layer)) return;
  const DeviceRun* values = to.runs + side_runs_;
  lane.selects = std::any_of(values, values + side_runs_,
                             [](const DeviceRun& run) { return run.selected_of > 0; });
  lane.fused = static_cast<int8_t>(fused_.pair);
  for (int i = 0; i < side_runs_; ++i) to.runs[i].source = fused_.source[static_cast<size_t>(i)];
  LaneKinds kinds;
  if (fused_.pair != 0) {
    kinds.fused = 1u << fused_.pair;
    kinds.sources[static_cast<size_t>(fused_.pair)] = fused_.sources;
    const bool weighed = from.weighed.weights != nullptr;
    kinds.lose_rows = (lane.placed || weighed) && !is_picture(fused_.pair);
    kinds.picture_rows = is_picture(fused_.pair);
    lane.passes = kinds.picture_rows ? 1 : 0;
  } else {
    kinds.keys = passes_[0].all;
    kinds.values = passes_[1].all;
    kinds.pass_sources = fused_.sources;
    kinds.passes = std::popcount(kinds.values) + (picture_ != 0 ? 1 : 0);
    lane.passes = static_cast<int8_t>(kinds.passes);
  }
  if (picture_ != 0) {
    kinds.fused |= 1u << picture_;
    kinds.picture_slots = from.keys[0].slots;
  }
  bounds.note(layer, kinds);
}

/// Asks the list, which others share, once for a format.
int16_t LaneLayout::format_of(const PackedFormat& format) {
  for (const auto& [known, place] : known_) {
    if (known == &format) return place;
  }
  return known_.emplace_back(&format, formats_.place_of(format)).second;
}

/// What never changes of a fixed run.
void LaneLayout::lay_run(const SlotRun& from, int kernel, ListSpace& list, DeviceRun& made) {
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

/// Where the blocks of a fixed run of packed rows are.
void LaneLayout::place_blocks(const SlotRun& from, int kernel, ListSpace& list, DeviceRun& made) {
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

/// Lists the blocks of a run; of one of many rows, parts of at most `most`.
void LaneLayout::list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made) {
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

/// The runs of the rows that a lane gains.
void LaneLayout::lay_gained(const GrowingRows& gained, const RowWindow& window,
                            const SideKernels& kernels, DeviceRun* made, DeviceTail& tail) {
  const auto at = static_cast<size_t>(fixed_runs_);
  if (is_packed(gained, window)) {
    PackedBlock block;
    static_cast<void>(packed_run(*window.format, gained, block));
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

/// The fixed runs of a side; returns their slots.
int LaneLayout::lay_fixed(std::span<const SlotRun> fixed, const SideKernels& kernels,
                          ListSpace& list, DeviceRun* made) {
  assert(fixed.size() <= static_cast<size_t>(fixed_runs_));
  int slot = 0;
  bool selects = false;  // the run before, whose selection goes on
  for (size_t i = 0; i < fixed.size(); ++i) {
    made[i].first_slot = made[i].first_place = slot;
    made[i].kernel = kernels.kernels[i];
    lay_run(fixed[i], made[i].kernel, list, made[i]);
    made[i].first_block.first_slot = slot;
    if (selects) made[i].selected_of = 0;  // the first run says where slots of a selection lie
    selects = fixed[i].selection != nullptr && !fixed[i].selection_ends;
    slot += fixed[i].slots;
  }
  return slot;
}

/// The keys or the values of a lane.
void LaneLayout::lay_side(int layer, bool keys, const TableLane& lane, const SideKernels& kernels,
                          LaneSpace& to) {
  const int side = keys ? 0 : 1;
  DeviceRun* made = to.runs + side * side_runs_;
  for (int i = 0; i < side_runs_; ++i) {
    made[i] = DeviceRun();
    made[i].kernel = -1;
    made[i].source = -1;
  }
  const int slots = lay_fixed(keys ? lane.keys : lane.values, kernels, to.list, made);
  const GrowingRows& gained = keys ? lane.keys_gained : lane.values_gained;
  const RowWindow& window = windows_[static_cast<size_t>(layer)][static_cast<size_t>(side)];
  to.tails[side] = tail_of(gained, slots, lane.placed);
  if (is_alone(layer)) return;
  lay_gained(gained, window, kernels, made + fixed_runs_, to.tails[side]);
  for (int i = 0; i < side_runs_; ++i) {
    DeviceRun& run = made[i];
    if (is_picture_run(run.kernel)) {
      run.pass = static_cast<int8_t>(std::popcount(kernels.all));
    } else if (run.kernel > 0) {
      run.pass = static_cast<int8_t>(std::popcount(kernels.all & ((1u << run.kernel) - 1)));
    }
  }
}

/// Which kernels attend to a lane, in one pass or two; sources of queries are by position.
void LaneLayout::choose(int layer, const TableLane& lane) {
  const std::array<RowWindow, 2>& windows = windows_[static_cast<size_t>(layer)];
  const SideRuns keys(lane.keys, lane.keys_gained, windows[0], shape_.rows);
  const SideRuns values(lane.values, lane.values_gained, windows[1], shape_.rows);
  PackedLane whole;
  whole.keys = keys.all();
  whole.values = values.all();
  whole.remaps = lane.remaps;
  whole.slots = 1;
  whole.weights_wanted = lane.weighed.weights != nullptr;
  passes_ = {};
  fused_ = {};
  picture_ = picture_kernel(whole, shape_.head_dim, picture_limits());
  if (picture_ != 0 && has_picture_rows(lane) && has_rows_behind(whole)) {
    fused_.pair = picture_;
    for (SideKernels& side : passes_) side.kernels[0] = picture_run(picture_);
    return;
  }
  fused_ = fused_lane(whole, shape_.head_dim, most_shared_bytes(), lane.placed);
  if (lane.placed && !lies_alike(lane, windows)) fused_.pair = 0;
  if (2 * side_runs_ > kMostFusedRuns) fused_.pair = 0;
  if (fused_.pair != 0 || lane.placed) picture_ = 0;
  if (fused_.pair == 0) {
    fused_ = {};
    const bool found = find_sources(whole.keys, fused_);
    passes_[0] = kernels_of(true, whole.keys, lane.keys.size(), found ? fused_.sources : 0);
    passes_[1] = kernels_of(false, whole.values, lane.values.size(), 1);
  }
  place_sources(fused_, lane.keys.size(), keys.count);
}

/// The kernels of two passes over the runs of a side, of which the first `fixed` are fixed. F16
/// rows are read with the first packed run.
///   sources  of queries; 0: more than kernels take
SideKernels LaneLayout::kernels_of(bool keys, std::span<const SlotRun> runs, size_t fixed,
                                   int sources) const {
  const int most_shared = most_shared_bytes();
  std::array<int, kMostSideRuns> found{};
  int of_rows = row_kernel(keys, shape_.head_dim);
  bool is_first = true;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].format == nullptr || (i == 0 && picture_ != 0)) continue;
    found[i] = sources == 0 ? kAnyKernel
                            : pass_kernel(runs[i], keys, shape_.head_dim, sources, most_shared);
    if (found[i] != kAnyKernel && std::exchange(is_first, false)) of_rows = found[i];
  }
  SideKernels made;
  for (size_t i = 0; i < runs.size(); ++i) {
    const bool is_half = runs[i].format == nullptr && is_placed_well(runs[i]);
    if (runs[i].format == nullptr) found[i] = is_half && sources > 0 ? of_rows : kAnyKernel;
    if (i > 0 || picture_ == 0) made.all |= 1u << found[i];
  }
  if (std::popcount(made.all) + (picture_ != 0 ? 1 : 0) >
      kMostPasses) {  // one kernel that reads all of them
    found.fill(kAnyKernel);
    made.all = 1u << kAnyKernel;
  }
  // By position: the last of `runs` is the ring, which is two runs.
  const auto gained = static_cast<size_t>(fixed_runs_);
  if (picture_ != 0) found[0] = picture_run(picture_);
  const auto at = [&](size_t i) { return static_cast<int8_t>(found[i]); };
  for (size_t i = 0; i < fixed; ++i) made.kernels[i] = at(i);
  if (runs.size() > fixed + 1) made.kernels[gained] = at(runs.size() - 2);
  made.kernels[gained + 1] = made.kernels[gained + 2] = at(runs.size() - 1);
  return made;
}

/// Names the sources of `made` by the positions of a side's runs. Of `runs` that there are, in
/// their order, `fixed` are fixed, and the last has full rows.
void LaneLayout::place_sources(FusedLane& made, size_t fixed, size_t runs) const {
  const std::array<int8_t, kMostFusedRuns> by_run = made.source;
  made.source.fill(-1);
  std::copy_n(by_run.begin(), fixed, made.source.begin());
  const auto gained = static_cast<size_t>(fixed_runs_);
  if (runs > fixed + 1) made.source[gained] = by_run[runs - 2];
  made.source[gained + 1] = made.source[gained + 2] = by_run[runs - 1];
}

}  // namespace kvlm::cuda::packed
