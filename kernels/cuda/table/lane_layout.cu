// What a sequence holds, as the GPU will find it: fixed runs, the runs of the rows that it gains,
// and which kernel serves each. Whoever asks for less than a lane's longest life would have to lay
// it again.
#include <algorithm>
#include <array>
#include <cassert>
#include <memory>
#include <new>
#include <utility>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/lane_layout.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int16_t kFusedRun = kCodeKernels + 1;  // DeviceRun::kernel of runs of fused lanes

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

/// Whether weights lie in the order of a lane's runs of values (DeviceLane::in_run_order), so that
/// kernels which know of no selection serve the runs: where one selection splits some of the
/// values, and nobody else reads weights.
///   slots  of the lane, at most
bool goes_in_run_order(std::span<const SlotRun> values, size_t remaps, bool weights_wanted,
                       int slots) {
  if (remaps > 0 || weights_wanted || slots > kMostOrdered) return false;
  const auto selects = [](const SlotRun& run) { return run.selection != nullptr; };
  const auto first = std::find_if(values.begin(), values.end(), selects);
  const auto end = std::find_if_not(first, values.end(), selects);
  const auto ends = std::count_if(first, end, [](const SlotRun& r) { return r.selection_ends; });
  return first != end && end - first <= 2 && ends == 1 && (end - 1)->selection_ends &&
         std::none_of(end, values.end(), selects);
}

/// Says to which remap each run of a lane belongs; false if one belongs to several, or to one in
/// part.
bool find_ranges(std::span<const ScoreRemap> remaps, std::span<DeviceRun> runs) {
  for (DeviceRun& run : runs) {
    if (run.kernel < 0) continue;
    for (size_t r = 0; r < remaps.size(); ++r) {
      const int from = std::max(run.first_slot, remaps[r].first);
      const int to = std::min(run.first_slot + run.slots, remaps[r].first + remaps[r].slots);
      if (from >= to) continue;
      if (to - from != run.slots || run.range != 0) return false;
      run.range = static_cast<int16_t>(r + 1);
    }
  }
  return true;
}

/// Whether a lane of several passes finds only the constants of its softmax before values are added
/// (DeviceLane::deferred). Says to which remap its runs belong.
bool defers(const TableLane& lane, std::span<DeviceRun> runs) {
  return !lane.placed && lane.weighed.weights == nullptr && find_ranges(lane.remaps, runs) &&
         std::none_of(runs.begin(), runs.end(),
                      [](const DeviceRun& run) { return run.kernel == kCodeKernels; });
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
                       std::span<const uint8_t> rows_alone, int fixed_runs, int longest,
                       FormatList& formats)
    : bounds(shape.layers, fixed_runs + kGainedRuns),
      shape_(shape),
      windows_(windows),
      rows_alone_(rows_alone),
      formats_(formats),
      fixed_runs_(fixed_runs),
      side_runs_(fixed_runs + kGainedRuns),
      longest_(longest) {}

void LaneLayout::lay(int layer, const TableLane& from, LaneSpace& to) {
  LaneWay way{};
  way.alone = rows_alone_[static_cast<size_t>(layer)] != 0;
  const FusedLane fused = way.alone ? FusedLane{} : served_in_one_pass(layer, from);
  way.fused = fused.pair != 0;
  way.in_order = !way.fused && goes_in_order(from);
  way.slots = from.keys_gained.packed + from.keys_gained.full;
  for (const SlotRun& run : from.keys) way.slots += run.slots;
  lay_side(layer, true, from, way, to);
  lay_side(layer, false, from, way, to);
  lay_lane(from, fused, way, to);
  if (way.alone) return;
  bounds.note_kind(layer, *to.lane, fused.sources);
  if (is_picture(fused.pair)) bounds.note_picture(layer, from.keys[0].slots);
}

/// Whether its values are weighted in the order of their runs.
bool LaneLayout::goes_in_order(const TableLane& lane) const {
  // Until it is laid again, which the host does where it packs values by their protection. Rows
  // that are full already do not count, so that laying a lane anew changes nothing.
  int most = lane.values_gained.ring_rows;
  for (const SlotRun& run : lane.values) most += run.slots;
  return !lane.placed &&
         goes_in_run_order(lane.values, lane.remaps.size(), lane.weighed.weights != nullptr, most);
}

/// The lane itself, whose runs have been laid, and what they have to know of it.
void LaneLayout::lay_lane(const TableLane& from, const FusedLane& fused, const LaneWay& way,
                          LaneSpace& to) {
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
  lane.fused = static_cast<int8_t>(fused.pair);
  lane.in_run_order = way.in_order;
  lane.placed = from.placed;
  const std::span<DeviceRun> runs(to.runs, 2 * static_cast<size_t>(side_runs_));
  for (DeviceRun& run : runs) {
    run.lane = to.index;
    if (way.fused && run.kernel >= 0) run.kernel = kFusedRun;
  }
  for (int i = 0; i < side_runs_; ++i) runs[i].source = fused.source[static_cast<size_t>(i)];
  lane.deferred = !way.fused && !way.in_order && defers(from, runs);
}

/// Asks the list, which others share, once for a format.
int16_t LaneLayout::format_of(const PackedFormat& format) {
  for (const auto& [known, place] : known_) {
    if (known == &format) return place;
  }
  return known_.emplace_back(&format, formats_.place_of(format)).second;
}

/// The kernel that serves a run, of those that attend in several passes.
int16_t LaneLayout::kernel_of(const SlotRun& run, bool keys, bool in_order) const {
  const int kernel = code_kernel(run, keys, in_order, shape_.head_dim);
  return static_cast<int16_t>(kernel < 0 ? static_cast<int>(kCodeKernels) : kernel);
}

/// What never changes of a fixed run.
void LaneLayout::lay_run(const SlotRun& from, bool keys, const LaneWay& way, ListSpace& list,
                         DeviceRun& made) {
  made.kernel = kernel_of(from, keys, way.in_order);
  made.slots = from.slots;
  made.selected_of = from.selected_of;
  made.selected_bit = from.selected_bit;
  made.q = from.q;
  if (from.selection != nullptr) {
    list.need(0, (from.selected_of + 63) / 64);
    made.selection = list.add_words(from.selection, from.selected_of);
  }
  if (from.format == nullptr) {
    made.cut = static_cast<int8_t>(Cut::kRows);
    made.rows = from.rows;
    made.dtype = from.dtype;
    return;
  }
  made.format = format_of(*from.format);
  cut_run(from, way, list, made);
}

/// How a fixed run of packed rows is cut into blocks.
void LaneLayout::cut_run(const SlotRun& from, const LaneWay& way, ListSpace& list,
                         DeviceRun& made) {
  const PackedBlock& block = from.blocks[0];
  made.first_block = {block.codes, block.scales, block.zeros, nullptr, block.rows, 0};
  if (from.code_stride != 0 && block.rows <= kAnySplitSlots) {
    made.cut = static_cast<int8_t>(Cut::kEven);
    made.code_stride = static_cast<int>(from.code_stride);
    made.scale_stride = static_cast<int>(from.scale_stride);
    made.block_rows = block.rows;
    made.packed_rows = from.slots;
  } else if (from.blocks.size() == 1 && block.live == nullptr) {
    made.cut = static_cast<int8_t>(Cut::kSingle);
  } else {
    const int most = way.fused                     ? kFusedBlockRows
                     : made.kernel == kCodeKernels ? kAnySplitSlots
                     : from.selection != nullptr   ? kOrderedSplitSlots
                                                   : split_slots(way.slots);
    list_blocks(from, most, list, made);
  }
}

/// Lists the blocks of a run; of one of many rows, parts of at most `most`.
void LaneLayout::list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made) {
  made.cut = static_cast<int8_t>(Cut::kListed);
  made.listed = list.first_block + list.used_blocks;
  int slot = made.first_slot;
  int longest = 1;
  for (const PackedBlock& block : from.blocks) {
    for (int row = 0; row < block.rows; row += most) {
      list.need(1, part_words(block, row, most));
      const PackedBlock part = part_of(*from.format, block, row, std::min(most, block.rows - row));
      const uint64_t* live = part.live == nullptr ? nullptr : list.add_words(part.live, part.rows);
      list.blocks[list.used_blocks++] = {part.codes, part.scales, part.zeros,
                                         live,       part.rows,   slot};
      slot += part.live_rows;
      longest = std::max(longest, part.rows);
    }
  }
  made.units = list.first_block + list.used_blocks - made.listed;
  made.step = std::max(1, most / longest);
}

/// The runs of the rows that a lane gains.
void LaneLayout::lay_gained(const GrowingRows& gained, const RowWindow& window, bool keys,
                            DeviceRun* made, DeviceTail& tail) {
  made[0].kernel = -1;
  if (is_packed(gained, window)) {
    PackedBlock block;
    const SlotRun packed = packed_run(*window.format, gained, block);
    made[0].kernel = kernel_of(packed, keys, /*in_order=*/false);
    made[0].cut = static_cast<int8_t>(Cut::kEven);
    made[0].format = tail.format = format_of(*window.format);
    made[0].first_block = {block.codes, block.scales, block.zeros, nullptr, block.rows, 0};
    made[0].code_stride = tail.code_stride;
    made[0].scale_stride = tail.scale_stride;
    made[0].block_rows = gained.block_rows;
  }
  const int16_t kernel = kernel_of(full_rows(gained.ring, shape_.rows), keys, /*in_order=*/false);
  for (DeviceRun* ring : {made + 1, made + 2}) {
    ring->kernel = kernel;
    ring->cut = static_cast<int8_t>(Cut::kRows);
    ring->rows = gained.ring;
    ring->dtype = shape_.rows;
  }
}

/// The fixed runs of a side; returns their slots.
int LaneLayout::lay_fixed(int layer, bool keys, std::span<const SlotRun> fixed, const LaneWay& way,
                          ListSpace& list, DeviceRun* made) {
  assert(fixed.size() <= static_cast<size_t>(fixed_runs_));
  int slot = 0;
  int selected = 0;
  for (size_t i = 0; i < fixed.size(); ++i) {
    made[i].first_slot = slot + (way.in_order ? selected : 0);
    lay_run(fixed[i], keys, way, list, made[i]);
    made[i].first_block.first_slot = made[i].first_slot;
    if (!way.fused)
      bounds.note(layer, keys, static_cast<int>(i), made[i], fixed[i].slots, longest_);
    if (fixed[i].selection == nullptr) {
      slot += fixed[i].slots;
      continue;
    }
    selected += fixed[i].slots;
    if (fixed[i].selection_ends) slot += std::exchange(selected, 0);
  }
  return slot;
}

/// The keys or the values of a lane.
void LaneLayout::lay_side(int layer, bool keys, const TableLane& lane, const LaneWay& way,
                          LaneSpace& to) {
  const int side = keys ? 0 : 1;
  DeviceRun* made = to.runs + side * side_runs_;
  for (int i = 0; i < side_runs_; ++i) {
    made[i] = DeviceRun();
    made[i].kernel = -1;
    made[i].source = -1;
  }
  const int slots = lay_fixed(layer, keys, keys ? lane.keys : lane.values, way, to.list, made);
  const GrowingRows& gained = keys ? lane.keys_gained : lane.values_gained;
  const RowWindow& window = windows_[static_cast<size_t>(layer)][static_cast<size_t>(side)];
  to.tails[side] = tail_of(gained, slots, lane.placed);
  if (way.alone) return;
  lay_gained(gained, window, keys, made + fixed_runs_, to.tails[side]);
  for (int i = 0; i < kGainedRuns; ++i) {
    const DeviceRun& run = made[fixed_runs_ + i];
    if (run.kernel < 0 || way.fused) continue;
    bounds.note(layer, keys, fixed_runs_ + i, run, i == 0 ? longest_ : gained.ring_rows, longest_);
  }
}

/// The kernel that attends to a lane in one pass, if any: `source` is by position.
FusedLane LaneLayout::served_in_one_pass(int layer, const TableLane& lane) const {
  const std::array<RowWindow, 2>& windows = windows_[static_cast<size_t>(layer)];
  const SideRuns keys(lane.keys, lane.keys_gained, windows[0], shape_.rows);
  const SideRuns values(lane.values, lane.values_gained, windows[1], shape_.rows);
  PackedLane whole;
  whole.keys = keys.all();
  whole.values = values.all();
  whole.remaps = lane.remaps;
  whole.slots = 1;
  whole.weights_wanted = lane.weighed.weights != nullptr;
  if (has_picture_rows(lane)) {
    const int picture = picture_lane(whole, shape_.head_dim, picture_limits());
    if (picture != 0) return {picture};
  }
  FusedLane made = fused_lane(whole, shape_.head_dim, most_shared_bytes(), lane.placed);
  if (lane.placed && !lies_alike(lane, windows)) made.pair = 0;
  if (2 * side_runs_ > kMostFusedRuns) made.pair = 0;
  place_sources(made, lane.keys.size(), keys.count);
  return made;
}

/// Names the sources of `made` by the positions of a side's runs. Of `runs` that there are, in
/// their order, `fixed` are fixed, and the last has full rows.
void LaneLayout::place_sources(FusedLane& made, size_t fixed, size_t runs) const {
  const std::array<int8_t, kMostFusedRuns> by_run = made.source;
  made.source.fill(-1);
  if (made.pair == 0) return;
  std::copy_n(by_run.begin(), fixed, made.source.begin());
  const auto gained = static_cast<size_t>(fixed_runs_);
  if (runs > fixed + 1) made.source[gained] = by_run[runs - 2];
  made.source[gained + 1] = made.source[gained + 2] = by_run[runs - 1];
}

}  // namespace kvlm::cuda::packed
