// The host's part of a DecodeTable says once what a sequence holds; `count_rows` then counts on the
// GPU, at the begin of every step, the row that each lane gains and the rows that the last step has
// packed, and cuts the lane's runs into splits again. Attention reads the runs as it does those of
// a batch that the host describes (attend_packed.cu).
#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/error.h"
#include "kernels/cuda/attend_layer.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack_windows.h"
#include "kernels/cuda/store_row.cuh"
#include "kernels/cuda/table_args.cuh"
#include "kernels/decode_table.h"

namespace kvlm {

namespace {

using namespace cuda;
using namespace cuda::packed;

constexpr int kGainedRuns = 3;  // of a side: packed rows, and the ring in two runs
constexpr int kMostRuns = 16;   // of a lane
constexpr int kCountThreads = 128;
constexpr int16_t kFusedRun = kCodeKernels + 1;  // DeviceRun::kernel of runs of fused lanes

// ---------------------------------------------------------------------------------------- kernels

/// Cuts a run of a lane into splits of at most `most` slots.
__device__ void cut_run(DeviceRun& run, const PackedFormat* formats, int most) {
  switch (static_cast<Cut>(run.cut)) {
    case Cut::kListed:
      break;
    case Cut::kRows:
      run.units = run.slots;
      run.step = most;
      break;
    case Cut::kEven:
      run.units = (run.packed_rows + run.block_rows - 1) / run.block_rows;
      run.step = max(1, most / run.block_rows);
      break;
    case Cut::kSingle: {
      const PackedFormat& format = formats[run.format];
      run.first_block.rows = run.block_rows = most;
      run.code_stride = most * static_cast<int>(format.row_bytes());
      run.scale_stride = format.axis == ScaleAxis::kToken
                             ? most * format.groups() * static_cast<int>(dtype_bytes(format.meta))
                             : 0;
      run.packed_rows = run.slots;
      run.units = (run.slots + most - 1) / most;
      run.step = 1;
      break;
    }
  }
  run.splits = run.slots == 0 ? 0 : (run.units + run.step - 1) / run.step;
}

/// Slots of a split of a run in a lane of `slots`, at most.
__device__ int most_slots(const TableArgs& table, const DeviceRun& run, int slots, bool keys,
                          bool fused) {
  if (fused) return kFusedBlockRows;
  if (run.kernel == kCodeKernels) return kAnySplitSlots;
  const int most = split_slots(slots);
  if (!keys) return most;
  const int whole = static_cast<Cut>(run.cut) == Cut::kEven ? run.block_rows : 0;
  return min(most, max(table.key_slots, whole));
}

/// Counts the window that the last step has packed, if it was full.
__device__ void count_packed(const DeviceWindow& window, DeviceTail& tail) {
  if (tail.flushed == 0) return;
  tail.flushed = 0;
  tail.packed += window.rows;
  tail.first = tail.place(window.rows);
  tail.full -= window.rows;
}

/// What the runs behind the fixed ones hold now.
__device__ void lay_gained(const TableArgs& table, const DeviceTail& tail, DeviceRun* gained) {
  const int before_wrap = min(tail.full, tail.ring_rows - tail.first);
  gained[0].slots = gained[0].packed_rows = tail.packed;
  gained[0].first_slot = gained[0].first_block.first_slot = tail.fixed_slots;
  const int64_t row_bytes =
      static_cast<int64_t>(table.head_dim) * (table.dtype == DType::kF32 ? 4 : 2);
  gained[1].rows = tail.ring + tail.first * row_bytes;
  gained[1].slots = before_wrap;
  gained[1].first_slot = tail.fixed_slots + tail.packed;
  gained[2].rows = tail.ring;
  gained[2].slots = tail.full - before_wrap;
  gained[2].first_slot = gained[1].first_slot + before_wrap;
}

/// A thread for each side of each lane of a step.
__global__ void __launch_bounds__(kCountThreads) count_rows(TableArgs table) {
  const int index = static_cast<int>(blockIdx.x) * kCountThreads + static_cast<int>(threadIdx.x);
  const int of_layer = table.rows * table.heads * 2;
  if (index >= of_layer * table.layers) return;
  const int layer = index / of_layer;
  const int side = index % 2;
  const int number = index % of_layer / 2;  // of the lane, in the step
  const int at = table.lane_at(layer, number);
  DeviceTail& tail = table.tails[at * 2 + side];
  count_packed(table.windows[layer * 2 + side], tail);
  ++tail.full;
  DeviceRun* runs = table.runs + static_cast<int64_t>(at * 2 + side) * table.side_runs;
  lay_gained(table, tail, runs + table.side_runs - kGainedRuns);
  const int slots = tail.fixed_slots + tail.packed + tail.full;
  const bool fused = table.lanes[at].fused != 0;
  int part = number * table.parts[layer * 2 + side];
  const int first_part = part;
  for (int i = 0; i < table.side_runs; ++i) {
    DeviceRun& run = runs[i];
    if (run.kernel < 0) continue;
    cut_run(run, table.formats, most_slots(table, run, slots, side == 0, fused));
    run.first_part = part;
    part += run.splits;
  }
  DeviceLane& lane = table.lanes[at];
  if (side == 0) {
    const int64_t query =
        (static_cast<int64_t>(table.step[number / table.heads].row) * table.heads +
         number % table.heads) *
        table.q_per_kv * table.head_dim;
    lane.q = static_cast<const float*>(nullptr) + query;
    lane.out = static_cast<float*>(nullptr) + query;
    lane.slots = slots;
    lane.first_weighting = number * table.weightings;
    lane.weights = table.scores + static_cast<int64_t>(number) * table.q_per_kv * table.longest;
  } else {
    lane.first_part = first_part;
    lane.parts = part - first_part;
  }
}

/// Stores the new key (blockIdx.y 0) or value of a lane as the newest of its ring.
__global__ void store_gained(TableArgs table, int layer, const float* k, const float* v) {
  let_next_start();
  wait_for_earlier();
  const auto number = static_cast<int>(blockIdx.x);
  const auto side = static_cast<int>(blockIdx.y);
  const DeviceTail& tail = table.tails[table.lane_at(layer, number) * 2 + side];
  const int64_t from = (static_cast<int64_t>(table.step[number / table.heads].row) * table.heads +
                        number % table.heads) *
                       table.head_dim;
  store_row(tail.ring, table.dtype, tail.place(tail.full - 1), table.head_dim,
            (side == 0 ? k : v) + from);
}

constexpr int kEvictThreads = 256;
constexpr int kUnitsHeld = 8;  // of a thread, on their way

/// Closes the gap that row `gap` leaves in a ring: the fewer rows move by one place, a tile of
/// units after the other, read before any is written.
template <class Unit>
__device__ void close_gap(const DeviceTail& tail, int gap, bool from_front, int64_t row_bytes) {
  Unit* ring = reinterpret_cast<Unit*>(tail.ring);
  const auto width = static_cast<int>(row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int moved = (from_front ? gap : tail.full - 1 - gap) * width;
  const auto place = [&](int unit) -> Unit& {
    const int row = from_front ? gap - unit / width : gap + unit / width;
    return ring[static_cast<int64_t>(tail.place(row)) * width + unit % width];
  };
  for (int first = static_cast<int>(threadIdx.x); first - static_cast<int>(threadIdx.x) < moved;
       first += kEvictThreads * kUnitsHeld) {
    Unit held[kUnitsHeld];
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i) {
      const int unit = first + i * kEvictThreads;
      if (unit < moved) held[i] = place(unit + width);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i) {
      const int unit = first + i * kEvictThreads;
      if (unit < moved) place(unit) = held[i];
    }
    __syncthreads();
  }
}

/// Drops the row of a lane's slot: block (lane, layer, side). `slots` as DecodeTable::evict().
__global__ void __launch_bounds__(kEvictThreads) evict_rows(TableArgs table, const int* slots) {
  const auto number = static_cast<int>(blockIdx.x);
  const auto layer = static_cast<int>(blockIdx.y);
  const auto side = static_cast<int>(blockIdx.z);
  const int slot = slots[layer * table.rows + number / table.heads];
  if (slot < 0) return;
  DeviceTail& held = table.tails[table.lane_at(layer, number) * 2 + side];
  DeviceTail tail = held;
  count_packed(table.windows[layer * 2 + side], tail);
  const int gap = slot - tail.fixed_slots - tail.packed;
  const bool from_front = 2 * gap < tail.full;
  const int64_t row_bytes =
      static_cast<int64_t>(table.head_dim) * (table.dtype == DType::kF32 ? 4 : 2);
  __syncthreads();  // all have read
  if ((row_bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(tail.ring))) % 16 == 0) {
    close_gap<int4>(tail, gap, from_front, row_bytes);
  } else {
    close_gap<uint16_t>(tail, gap, from_front, row_bytes);
  }
  if (threadIdx.x != 0) return;
  if (from_front) tail.first = tail.place(1);
  --tail.full;
  held = tail;
}

// ------------------------------------------------------------------------------------ the host

/// The most splits of a run of at most `slots` slots, in any lane, if splits have at most `cap`
/// slots and are of whole blocks of `block_rows`.
int most_splits(int slots, int block_rows, int cap) {
  int most = 0;
  const auto of = [&](int in_lane, int split) {
    const int wanted = std::max(std::min(split, cap), block_rows);
    most = std::max(most, static_cast<int>(ceil_div(std::min(slots, in_lane),
                                                    wanted / block_rows * block_rows)));
  };
  of(1023, 256);
  of(4095, 1024);
  of(slots, 2048);
  return most;
}

/// A number that no table has given.
uint64_t new_version() {
  static std::atomic<uint64_t> last{uint64_t{1} << 63};
  return ++last;
}

/// Where fixed runs of one lane list blocks that do not lie evenly, and bitmaps.
struct ListSpace {
  DeviceBlock* blocks;
  uint64_t* words;
  int first_block;           // of all lanes'
  const uint64_t* words_at;  // where `words` will be
  int used_blocks = 0;
  int used_words = 0;

  const uint64_t* add_words(const uint64_t* from, int bits) {
    const int count = (bits + 63) / 64;
    std::copy_n(from, count, words + used_words);
    used_words += count;
    return words_at + used_words - count;
  }
};

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

/// What launches depend on, of the keys or the values of a layer.
struct SideBounds {
  std::array<int, kMostRuns> slots{};                  // of a run, by position
  std::array<int, kMostRuns> listed{};                 // splits that the host has cut
  std::array<uint32_t, kCodeKernels + 1> positions{};  // of a kernel's runs, a bit each
  int block_rows = 1;                                  // of rows that are packed evenly
};

/// Layers whose windows are packed alike.
struct ClassOfLayers {
  WindowClass window;
  std::vector<int> layers;
};

}  // namespace

struct DecodeTable::State {
  State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers, Device at);

  TableShape shape;
  std::vector<std::array<RowWindow, 2>> windows;  // (layers,)
  std::array<std::vector<ClassOfLayers>, 2> classes;
  Device device;
  int side_runs;
  TableLoad load;

  std::vector<std::array<SideBounds, 2>> bounds;  // (layers,)
  LayerLaunch kinds;                              // which kernels serve lanes
  bool changed = true;                            // bounds have, since they were sent
  std::vector<PackedFormat> formats;
  std::vector<const PackedFormat*> known;  // where formats came from
  std::vector<uint64_t> versions;          // by rows of a step
  int channels;

  // (slots, layers, kv_heads, ...)
  Buffer lanes, runs, tails, remaps, blocks, words;
  // (layers, 2) windows and parts; layers by class; (layers,) slopes that were clamped
  Buffer device_windows, device_parts, class_layers, clamped;
  Buffer device_formats, device_step, scores, evicted;

  // One sequence on its way.
  std::vector<DeviceLane> new_lanes;
  std::vector<DeviceRun> new_runs;
  std::vector<DeviceTail> new_tails;
  std::vector<ScoreRemap> new_remaps;
  std::vector<DeviceBlock> new_blocks;
  std::vector<uint64_t> new_words;

  std::vector<StepSlot> step;
  std::vector<int> parts;
  int key_slots = kAnySplitSlots;

  int lanes_of_slot() const { return shape.layers * shape.kv_heads; }
  void class_layers_of(size_t side);
  int16_t format_of(const PackedFormat& format);
  void lay_run(const SlotRun& from, bool keys, int slots, bool fused, ListSpace& list,
               DeviceRun& made);
  void list_blocks(const SlotRun& from, int most, ListSpace& list, DeviceRun& made);
  void lay_gained(const GrowingRows& gained, const RowWindow& window, bool keys, DeviceRun* made,
                  DeviceTail& tail);
  void set_side(int layer, bool keys, const TableLane& lane, int slots, bool fused, ListSpace& list,
                DeviceRun* made, DeviceTail& tail);
  FusedLane fused_lane_of(int layer, const TableLane& lane);
  void note(int layer, bool keys, int position, const DeviceRun& run, int slots);
  void note_kind(const DeviceLane& lane, int sources);
  static bool find_ranges(std::span<const ScoreRemap> remaps, std::span<DeviceRun> runs);
  void send_slot(int slot, Stream& stream);
  void send_bounds(Stream& stream);
  int bound(int layer, bool keys, int position) const;
  TableArgs table_args();
  LayerLaunch layer_launch(int layer) const;
  ServedByKernel served(int layer, bool keys) const;
};

DecodeTable::State::State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers,
                          Device at)
    : shape(of),
      windows(of_layers.begin(), of_layers.end()),
      device(at),
      side_runs(of.fixed_runs + kGainedRuns),
      bounds(windows.size()),
      channels(of.head_dim),
      device_windows(at, 2 * windows.size() * sizeof(DeviceWindow)),
      device_parts(at, 2 * windows.size() * sizeof(int)),
      class_layers(at, 2 * windows.size() * sizeof(int)),
      clamped(at, windows.size() * sizeof(unsigned long long)),
      parts(2 * windows.size()) {
  assert(2 * side_runs <= kMostRuns && windows.size() == static_cast<size_t>(of.layers));
  clear_now(clamped.data(), clamped.bytes());
  std::vector<DeviceWindow> sizes;
  for (const std::array<RowWindow, 2>& layer : windows) {
    for (const RowWindow& window : layer) sizes.push_back({window.trigger, window.rows});
  }
  copy_now(device_windows.data(), sizes.data(), device_windows.bytes());
  for (const size_t side : {size_t{0}, size_t{1}}) class_layers_of(side);
}

/// Groups layers whose windows are packed alike, so that one launch serves them.
void DecodeTable::State::class_layers_of(size_t side) {
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    const RowWindow& window = windows[layer][side];
    if (window.format == nullptr) continue;
    const auto alike = [&](const ClassOfLayers& c) {
      const RowWindow& other = windows[static_cast<size_t>(c.layers[0])][side];
      return other.format == window.format && other.trigger == window.trigger;
    };
    auto found = std::find_if(classes[side].begin(), classes[side].end(), alike);
    if (found == classes[side].end()) {
      classes[side].push_back({});
      found = classes[side].end() - 1;
      found->window = {*window.format, window.rules, window.trigger, window.rows, nullptr, 0};
    }
    found->layers.push_back(static_cast<int>(layer));
  }
  size_t first = side * windows.size();
  for (ClassOfLayers& c : classes[side]) {
    int* at = reinterpret_cast<int*>(class_layers.data()) + first;
    copy_now(at, c.layers.data(), c.layers.size() * sizeof(int));
    c.window.layers = at;
    c.window.count = static_cast<unsigned>(c.layers.size());
    first += c.layers.size();
  }
}

int16_t DecodeTable::State::format_of(const PackedFormat& format) {
  const auto at = std::find(known.begin(), known.end(), &format) - known.begin();
  if (at == static_cast<std::ptrdiff_t>(known.size())) {
    known.push_back(&format);
    formats.push_back(format);
    channels = std::max(channels, format.channels());
    changed = true;
  }
  return static_cast<int16_t>(at);
}

/// What never changes of a fixed run in a lane of `slots` slots.
void DecodeTable::State::lay_run(const SlotRun& from, bool keys, int slots, bool fused,
                                 ListSpace& list, DeviceRun& made) {
  const int kernel = code_kernel(from, keys, shape.head_dim);
  made.kernel = static_cast<int16_t>(kernel < 0 ? static_cast<int>(kCodeKernels) : kernel);
  made.slots = from.slots;
  made.selected_of = from.selected_of;
  made.selected_bit = from.selected_bit;
  made.q = from.q;
  if (from.selection != nullptr) {
    made.selection = list.add_words(from.selection, from.selected_of);
  }
  if (from.format == nullptr) {
    made.cut = static_cast<int8_t>(Cut::kRows);
    made.rows = from.rows;
    made.dtype = from.dtype;
    return;
  }
  made.format = format_of(*from.format);
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
    const int most = fused ? kFusedBlockRows : kernel < 0 ? kAnySplitSlots : split_slots(slots);
    list_blocks(from, most, list, made);
  }
}

/// Lists the blocks of a run; of one of many rows, parts of at most `most`.
void DecodeTable::State::list_blocks(const SlotRun& from, int most, ListSpace& list,
                                     DeviceRun& made) {
  made.cut = static_cast<int8_t>(Cut::kListed);
  made.listed = list.first_block + list.used_blocks;
  int slot = made.first_slot;
  int longest = 1;
  for (const PackedBlock& block : from.blocks) {
    for (int row = 0; row < block.rows; row += most) {
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

/// The runs of the rows that a lane gains, and their counters.
void DecodeTable::State::lay_gained(const GrowingRows& gained, const RowWindow& window, bool keys,
                                    DeviceRun* made, DeviceTail& tail) {
  tail.ring = gained.ring;
  tail.codes = gained.codes;
  tail.scales = gained.scales;
  tail.zeros = gained.zeros;
  tail.ring_rows = gained.ring_rows;
  tail.first = gained.first;
  tail.full = gained.full;
  tail.packed = gained.packed;
  tail.code_stride = static_cast<int>(gained.code_stride);
  tail.scale_stride = static_cast<int>(gained.scale_stride);
  tail.block_rows = gained.block_rows;
  tail.shares_codes = gained.shares_codes;
  const auto kernel_of = [&](const SlotRun& run) {
    const int kernel = code_kernel(run, keys, shape.head_dim);
    return static_cast<int16_t>(kernel < 0 ? static_cast<int>(kCodeKernels) : kernel);
  };
  made[0].kernel = -1;
  if (window.format != nullptr) {
    PackedBlock block;
    const SlotRun packed = packed_run(*window.format, gained, block);
    made[0].kernel = kernel_of(packed);
    made[0].cut = static_cast<int8_t>(Cut::kEven);
    made[0].format = tail.format = format_of(*window.format);
    made[0].first_block = {block.codes, block.scales, block.zeros, nullptr, block.rows, 0};
    made[0].code_stride = tail.code_stride;
    made[0].scale_stride = tail.scale_stride;
    made[0].block_rows = gained.block_rows;
  }
  SlotRun rows;
  rows.rows = gained.ring;
  rows.dtype = shape.rows;
  for (DeviceRun* ring : {made + 1, made + 2}) {
    ring->kernel = kernel_of(rows);
    ring->cut = static_cast<int8_t>(Cut::kRows);
    ring->rows = gained.ring;
    ring->dtype = shape.rows;
  }
}

/// Notes what launches have to reach: a run at a position that has at most `slots` slots.
void DecodeTable::State::note(int layer, bool keys, int position, const DeviceRun& run, int slots) {
  SideBounds& side = bounds[static_cast<size_t>(layer)][keys ? 0 : 1];
  const auto at = static_cast<size_t>(position);
  const auto grow = [&](auto& bound, auto to) {
    if (bound >= to) return;
    bound = to;
    changed = true;
  };
  const uint32_t bit = uint32_t{1} << position;
  uint32_t& positions = side.positions[static_cast<size_t>(run.kernel)];
  changed |= (positions & bit) == 0;
  positions |= bit;
  if (static_cast<Cut>(run.cut) == Cut::kListed) {
    return grow(side.listed[at], static_cast<int>(ceil_div(run.units, run.step)));
  }
  // Rounded up, so that sequences of about the same length launch the same.
  int rounded = 256;
  while (rounded < slots) rounded *= 2;
  grow(side.slots[at], std::min(rounded, std::max(load.longest, slots)));
  if (static_cast<Cut>(run.cut) == Cut::kEven) grow(side.block_rows, run.block_rows);
}

/// The keys or the values of a lane of `slots` slots.
void DecodeTable::State::set_side(int layer, bool keys, const TableLane& lane, int slots,
                                  bool fused, ListSpace& list, DeviceRun* made, DeviceTail& tail) {
  const std::span<const SlotRun> fixed = keys ? lane.keys : lane.values;
  assert(fixed.size() <= static_cast<size_t>(shape.fixed_runs));
  for (int i = 0; i < side_runs; ++i) {
    made[i] = DeviceRun();
    made[i].kernel = -1;
    made[i].source = -1;
  }
  tail = DeviceTail();
  int slot = 0;
  int selected = 0;
  for (size_t i = 0; i < fixed.size(); ++i) {
    made[i].first_slot = slot;
    lay_run(fixed[i], keys, slots, fused, list, made[i]);
    made[i].first_block.first_slot = slot;
    if (!fused) note(layer, keys, static_cast<int>(i), made[i], fixed[i].slots);
    if (fixed[i].selection == nullptr) {
      slot += fixed[i].slots;
      continue;
    }
    selected += fixed[i].slots;
    if (fixed[i].selection_ends) slot += std::exchange(selected, 0);
  }
  tail.fixed_slots = slot;
  const GrowingRows& gained = keys ? lane.keys_gained : lane.values_gained;
  const RowWindow& window = windows[static_cast<size_t>(layer)][keys ? 0 : 1];
  lay_gained(gained, window, keys, made + shape.fixed_runs, tail);
  for (int i = 0; i < kGainedRuns; ++i) {
    const DeviceRun& run = made[shape.fixed_runs + i];
    if (run.kernel < 0 || fused) continue;
    note(layer, keys, shape.fixed_runs + i, run, i == 0 ? load.longest : gained.ring_rows);
  }
}

/// Says to which remap each run belongs; false if one belongs to several, or to one in part.
bool DecodeTable::State::find_ranges(std::span<const ScoreRemap> remaps,
                                     std::span<DeviceRun> runs) {
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

/// Notes which kernels serve a lane.
void DecodeTable::State::note_kind(const DeviceLane& lane, int sources) {
  LayerLaunch now = kinds;
  if (lane.fused != 0) {
    now.fused |= 1u << lane.fused;
    now.sources = std::max(now.sources, sources);
  } else {
    now.unfused = true;
    now.deferred |= lane.deferred ? 1 : 0;
    now.plain |= !lane.deferred;
  }
  changed |= now.fused != kinds.fused || now.sources != kinds.sources ||
             now.unfused != kinds.unfused || now.deferred != kinds.deferred ||
             now.plain != kinds.plain;
  kinds = now;
}

/// Whether a lane can be attended in one pass: `source` is by position.
FusedLane DecodeTable::State::fused_lane_of(int layer, const TableLane& lane) {
  std::array<std::vector<SlotRun>, 2> runs;
  std::array<PackedBlock, 2> blocks;
  for (const bool keys : {true, false}) {
    const std::span<const SlotRun> fixed = keys ? lane.keys : lane.values;
    const GrowingRows& gained = keys ? lane.keys_gained : lane.values_gained;
    const size_t side = keys ? 0 : 1;
    runs[side].assign(fixed.begin(), fixed.end());
    if (const RowWindow& window = windows[static_cast<size_t>(layer)][side];
        window.format != nullptr) {
      runs[side].push_back(packed_run(*window.format, gained, blocks[side]));
    }
    SlotRun rows;
    rows.rows = gained.ring;
    rows.dtype = shape.rows;
    runs[side].push_back(rows);
  }
  PackedLane whole;
  whole.keys = runs[0];
  whole.values = runs[1];
  whole.remaps = lane.remaps;
  whole.slots = 1;
  whole.weights_wanted = false;
  FusedLane made = fused_lane(whole, shape.head_dim);
  if (2 * side_runs > kMostFusedRuns) made.pair = 0;
  const std::array<int8_t, kMostFusedRuns> by_run = made.source;
  made.source.fill(-1);
  if (made.pair == 0) return made;
  for (size_t i = 0; i < lane.keys.size(); ++i) made.source[i] = by_run[i];
  const auto packed = static_cast<size_t>(shape.fixed_runs);
  const size_t rows = runs[0].size() - 1;
  if (rows > lane.keys.size()) made.source[packed] = by_run[rows - 1];
  made.source[packed + 1] = made.source[packed + 2] = by_run[rows];
  return made;
}

/// Sends what was set of a slot to its place.
void DecodeTable::State::send_slot(int slot, Stream& stream) {
  const auto send = [&](Buffer& to, const auto& from) {
    const size_t bytes = from.size() * sizeof(from[0]);
    if (bytes == 0) return;
    std::byte* staged = stream.queue().stage(bytes);
    std::memcpy(staged, from.data(), bytes);
    stream.queue().send(to.data() + static_cast<size_t>(slot) * bytes, staged, bytes);
  };
  send(lanes, new_lanes);
  send(runs, new_runs);
  send(tails, new_tails);
  send(remaps, new_remaps);
  send(blocks, new_blocks);
  send(words, new_words);
}

/// Splits of a run at a position, at most; they take so many workspace of parts.
int DecodeTable::State::bound(int layer, bool keys, int position) const {
  const SideBounds& side = bounds[static_cast<size_t>(layer)][keys ? 0 : 1];
  const auto at = static_cast<size_t>(position);
  int most = side.listed[at];
  if (side.slots[at] == 0) return most;
  const uint32_t bit = uint32_t{1} << position;
  const bool any = (side.positions[kCodeKernels] & bit) != 0;
  const int cap = any ? kAnySplitSlots : keys ? std::max(key_slots, side.block_rows) : 2048;
  return std::max(most, most_splits(side.slots[at], side.block_rows, cap));
}

/// Sends what the kernels that count have to know of all layers.
void DecodeTable::State::send_bounds(Stream& stream) {
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const bool keys : {true, false}) {
      int sum = 0;
      for (int i = 0; i < side_runs; ++i) sum += bound(layer, keys, i);
      parts[static_cast<size_t>(layer) * 2 + (keys ? 0 : 1)] = sum;
    }
  }
  stream.queue().copy(device_parts.data(), true, parts.data(), false, device_parts.bytes());
  const size_t bytes = formats.size() * sizeof(PackedFormat);
  if (device_formats.bytes() < bytes) device_formats = Buffer(device, 2 * bytes);
  stream.queue().copy(device_formats.data(), true, formats.data(), false, bytes);
}

TableArgs DecodeTable::State::table_args() {
  TableArgs args{};
  args.step = reinterpret_cast<const StepSlot*>(device_step.data());
  args.lanes = reinterpret_cast<DeviceLane*>(lanes.data());
  args.runs = reinterpret_cast<DeviceRun*>(runs.data());
  args.tails = reinterpret_cast<DeviceTail*>(tails.data());
  args.windows = reinterpret_cast<const DeviceWindow*>(device_windows.data());
  args.parts = reinterpret_cast<const int*>(device_parts.data());
  args.formats = reinterpret_cast<const PackedFormat*>(device_formats.data());
  args.scores = reinterpret_cast<float*>(scores.data());
  args.rows = static_cast<int>(step.size());
  args.layers = shape.layers;
  args.heads = shape.kv_heads;
  args.side_runs = side_runs;
  args.q_per_kv = shape.q_per_kv;
  args.head_dim = shape.head_dim;
  args.longest = load.longest;
  args.key_slots = key_slots;
  args.weightings = shape.remaps + 1;
  args.dtype = shape.rows;
  return args;
}

/// Which runs the kernels of a layer serve, of its keys or its values.
ServedByKernel DecodeTable::State::served(int layer, bool keys) const {
  const SideBounds& side = bounds[static_cast<size_t>(layer)][keys ? 0 : 1];
  ServedByKernel served{};
  for (size_t kernel = 0; kernel < served.size(); ++kernel) {
    ServedRuns& of = served[kernel];
    of.position_count = 0;
    int most = 0;
    for (int i = 0; i < side_runs; ++i) {
      if ((side.positions[kernel] >> i & 1) == 0) continue;
      const int position = (keys ? 0 : side_runs) + i;
      of.positions |= static_cast<uint64_t>(position) << 4 * of.position_count++;
      most = std::max(most, bound(layer, keys, i));
    }
    const auto lanes_now =
        static_cast<unsigned>(step.size()) * static_cast<unsigned>(shape.kv_heads);
    of.splits = {lanes_now * static_cast<unsigned>(of.position_count), static_cast<unsigned>(most)};
    if (most == 0) of.splits.runs = 0;
  }
  return served;
}

LayerLaunch DecodeTable::State::layer_launch(int layer) const {
  LayerLaunch launch = kinds;
  launch.keys = served(layer, true);
  launch.values = served(layer, false);
  launch.lanes = static_cast<unsigned>(step.size()) * static_cast<unsigned>(shape.kv_heads);
  if (kinds.deferred > 0) launch.deferred = launch.lanes;
  launch.most_slots = load.longest;
  const auto lanes_now = static_cast<int>(launch.lanes);
  launch.key_parts = lanes_now * parts[static_cast<size_t>(layer) * 2];
  launch.value_parts = lanes_now * parts[static_cast<size_t>(layer) * 2 + 1];
  launch.weightings = lanes_now * (shape.remaps + 1);
  launch.channels = channels;
  return launch;
}

DecodeTable::DecodeTable(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
                         Device device)
    : state_(std::make_unique<State>(shape, windows, device)) {}
DecodeTable::~DecodeTable() = default;

bool DecodeTable::reserve(const TableLoad& load) {
  State& state = *state_;
  TableLoad& held = state.load;
  if (load.slots <= held.slots && load.longest <= held.longest &&
      load.listed_blocks <= held.listed_blocks && load.words <= held.words) {
    return true;
  }
  if (load.slots > held.slots) held.slots = std::max(load.slots, held.slots + held.slots / 2);
  held.longest = std::max(held.longest, load.longest);
  held.listed_blocks = std::max(held.listed_blocks, load.listed_blocks);
  held.words = std::max(held.words, load.words);
  const auto of_slot = static_cast<size_t>(state.lanes_of_slot());
  const auto make = [&](Buffer& buffer, auto& one, size_t of_lane) {
    one.clear();
    one.resize(of_slot * of_lane);
    buffer = Buffer();
    buffer = Buffer(state.device, static_cast<size_t>(held.slots) * one.size() * sizeof(one[0]));
  };
  make(state.lanes, state.new_lanes, 1);
  make(state.runs, state.new_runs, 2 * static_cast<size_t>(state.side_runs));
  make(state.tails, state.new_tails, 2);
  make(state.remaps, state.new_remaps, static_cast<size_t>(state.shape.remaps));
  make(state.blocks, state.new_blocks, static_cast<size_t>(held.listed_blocks));
  make(state.words, state.new_words, static_cast<size_t>(held.words));
  state.device_step = Buffer();
  state.device_step = Buffer(state.device, static_cast<size_t>(held.slots) * sizeof(StepSlot));
  state.scores = Buffer();
  state.scores =
      Buffer(state.device, static_cast<size_t>(held.slots) *
                               static_cast<size_t>(state.shape.kv_heads * state.shape.q_per_kv) *
                               static_cast<size_t>(held.longest) * sizeof(float));
  state.evicted = Buffer();
  state.evicted =
      Buffer(state.device, static_cast<size_t>(held.slots * state.shape.layers) * sizeof(int));
  state.step.reserve(static_cast<size_t>(held.slots));
  state.step.clear();
  state.versions.assign(static_cast<size_t>(held.slots) + 1, 0);
  state.changed = true;
  return false;
}

void DecodeTable::set(int slot, int layer, std::span<const TableLane> lanes, Stream& stream) {
  State& state = *state_;
  assert(slot < state.load.slots && lanes.size() == static_cast<size_t>(state.shape.kv_heads));
  for (size_t h = 0; h < lanes.size(); ++h) {
    const TableLane& from = lanes[h];
    const size_t in_slot = static_cast<size_t>(layer) * lanes.size() + h;
    const int at = slot * state.lanes_of_slot() + static_cast<int>(in_slot);
    const auto listed = static_cast<size_t>(state.load.listed_blocks);
    const auto words = static_cast<size_t>(state.load.words);
    ListSpace list{
        state.new_blocks.data() + in_slot * listed, state.new_words.data() + in_slot * words,
        at * state.load.listed_blocks,
        reinterpret_cast<const uint64_t*>(state.words.data()) + static_cast<size_t>(at) * words};
    int slots = from.keys_gained.packed + from.keys_gained.full;
    for (const SlotRun& run : from.keys) slots += run.slots;
    DeviceRun* runs = state.new_runs.data() + in_slot * 2 * static_cast<size_t>(state.side_runs);
    DeviceTail* tails = state.new_tails.data() + in_slot * 2;
    const FusedLane fused = state.fused_lane_of(layer, from);
    const bool is_fused = fused.pair != 0;
    state.set_side(layer, true, from, slots, is_fused, list, runs, tails[0]);
    state.set_side(layer, false, from, slots, is_fused, list, runs + state.side_runs, tails[1]);
    assert(list.used_blocks <= state.load.listed_blocks && list.used_words <= state.load.words);

    DeviceLane& lane = state.new_lanes[in_slot] = DeviceLane();
    lane.first_remap = at * state.shape.remaps;
    lane.remaps = static_cast<int>(from.remaps.size());
    assert(lane.remaps <= state.shape.remaps);
    std::copy(from.remaps.begin(), from.remaps.end(),
              state.new_remaps.begin() + static_cast<std::ptrdiff_t>(in_slot) * state.shape.remaps);
    lane.first_keys = at * 2 * state.side_runs;
    lane.last_keys = lane.first_keys + state.side_runs - 1;
    lane.last_values = lane.last_keys + state.side_runs;
    const std::span<DeviceRun> both(runs, 2 * static_cast<size_t>(state.side_runs));
    for (DeviceRun& run : both) run.lane = at;
    lane.fused = static_cast<int8_t>(fused.pair);
    for (DeviceRun& run : both) {
      if (is_fused && run.kernel >= 0) run.kernel = kFusedRun;
    }
    for (int i = 0; i < state.side_runs; ++i) runs[i].source = fused.source[static_cast<size_t>(i)];
    lane.deferred = !is_fused && State::find_ranges(from.remaps, both) &&
                    std::none_of(both.begin(), both.end(),
                                 [](const DeviceRun& run) { return run.kernel == kCodeKernels; });
    state.note_kind(lane, fused.sources);
  }
  if (layer + 1 == state.shape.layers) state.send_slot(slot, stream);
}

void DecodeTable::start(std::span<const TableRow> rows, Stream& stream) {
  State& state = *state_;
  const auto same = [](const StepSlot& held, const TableRow& row) {
    return held.slot == row.slot && held.row == row.row;
  };
  if (!std::equal(state.step.begin(), state.step.end(), rows.begin(), rows.end(), same)) {
    const auto lanes = static_cast<int64_t>(rows.size()) * state.shape.kv_heads;
    const int key_slots = key_split_slots(lanes * state.load.longest, stream);
    state.changed |= std::exchange(state.key_slots, key_slots) != key_slots;
    state.step.clear();
    for (const TableRow& row : rows) state.step.push_back({row.slot, row.row});
    stream.queue().copy(state.device_step.data(), true, state.step.data(), false,
                        state.step.size() * sizeof(StepSlot));
  }
  if (std::exchange(state.changed, false)) {
    state.send_bounds(stream);
    std::fill(state.versions.begin(), state.versions.end(), 0);
  }
  uint64_t& version = state.versions[rows.size()];
  if (version == 0) version = new_version();
  if (rows.empty()) return;
  const int64_t threads = int64_t{2} * static_cast<int64_t>(rows.size()) * state.lanes_of_slot();
  count_rows<<<static_cast<unsigned>(ceil_div(threads, kCountThreads)), kCountThreads, 0,
               native(stream)>>>(state.table_args());
  check_launch("DecodeTable::start");
}

void DecodeTable::attend(int layer, const float* q, const float* k, const float* v, float* out,
                         float scale, Stream& stream) {
  State& state = *state_;
  if (state.step.empty()) return;
  const LayerLaunch launch = state.layer_launch(layer);
  launch_early("DecodeTable::attend", store_gained, dim3(launch.lanes, 2), 128, stream,
               state.table_args(), layer, k, v);
  AttendArgs args{};
  args.lanes = reinterpret_cast<const DeviceLane*>(state.lanes.data());
  args.runs = reinterpret_cast<const DeviceRun*>(state.runs.data());
  args.blocks = reinterpret_cast<const DeviceBlock*>(state.blocks.data());
  args.formats = reinterpret_cast<const PackedFormat*>(state.device_formats.data());
  args.remaps = reinterpret_cast<const ScoreRemap*>(state.remaps.data());
  args.guarded = reinterpret_cast<unsigned long long*>(state.clamped.data()) + layer;
  args.q_per_kv = state.shape.q_per_kv;
  args.head_dim = state.shape.head_dim;
  args.scale = scale;
  args.q_moved = q - static_cast<const float*>(nullptr);
  args.out_moved = out - static_cast<float*>(nullptr);
  args.step = reinterpret_cast<const StepSlot*>(state.device_step.data());
  args.layer = layer;
  args.layers = state.shape.layers;
  args.heads = state.shape.kv_heads;
  args.lane_runs = 2 * state.side_runs;
  launch_layer(launch, args, stream);
}

void DecodeTable::pack(bool keys, Stream& stream) {
  State& state = *state_;
  if (state.step.empty()) return;
  const int side = keys ? 0 : 1;
  for (const ClassOfLayers& c : state.classes[static_cast<size_t>(side)]) {
    pack_windows(state.table_args(), c.window, side, stream);
  }
}

void DecodeTable::evict(std::span<const int> slots, Stream& stream) {
  State& state = *state_;
  const auto rows = static_cast<unsigned>(state.step.size());
  assert(slots.size() == rows * static_cast<size_t>(state.shape.layers));
  stream.queue().copy(state.evicted.data(), true, slots.data(), false, slots.size_bytes());
  const dim3 grid(rows * static_cast<unsigned>(state.shape.kv_heads),
                  static_cast<unsigned>(state.shape.layers), 2);
  evict_rows<<<grid, kEvictThreads, 0, native(stream)>>>(
      state.table_args(), reinterpret_cast<const int*>(state.evicted.data()));
  check_launch("DecodeTable::evict");
}

uint64_t DecodeTable::version() const noexcept { return state_->versions[state_->step.size()]; }

int64_t DecodeTable::guarded_remaps(int layer) const {
  unsigned long long count = 0;
  copy_now(&count, reinterpret_cast<unsigned long long*>(state_->clamped.data()) + layer,
           sizeof count);
  return static_cast<int64_t>(count);
}

}  // namespace kvlm
