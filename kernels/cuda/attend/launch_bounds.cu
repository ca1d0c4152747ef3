// The sizes of a DecodeTable's launches: the largest that any lane it was told of may want, so that
// steps with other lanes launch the same.
#include <algorithm>

#include "kernels/cuda/attend/launch_bounds.h"

namespace kvlm::cuda::packed {

namespace {

/// The most splits of a run of at most `slots` slots, in a lane of any length, whose splits have at
/// most `cap` slots, or `key_slots` if that is less and not 0, and are of whole blocks.
int most_splits(int slots, int block_rows, int cap, int key_slots) {
  int most = 0;
  const auto of = [&](int in_lane, int split) {
    int wanted = std::min(split, cap);
    if (key_slots > 0) wanted = std::min(wanted, std::max(key_slots, block_rows));
    const int cut = std::max(1, wanted / block_rows) * block_rows;
    most = std::max(most, static_cast<int>(ceil_div(std::min(slots, in_lane), cut)));
  };
  if (key_slots > 0) {
    of(slots, kMostKeySlots);
  } else {
    of(kShortLane - 1, split_slots(kShortLane - 1));
    of(kLongLane - 1, split_slots(kLongLane - 1));
    of(slots, kMostValueSlots);
  }
  return most;
}

}  // namespace

LaunchBounds::LaunchBounds(int layers, int side_runs)
    : sides_(static_cast<size_t>(layers)),
      kinds_(static_cast<size_t>(layers)),
      side_runs_(side_runs) {}

void LaunchBounds::cut_keys(int slots) {
  changed |= key_slots_ != slots;
  key_slots_ = slots;
}

/// Notes what launches have to reach: a run at a position that has at most `slots` slots.
void LaunchBounds::note(int layer, bool keys, int position, const DeviceRun& run, int slots,
                        int longest) {
  SideBounds& side = sides_[static_cast<size_t>(layer)][keys ? 0 : 1];
  const auto at = static_cast<size_t>(position);
  const uint32_t bit = uint32_t{1} << position;
  set(side.positions[static_cast<size_t>(run.kernel)], bit);
  if (run.selection != nullptr && run.kernel != kCodeKernels) set(side.ordered, bit);
  if (static_cast<Cut>(run.cut) == Cut::kListed) {
    // Rounded up, as below.
    constexpr int kTogether = 8;
    const auto splits = static_cast<int>(ceil_div(run.units, run.step));
    return grow(side.listed[at], (splits + kTogether - 1) / kTogether * kTogether);
  }
  // Rounded up, so that sequences of about the same length launch the same.
  int rounded = 256;
  while (rounded < slots) rounded *= 2;
  grow(side.slots[at], std::min(rounded, std::max(longest, slots)));
  if (static_cast<Cut>(run.cut) == Cut::kEven) note_block_rows(side, run.block_rows);
}

void LaunchBounds::note_block_rows(SideBounds& side, int rows) {
  std::vector<int>& sizes = side.block_rows;
  if (std::find(sizes.begin(), sizes.end(), rows) != sizes.end()) return;
  sizes.push_back(rows);
  changed = true;
}

/// Notes which kernels serve a lane.
void LaunchBounds::note_kind(int layer, const DeviceLane& lane, int sources) {
  LaneKinds kinds;
  if (lane.fused != 0) {
    kinds.fused = 1u << lane.fused;
    kinds.sources[static_cast<size_t>(lane.fused)] = sources;
    kinds.lose_rows = lane.placed && !is_picture(lane.fused);
  } else {
    kinds.unfused = true;
    kinds.deferred = lane.deferred;
    kinds.placed = lane.placed;
    kinds.plain = !lane.deferred && !lane.placed;
    kinds.ordered = lane.in_run_order;
  }
  take_kinds(layer, kinds);
}

void LaunchBounds::take_kinds(int layer, const LaneKinds& more) {
  LaneKinds& kinds = kinds_[static_cast<size_t>(layer)];
  const LaneKinds before = kinds;
  kinds.deferred |= more.deferred;
  kinds.plain |= more.plain;
  kinds.placed |= more.placed;
  kinds.ordered |= more.ordered;
  kinds.unfused |= more.unfused;
  kinds.fused |= more.fused;
  for (size_t i = 0; i < more.sources.size(); ++i) {
    kinds.sources[i] = std::max(kinds.sources[i], more.sources[i]);
  }
  kinds.lose_rows |= more.lose_rows;
  kinds.picture_slots = std::max(kinds.picture_slots, more.picture_slots);
  changed |= kinds != before;
}

void LaunchBounds::note_picture(int layer, int slots) {
  // Rounded up, so that sequences of about the same length launch the same.
  constexpr int kRounded = 256;
  grow(kinds_[static_cast<size_t>(layer)].picture_slots,
       (slots + kRounded - 1) / kRounded * kRounded);
}

void LaunchBounds::take(const LaunchBounds& other) {
  for (size_t layer = 0; layer < sides_.size(); ++layer) {
    for (const size_t side : {size_t{0}, size_t{1}}) {
      take(sides_[layer][side], other.sides_[layer][side]);
    }
    take_kinds(static_cast<int>(layer), other.kinds_[layer]);
  }
}

void LaunchBounds::take(SideBounds& side, const SideBounds& other) {
  for (size_t at = 0; at < side.slots.size(); ++at) {
    grow(side.slots[at], other.slots[at]);
    grow(side.listed[at], other.listed[at]);
  }
  for (size_t kernel = 0; kernel < side.positions.size(); ++kernel) {
    set(side.positions[kernel], other.positions[kernel]);
  }
  set(side.ordered, other.ordered);
  for (const int rows : other.block_rows) note_block_rows(side, rows);
}

/// Splits of a run at a position, at most; they take so many workspace of parts.
int LaunchBounds::bound(int layer, bool keys, int position) const {
  const SideBounds& side = sides_[static_cast<size_t>(layer)][keys ? 0 : 1];
  const auto at = static_cast<size_t>(position);
  int most = side.listed[at];
  if (side.slots[at] == 0) return most;
  const uint32_t bit = uint32_t{1} << position;
  const bool any = (side.positions[kCodeKernels] & bit) != 0;
  const bool ordered = (side.ordered & bit) != 0;
  const int cap = any ? kAnySplitSlots : ordered ? kOrderedSplitSlots : kMostKeySlots;
  for (const int block_rows : side.block_rows) {
    const int key_slots = keys && !any ? key_slots_ : 0;
    most = std::max(most, most_splits(side.slots[at], block_rows, cap, key_slots));
  }
  return most;
}

/// Which runs the kernels of a layer serve, of its keys or its values.
ServedByKernel LaunchBounds::served(int layer, bool keys, unsigned lanes) const {
  const SideBounds& side = sides_[static_cast<size_t>(layer)][keys ? 0 : 1];
  ServedByKernel served{};
  for (size_t kernel = 0; kernel < served.size(); ++kernel) {
    ServedRuns& of = served[kernel];
    of.position_count = 0;
    int most = 0;
    for (int i = 0; i < side_runs_; ++i) {
      if ((side.positions[kernel] >> i & 1) == 0) continue;
      const int position = (keys ? 0 : side_runs_) + i;
      of.positions |= static_cast<uint64_t>(position) << 4 * of.position_count++;
      most = std::max(most, bound(layer, keys, i));
    }
    of.splits = {lanes * static_cast<unsigned>(of.position_count), static_cast<unsigned>(most)};
    if (most == 0) of.splits.runs = 0;
  }
  return served;
}

int LaunchBounds::parts(int layer, bool keys) const {
  int sum = 0;
  for (int i = 0; i < side_runs_; ++i) sum += bound(layer, keys, i);
  return sum;
}

bool LaunchBounds::has_pictures(int layer) const {
  return (kinds_[static_cast<size_t>(layer)].fused & kPictureKernels) != 0;
}

LayerLaunch LaunchBounds::layer_launch(int layer, int lanes) const {
  LayerLaunch launch;
  launch.kinds = kinds_[static_cast<size_t>(layer)];
  launch.lanes = static_cast<unsigned>(lanes);
  launch.keys = served(layer, true, launch.lanes);
  launch.values = served(layer, false, launch.lanes);
  launch.pictures.slots = launch.kinds.picture_slots;
  if (launch.kinds.deferred) launch.deferred = launch.lanes;
  launch.key_parts = lanes * parts(layer, true);
  launch.value_parts = lanes * parts(layer, false);
  return launch;
}

}  // namespace kvlm::cuda::packed
