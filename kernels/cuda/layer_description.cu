#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/fused_attention.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layer_description.h"

// Lanes that no DecodeTable holds, as the host describes them at every step: who serves each, how
// its runs are cut into splits. Bitmaps are uploaded first, then all else at once.
namespace kvlm::cuda::packed {

namespace {

constexpr int kSplitSlots = kAnySplitSlots;

/// The runs that a kernel serves.
struct Served {
  std::vector<int> runs;
  Splits splits;

  void clear() {
    runs.clear();
    splits = {};
  }
  void add(int run, int count) {
    runs.push_back(run);
    ++splits.runs;
    splits.most = std::max(splits.most, static_cast<unsigned>(count));
  }
};

/// The runs of keys, or of values: last those of the kernel that serves every format.
struct Side {
  std::array<Served, kCodeKernels + 1> served;
  int parts = 0;

  void clear() {
    for (Served& runs : served) runs.clear();
    parts = 0;
  }
};

/// Arrays that travel to the GPU in one copy. They must not move before upload().
class Packet {
 public:
  template <class T>
  size_t add(std::span<const T> values) {
    const size_t at = bytes_;
    ranges_.push_back({values.data(), values.size_bytes(), at});
    bytes_ = (at + values.size_bytes() + 15) / 16 * 16;
    return at;
  }
  void clear() {
    ranges_.clear();
    bytes_ = 0;
  }
  const std::byte* upload(Stream& stream) const {
    return stream.queue().upload_ranges(ranges_, bytes_);
  }

 private:
  std::vector<UploadRange> ranges_;
  size_t bytes_ = 0;
};

/// The host's description of a layer. Every thread keeps one, so that describing a batch takes
/// memory only when it is larger than any before.
struct LayerBuilder {
  std::vector<DeviceLane> lanes;
  std::vector<DeviceRun> runs;  // keys of lane 0, its values, keys of lane 1, ...
  std::vector<int> kernels;     // of runs: a CodeKernel, or kCodeKernels for the one for any format
  std::vector<const SlotRun*> sources;
  std::vector<size_t> first_runs;  // of lanes
  std::vector<DeviceBlock> blocks;
  std::vector<PackedFormat> formats;
  std::vector<const PackedFormat*> known;  // where formats came from
  std::vector<ScoreRemap> remaps;
  std::vector<DevicePiece> pieces;       // full rows of lanes that picture_lanes.cu serves
  std::vector<DeviceRowLane> row_lanes;  // of all lanes, if there are such
  int row_parts = 0;
  Side keys, values;
  int key_slots = 0;                                  // of a split of keys, at most
  std::vector<uint64_t> bits;                         // bitmaps
  std::vector<std::pair<size_t, size_t>> live;        // block, its first word in `bits`
  std::vector<std::pair<size_t, size_t>> selections;  // the same of runs
  Packet packet;

  void clear() {
    lanes.clear();
    first_runs.clear();
    blocks.clear();
    formats.clear();
    known.clear();
    remaps.clear();
    pieces.clear();
    row_lanes.clear();
    row_parts = 0;
    keys.clear();
    values.clear();
    bits.clear();
    live.clear();
    selections.clear();
    packet.clear();
  }

  void resize_runs(size_t count) {
    runs.resize(count);
    kernels.resize(count);
    sources.resize(count);
  }

  int16_t format_of(const PackedFormat& format) {
    const auto at = std::find(known.begin(), known.end(), &format) - known.begin();
    if (at == static_cast<std::ptrdiff_t>(known.size())) {
      known.push_back(&format);
      formats.push_back(format);
    }
    return static_cast<int16_t>(at);
  }

  void add_block(const PackedBlock& block, int first_slot) {
    if (block.live != nullptr) {
      live.emplace_back(blocks.size(), bits.size());
      bits.insert(bits.end(), block.live, block.live + (block.rows + 63) / 64);
    }
    blocks.push_back({block.codes, block.scales, block.zeros, nullptr, block.rows, first_slot});
  }

  /// Notes which values a run holds; neighbours often have the bitmap in common.
  void add_selection(const SlotRun& run, size_t index) {
    if (selections.empty() || sources[selections.back().first]->selection != run.selection) {
      selections.emplace_back(index, bits.size());
      bits.insert(bits.end(), run.selection, run.selection + (run.selected_of + 63) / 64);
    } else {
      selections.emplace_back(index, selections.back().second);
    }
  }

  /// Bitmaps travel first, by themselves, so that blocks and runs can say where theirs is.
  void place_bits(Stream& stream) {
    if (bits.empty()) return;
    const std::byte* at = stream.queue().upload(bits.data(), bits.size() * sizeof(uint64_t));
    const auto* placed = reinterpret_cast<const uint64_t*>(at);
    for (const auto& [block, word] : live) blocks[block].live = placed + word;
    for (const auto& [run, word] : selections) runs[run].selection = placed + word;
  }

  /// What runs say of themselves, from runs[first] on.
  void describe_runs(std::span<const SlotRun> from, bool are_keys, int lane, int head_dim,
                     bool fused, size_t first) {
    const bool in_order = lanes[static_cast<size_t>(lane)].in_run_order;
    int slot = 0;
    int selected = 0;
    for (const SlotRun& run : from) {
      DeviceRun& made = runs[first] = DeviceRun();
      made.lane = lane;
      made.slots = run.slots;
      made.first_slot = slot + (in_order ? selected : 0);
      made.selection = run.selection;
      made.selected_of = run.selected_of;
      made.selected_bit = run.selected_bit;
      made.q = run.q;
      const int kernel = code_kernel(run, are_keys, in_order, head_dim);
      const int most = fused        ? kFusedBlockRows
                       : kernel < 0 ? kSplitSlots
                                    : most_slots(run, lane, are_keys);
      if (run.format == nullptr) {
        made.rows = run.rows;
        made.dtype = run.dtype;
        made.units = run.slots;
        made.step = most;
      } else if (run.code_stride != 0 && run.blocks[0].rows <= most) {
        lay_evenly(run, most, made);
      } else if (run.blocks.size() == 1 && run.blocks[0].live == nullptr) {
        split_evenly(run, most, made);
      }
      kernels[first] = kernel < 0 ? kCodeKernels : kernel;
      sources[first] = &run;
      if (run.selection != nullptr) add_selection(run, first);
      ++first;
      advance(run, slot, selected);
    }
  }

  /// Cuts runs [first, last) into splits and gives each run to its kernel, unless the lane is
  /// `fused`. Returns how many splits.
  int split_runs(size_t first, size_t last, bool fused, Side& side) {
    const int before = side.parts;
    for (size_t i = first; i < last; ++i) {
      DeviceRun& run = runs[i];
      const SlotRun& source = *sources[i];
      if (source.format != nullptr) run.format = format_of(*source.format);
      if (run.step == 0) {
        const bool any = kernels[i] == kCodeKernels;
        list_blocks(source,
                    fused ? kFusedBlockRows
                    : any ? kSplitSlots
                          : most_slots(source, run.lane, &side == &keys),
                    run);
      }
      if (fused) continue;
      run.splits = static_cast<int>(ceil_div(run.units, run.step));
      run.first_part = side.parts;
      side.parts += run.splits;
      if (run.splits > 0) {
        side.served[static_cast<size_t>(kernels[i])].add(static_cast<int>(i), run.splits);
      }
    }
    return side.parts - before;
  }

  /// The parts of a lane that picture_lanes.cu serves: its packed rows, then parts of its full
  /// ones.
  void add_row_lane(const PackedLane& lane, PictureLanes& pictures) {
    DeviceRowLane made{lane.out, row_parts, 0};
    for (size_t i = 1; i < lane.keys.size(); ++i) {
      const SlotRun& keys_run = lane.keys[i];
      const KeyValueRows rows{keys_run.rows, lane.values[i].rows, DType::kF16, keys_run.slots};
      const int parts = static_cast<int>(ceil_div(rows.rows, kPartRows));
      if (parts == 0) continue;
      pieces.push_back({lane.q, rows, 0, keys_run.slots, row_parts, parts});
      pictures.rows.parts = std::max(pictures.rows.parts, static_cast<unsigned>(parts));
      row_parts += parts;
      made.parts += parts;
    }
    row_lanes.push_back(made);
    pictures.slots = std::max(pictures.slots, lane.keys[0].slots);
  }

  /// Slots of a split of a run. Blocks that lie evenly are not cut for the sake of small splits.
  int most_slots(const SlotRun& run, int lane, bool are_keys) const {
    const int most = split_slots(lanes[static_cast<size_t>(lane)].slots);
    if (!are_keys) return run.selection != nullptr ? kOrderedSplitSlots : most;
    const int whole = run.code_stride != 0 ? run.blocks[0].rows : 0;
    return std::min(most, std::max(key_slots, whole));
  }

  static void advance(const SlotRun& run, int& slot, int& selected) {
    if (run.selection == nullptr) {
      slot += run.slots;
      return;
    }
    selected += run.slots;
    if (!run.selection_ends) return;
    slot += selected;
    selected = 0;
  }

  static void lay_evenly(const SlotRun& run, int most, DeviceRun& made) {
    const PackedBlock& first = run.blocks[0];
    made.first_block = {first.codes, first.scales, first.zeros,
                        nullptr,     first.rows,   made.first_slot};
    made.code_stride = static_cast<int>(run.code_stride);
    made.scale_stride = static_cast<int>(run.scale_stride);
    made.block_rows = first.rows;
    made.packed_rows = run.slots;
    made.units = static_cast<int>(run.blocks.size());
    made.step = std::max(1, most / made.block_rows);
  }

  /// One block of many rows, as blocks of `most` rows that have scales in common unless they are
  /// of tokens.
  static void split_evenly(const SlotRun& run, int most, DeviceRun& made) {
    const PackedBlock& block = run.blocks[0];
    const PackedFormat& format = *run.format;
    made.first_block = {block.codes, block.scales, block.zeros, nullptr, most, made.first_slot};
    made.code_stride = most * static_cast<int>(format.row_bytes());
    if (format.axis == ScaleAxis::kToken) {
      made.scale_stride = most * format.groups() * static_cast<int>(dtype_bytes(format.meta));
    }
    made.block_rows = most;
    made.packed_rows = run.slots;
    made.units = static_cast<int>(ceil_div(run.slots, most));
    made.step = 1;
  }

  /// Lists the run's blocks; one of many rows is cut by rows, each part points into it.
  void list_blocks(const SlotRun& run, int most, DeviceRun& made) {
    made.listed = static_cast<int>(blocks.size());
    int at = made.first_slot;
    int longest = 1;
    for (const PackedBlock& block : run.blocks) {
      for (int row = 0; row < block.rows; row += most) {
        const PackedBlock part = part_of(*run.format, block, row, std::min(most, block.rows - row));
        add_block(part, at);
        at += part.live_rows;
        longest = std::max(longest, part.rows);
      }
    }
    made.units = static_cast<int>(blocks.size()) - made.listed;
    made.step = std::max(1, most / longest);
  }

  /// Begins a layer of `of_layer`.
  void start(std::span<const PackedLane> of_layer, Stream& stream) {
    clear();
    int64_t slots = 0;
    for (const PackedLane& lane : of_layer) slots += lane.slots;
    key_slots = key_split_slots(slots, stream);
    size_t run_count = 0;
    for (const PackedLane& lane : of_layer) {
      DeviceLane made{};
      made.q = lane.q;
      made.weights = lane.weights;
      made.out = lane.out;
      made.slots = lane.slots;
      made.first_remap = static_cast<int>(remaps.size());
      made.first_weighting = made.first_remap + static_cast<int>(lanes.size());
      made.remaps = static_cast<int>(lane.remaps.size());
      remaps.insert(remaps.end(), lane.remaps.begin(), lane.remaps.end());
      lanes.push_back(made);
      first_runs.push_back(run_count);
      run_count += lane.keys.size() + lane.values.size();
    }
    resize_runs(run_count);
  }

  /// Chooses who serves lane number `i`, cuts its runs and adds what its launches come to.
  void describe_lane(size_t i, const PackedLane& lane, int head_dim, LayerLaunch& layer) {
    const size_t first = first_runs[i];
    const size_t first_values = first + lane.keys.size();
    const size_t end = first_values + lane.values.size();
    const int picture = picture_lane(lane, head_dim, picture_limits());
    FusedLane of_fused;
    if (picture == 0) of_fused = fused_lane(lane, head_dim, most_shared_bytes());
    const int served = picture != 0 ? picture : of_fused.pair;  // in one pass
    const bool fused = served != 0;
    if (picture != 0) {
      row_lanes.resize(i);
      add_row_lane(lane, layer.pictures);
    }
    DeviceLane& made = lanes[i];
    made.in_run_order = !fused && goes_in_run_order(lane.values, lane.remaps.size(),
                                                    lane.weights_wanted, lane.slots);
    describe_runs(lane.keys, true, static_cast<int>(i), head_dim, fused, first);
    describe_runs(lane.values, false, static_cast<int>(i), head_dim, fused, first_values);
    made.first_keys = static_cast<int>(first);
    made.last_keys = static_cast<int>(first_values) - 1;
    made.last_values = static_cast<int>(end) - 1;
    made.fused = static_cast<int8_t>(served);
    for (size_t run = first; picture == 0 && fused && run < first_values; ++run) {
      runs[run].source = of_fused.source[run - first];
    }
    made.deferred = !fused && is_deferred(lane, first, end);
    split_runs(first, first_values, fused, keys);
    made.first_part = values.parts;
    made.parts = split_runs(first_values, end, fused, values);
    if (fused) layer.fused |= 1u << served;
    layer.unfused |= !fused;
    int& sources = layer.sources[static_cast<size_t>(served)];
    sources = std::max(sources, of_fused.sources);
    layer.deferred += made.deferred ? 1 : 0;
    layer.plain |= !fused && !made.deferred;
    layer.ordered |= made.in_run_order;
    layer.most_slots = std::max(layer.most_slots, lane.slots);
  }

  /// Whether a lane's softmax can be deferred: every run is served by a kernel that makes weights
  /// as it reads scores, and nobody wants the weights.
  bool is_deferred(const PackedLane& lane, size_t first, size_t end) {
    if (lane.weights_wanted || lane.slots == 0) return false;
    if (lanes[static_cast<size_t>(runs[first].lane)].in_run_order) return false;
    for (size_t i = first; i < end; ++i) {
      if (kernels[i] == kCodeKernels) return false;
    }
    return find_ranges(lane.remaps, std::span(runs).subspan(first, end - first));
  }

  /// Sends everything, and says in `made` where it is.
  void send(DescribedLayer& made, Stream& stream) {
    if (!row_lanes.empty()) row_lanes.resize(lanes.size());
    place_bits(stream);
    const size_t lanes_at = packet.add(std::span<const DeviceLane>(lanes));
    const size_t runs_at = packet.add(std::span<const DeviceRun>(runs));
    const size_t blocks_at = packet.add(std::span<const DeviceBlock>(blocks));
    const size_t formats_at = packet.add(std::span<const PackedFormat>(formats));
    const size_t remaps_at = packet.add(std::span<const ScoreRemap>(remaps));
    const size_t pieces_at = packet.add(std::span<const DevicePiece>(pieces));
    const size_t row_lanes_at = packet.add(std::span<const DeviceRowLane>(row_lanes));
    std::array<std::array<size_t, kCodeKernels + 1>, 2> served_at;
    for (size_t i = 0; i <= kCodeKernels; ++i) {
      served_at[0][i] = packet.add(std::span<const int>(keys.served[i].runs));
      served_at[1][i] = packet.add(std::span<const int>(values.served[i].runs));
    }
    const std::byte* base = packet.upload(stream);
    made.args.lanes = reinterpret_cast<const DeviceLane*>(base + lanes_at);
    made.args.runs = reinterpret_cast<const DeviceRun*>(base + runs_at);
    made.args.blocks = reinterpret_cast<const DeviceBlock*>(base + blocks_at);
    made.args.formats = reinterpret_cast<const PackedFormat*>(base + formats_at);
    made.args.remaps = reinterpret_cast<const ScoreRemap*>(base + remaps_at);
    made.layer.pictures.rows.pieces = reinterpret_cast<const DevicePiece*>(base + pieces_at);
    made.layer.pictures.lanes = reinterpret_cast<const DeviceRowLane*>(base + row_lanes_at);
    for (size_t i = 0; i <= kCodeKernels; ++i) {
      const auto list = [&](size_t at) { return reinterpret_cast<const int*>(base + at); };
      made.layer.keys[i] = {list(served_at[0][i]), 0, 1, keys.served[i].splits};
      made.layer.values[i] = {list(served_at[1][i]), 0, 1, values.served[i].splits};
    }
  }
};

LayerBuilder& builder() {
  static thread_local LayerBuilder of_thread;
  return of_thread;
}

}  // namespace

/// The most slots of a split of keys, for a batch whose lanes have `slots` in all.
int key_split_slots(int64_t slots, Stream& stream) {
  const int64_t wanted = int64_t{4} * stream.queue().multiprocessors();
  int split = kSplitSlots;
  while (split < 2048 && slots > split * wanted) split *= 2;
  return split;
}

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

DescribedLayer describe_layer(std::span<const PackedLane> lanes, int q_per_kv, int head_dim,
                              float scale, Stream& stream) {
  if (head_dim > 1024) {
    throw Error(ErrorCode::kUnsupported, "attend_packed: head_dim " + std::to_string(head_dim) +
                                             " is not served on CUDA, which takes up to 1024; use "
                                             "--device cpu");
  }
  LayerBuilder& layer = builder();
  layer.start(lanes, stream);
  DescribedLayer made;
  for (size_t i = 0; i < lanes.size(); ++i) {
    layer.describe_lane(i, lanes[i], head_dim, made.layer);
  }
  layer.send(made, stream);
  made.args.q_per_kv = q_per_kv;
  made.args.head_dim = made.layer.channels = head_dim;
  made.args.scale = scale;
  for (const PackedFormat& format : layer.formats) {
    made.layer.channels = std::max(made.layer.channels, format.channels());
  }
  PieceLaunch& rows = made.layer.pictures.rows;
  rows.count = static_cast<unsigned>(layer.pieces.size());
  rows.q_per_kv = q_per_kv;
  rows.head_dim = head_dim;
  rows.scale = scale;
  made.row_parts = layer.row_parts;
  made.layer.lanes = static_cast<unsigned>(lanes.size());
  made.layer.key_parts = layer.keys.parts;
  made.layer.value_parts = layer.values.parts;
  made.layer.weightings = static_cast<int>(layer.remaps.size() + lanes.size());
  return made;
}

const DeviceBlock* describe_blocks(std::span<const PackedBlock> blocks, Stream& stream) {
  LayerBuilder& layer = builder();
  layer.clear();
  int slot = 0;
  for (const PackedBlock& block : blocks) {
    layer.add_block(block, slot);
    slot += block.live_rows;
  }
  layer.place_bits(stream);
  return reinterpret_cast<const DeviceBlock*>(
      stream.queue().upload(layer.blocks.data(), layer.blocks.size() * sizeof(DeviceBlock)));
}

}  // namespace kvlm::cuda::packed
