// Host side of DecodeTable: owns the GPU memory and launches the kernels. A sequence's entries are
// built once (slot_draft.cu) and uploaded. Then a step is count_rows.cu, attention
// (attend_layer.cu) in every layer, pack_windows.cu, and eviction:
//
// - drop_rows.cu: unpacked tokens, by a slot that the host names or by score;
// - weigh_rows.cu: unpacked tokens, by attention weight. In every layer before, it merges the
//   states of splits and accumulates the weights;
// - placed_drops.cu: packed tokens too, in place.
#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/attend/launch_bounds.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/drop_rows.h"
#include "kernels/cuda/table/pack_windows.h"
#include "kernels/cuda/table/placed_rows.h"
#include "kernels/cuda/table/slot_draft.h"
#include "kernels/cuda/table/weigh_rows.h"
#include "kernels/decode_table.h"
#include "kernels/row_moves.h"

namespace kvlm {

namespace {

using namespace cuda;
using namespace cuda::packed;

/// Limits of drafts, which are pinned memory as large as a slot on the GPU; at least one is made.
constexpr int kMostDrafts = 32;
constexpr size_t kDraftBytes = size_t{64} << 20;

/// A number that no table has used.
uint64_t new_version() {
  static std::atomic<uint64_t> last{uint64_t{1} << 63};
  return ++last;
}

/// Layers whose windows are packed by one launch.
struct ClassOfLayers {
  WindowClass window;
  std::vector<int> layers;
};

/// TableArgs::waves: rotations of the sinks by 0 to `turns` positions.
Buffer waves_of(std::span<const float> frequencies, int turns, Device device) {
  const size_t of_turn = 2 * frequencies.size();
  std::vector<double> found(of_turn * static_cast<size_t>(turns + 1));
  for (int by = 0; by <= turns; ++by) {
    find_waves(frequencies, by,
               std::span(found).subspan(static_cast<size_t>(by) * of_turn, of_turn));
  }
  Buffer waves(device, found.size() * sizeof(double));
  copy_now(waves.data(), found.data(), waves.bytes());
  return waves;
}

/// (layers, 2) windows for the kernels.
std::vector<DeviceWindow> sizes_of(std::span<const std::array<RowWindow, 2>> windows) {
  std::vector<DeviceWindow> sizes;
  for (const std::array<RowWindow, 2>& layer : windows) {
    for (const RowWindow& window : layer) sizes.push_back({window.trigger, window.rows});
  }
  return sizes;
}

/// TableArgs::together, (layers,).
std::vector<int> dropping_together(std::span<const int> drops_with, size_t layers) {
  std::vector<int> counts(layers, drops_with.empty() ? 1 : 0);
  for (const int first : drops_with) ++counts[static_cast<size_t>(first)];
  return counts;
}

/// Reallocates a buffer, and frees its old memory first.
void take(Buffer& buffer, Device device, size_t bytes) {
  buffer = Buffer();
  buffer = Buffer(device, bytes);
}

/// Uploads the first `count` entries of a draft's array to its slot.
template <class T>
void send_some(const SlotDraft& draft, std::span<T> from, int count, Buffer& to, Stream& stream) {
  if (count == 0) return;
  std::byte* first = to.data() + static_cast<size_t>(draft.slot) * from.size_bytes();
  const auto bytes = std::as_bytes(from.first(static_cast<size_t>(count)));
  stream.queue().send(first, bytes.data(), bytes.size());
}
template <class T>
void send_all(const SlotDraft& draft, std::span<T> from, Buffer& to, Stream& stream) {
  send_some(draft, from, static_cast<int>(from.size()), to, stream);
}

/// Reads `count` numbers from number `at` on, after all streams.
template <class T>
std::vector<T> read_back(const Buffer& from, size_t at, size_t count, const char* op) {
  std::vector<T> numbers(count);
  check(cudaDeviceSynchronize(), op);
  copy_now(numbers.data(), reinterpret_cast<const T*>(from.data()) + at, count * sizeof(T));
  return numbers;
}

/// Converts the counters of each side of each KV head.
void take_sides(std::span<const DeviceTail> tails, PlacedCopy& copy) {
  copy.sides.clear();
  copy.held.clear();
  for (const DeviceTail& tail : tails) {
    copy.sides.push_back({{}, tail.first, tail.full, tail.blocks, tail.filling, tail.filled});
    copy.held.push_back(tail.fixed_slots + tail.most_blocks * tail.block_rows + tail.ring_rows);
  }
}

/// Sets the sizes that are the same in every step.
void take_sizes(const DraftPlan& plan, TableArgs& args) {
  args.layers = plan.shape.layers;
  args.kv_heads = plan.shape.kv_heads;
  args.side_segments = plan.side_segments();
  args.q_per_kv = plan.shape.q_per_kv;
  args.head_dim = plan.shape.head_dim;
  args.remaps = plan.shape.remaps;
  args.dtype = plan.shape.rows;
}

}  // namespace

struct DecodeTable::State {
  State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers, Device at);

  std::vector<uint8_t> rows_alone;                // TableShape::rows_alone
  std::vector<std::array<RowWindow, 2>> windows;  // (layers,)
  std::array<std::vector<ClassOfLayers>, 2> classes;
  Device device;
  LaunchBounds bounds;
  std::vector<uint64_t> versions;  // by rows of a step
  bool counted = false;            // start() was called, and nothing stored since
  std::vector<TableRow> step;

  // (slots, layers, kv_heads, ...)
  Buffer heads, segments, tails, remaps, blocks, words;
  // (layers, 2) windows; layers by class; (layers,) TableArgs::together; (layers,) clamped slopes
  Buffer device_windows, class_layers, together, clamped;
  Buffer device_formats, device_step, scores, ranges, evicted;
  Buffer weighed, came;
  Buffer value_at, key_at, live, fixed, place_weights, gained_bytes;  // of in-place eviction
  Buffer row_bits;
  Buffer row_scores;  // (slots, layers, kv_heads, weighed_rows), if tokens are scored
  Buffer turned, waves;
  Buffer row_splits;  // (layers, rows of the step, kv_heads)
  int row_parts = 0;  // of one of them, at most

  DraftPlan plan;
  FormatList formats;
  size_t sent_formats = 0;
  std::vector<std::unique_ptr<SlotDraft>> drafts;
  std::vector<uint8_t> is_placed;  // (slots,) TableHead::placed
  bool weighs_slots = false;       // some KV head is WeighedRows::by_slots
  bool turns;                      // sinks are rotated

  /// Slots of a KV head, at most; with in-place eviction, empty places included.
  int longest() const { return std::max(plan.load.longest, plan.load.weighed_rows); }
  int heads_of_step() const { return static_cast<int>(step.size()) * plan.shape.kv_heads; }
  bool holds_rows_alone(int layer) const;
  /// Slots of a KV head with weights, at most.
  int weighed_slots() const {
    return weighs_slots || plan.shape.drops_packed ? longest() : plan.load.weighed_rows;
  }
  bool any_layer(bool rows_alone) const;
  bool may_hold_images() const;
  void note_ring(int rows);
  RowSplitLaunch rows_of(int layer, const float* q, float scale);
  void class_layers_of(size_t side);
  void place_slots();
  void place_drafted(size_t slots);
  void place_counted(size_t slots);
  void plan_drafts();
  void note(SlotDraft& draft);
  void send(SlotDraft& draft, Stream& stream);
  void send_placed(SlotDraft& draft, Stream& stream);
  void send_formats(Stream& stream);
  void take_step(std::span<const TableRow> rows, Stream& stream);
  TableArgs table_args();
  void point_weighed(TableArgs& args);
  AttendArgs attend_args(int layer, const float* q, float* out, float scale);
};

DecodeTable::State::State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers,
                          Device at)
    : rows_alone(of.rows_alone.begin(), of.rows_alone.end()),
      windows(of_layers.begin(), of_layers.end()),
      device(at),
      bounds(of.layers),
      device_windows(at, 2 * windows.size() * sizeof(DeviceWindow)),
      class_layers(at, 2 * windows.size() * sizeof(int)),
      together(at, windows.size() * sizeof(int)),
      clamped(at, windows.size() * sizeof(unsigned long long)),
      turns(!of.turned_by.empty()) {
  assert(windows.size() == static_cast<size_t>(of.layers));
  plan.shape = of;
  plan.shape.rows_alone = {};  // kept above
  plan.windows = windows;
  clear_now(clamped.data(), clamped.bytes());
  copy_now(device_windows.data(), sizes_of(windows).data(), device_windows.bytes());
  for (const size_t side : {size_t{0}, size_t{1}}) class_layers_of(side);
  const std::vector<int> counts = dropping_together(of.drops_with, windows.size());
  copy_now(together.data(), counts.data(), together.bytes());
}

/// Whether a layer has unpacked tokens alone, in a shape that row_splits.cu reads at full speed.
bool DecodeTable::State::holds_rows_alone(int layer) const {
  const std::array<RowWindow, 2>& of = windows[static_cast<size_t>(layer)];
  const bool no_segments = plan.load.fixed_segments == 0 ||
                           (!rows_alone.empty() && rows_alone[static_cast<size_t>(layer)] != 0);
  return no_segments && plan.shape.remaps == 0 && of[0].format == nullptr &&
         of[1].format == nullptr && reads_by_16(plan.shape.head_dim, plan.shape.rows);
}

/// Whether holds_rows_alone() equals `rows_alone` for some layer.
bool DecodeTable::State::any_layer(bool rows_alone) const {
  bool any = false;
  for (int layer = 0; layer < plan.shape.layers; ++layer)
    any |= holds_rows_alone(layer) == rows_alone;
  return any;
}

/// Whether image_block.cu may take some KV heads.
bool DecodeTable::State::may_hold_images() const {
  return plan.load.fixed_segments > 0 && plan.shape.weights == RowWeights::kNone &&
         plan.shape.rows == DType::kF16 && reads_by_16(plan.shape.head_dim, plan.shape.rows);
}

/// Notes the ring size of a KV head for row_splits.cu, whose launches grow with it.
void DecodeTable::State::note_ring(int rows) {
  const int parts = most_parts(rows);
  if (parts <= row_parts) return;
  row_parts = parts;
  bounds.changed = true;
}

/// Groups layers whose windows one launch can pack, in the order of their first layers: codes are
/// there before a later layer merges its own with them (PackRule::merge).
void DecodeTable::State::class_layers_of(size_t side) {
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    const RowWindow& window = windows[layer][side];
    if (window.format == nullptr) continue;
    const auto alike = [&](const ClassOfLayers& c) {
      const RowWindow& other = windows[static_cast<size_t>(c.layers[0])][side];
      return *other.format == *window.format && other.rules == window.rules &&
             other.trigger == window.trigger && other.rows == window.rows;
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

/// Sizes the drafts for plan.load. The GPU arrays they point into are allocated later.
void DecodeTable::State::plan_drafts() {
  plan.longest = longest();
  plan.rows_alone.clear();
  for (int layer = 0; layer < plan.shape.layers; ++layer) {
    plan.rows_alone.push_back(holds_rows_alone(layer) ? 1 : 0);
  }
  plan.bit_words = plan.shape.drops_packed ? PackedRowBits::words(plan.load.weighed_rows) : 0;
  // Both cache the GPU's limits; call them on this thread, whose current device is the GPU.
  static_cast<void>(image_limits());
  static_cast<void>(most_shared_bytes());
  if (drafts.empty()) drafts.push_back(std::make_unique<SlotDraft>(plan, formats));
  drafts.front()->begin();
  const size_t bytes = std::max<size_t>(1, drafts.front()->bytes());
  const size_t some = std::clamp<size_t>(kDraftBytes / bytes, 1, kMostDrafts);
  drafts.resize(std::min({drafts.size(), some, static_cast<size_t>(plan.load.slots)}));
  for (size_t i = 1; i < drafts.size(); ++i) drafts[i]->begin();
  while (drafts.size() < std::min(some, static_cast<size_t>(plan.load.slots))) {
    drafts.push_back(std::make_unique<SlotDraft>(plan, formats));
    drafts.back()->begin();
  }
}

/// Allocates everything for plan.load; all slots are unset.
void DecodeTable::State::place_slots() {
  const auto slots = static_cast<size_t>(plan.load.slots);
  assert(2 * plan.side_segments() <= kMostSegments);
  bounds = LaunchBounds(plan.shape.layers);
  plan_drafts();
  place_drafted(slots);
  place_counted(slots);
  // Arrays that KV heads point into:
  plan.words = reinterpret_cast<const uint64_t*>(words.data());
  plan.row_scores = reinterpret_cast<float*>(row_scores.data());
  plan.place_weights = reinterpret_cast<float*>(place_weights.data());
  plan.row_bits = reinterpret_cast<const uint32_t*>(row_bits.data());
  is_placed.assign(slots, 0);
  weighs_slots = false;
  step.reserve(slots);
  step.clear();
  versions.assign(slots + 1, 0);
}

/// Allocates what drafts upload.
void DecodeTable::State::place_drafted(size_t slots) {
  const auto make = [&](Buffer& buffer, const auto& one) {
    take(buffer, device, slots * one.size_bytes());
  };
  const SlotDraft& one = *drafts.front();
  make(heads, one.heads);
  make(segments, one.segments);
  make(tails, one.tails);
  make(remaps, one.remaps);
  make(blocks, one.blocks);
  make(words, one.words);
  make(weighed, one.weighed);
  make(came, one.came);
  make(row_scores, one.scores);
  make(turned, one.turned);
  make(value_at, one.value_at);
  make(key_at, one.key_at);
  make(fixed, one.fixed);
}

/// Allocates what the GPU computes, and the step's inputs.
void DecodeTable::State::place_counted(size_t slots) {
  const size_t slot_heads = slots * static_cast<size_t>(plan.heads_of_slot());
  if (turns) waves = waves_of(plan.shape.turned_by, plan.load.turns, device);
  if (plan.shape.drops_packed) {
    take(live, device, slot_heads * 2 * static_cast<size_t>(plan.load.blocks) * sizeof(int));
    take(place_weights, device, plan.compares() ? came.bytes() : 0);
    take(gained_bytes, device, slots * sizeof(int64_t));
    take(row_bits, device, slot_heads * static_cast<size_t>(plan.bit_words) * sizeof(uint32_t));
  }
  take(device_step, device, slots * sizeof(TableRow));
  take(evicted, device, slots * static_cast<size_t>(plan.shape.layers) * sizeof(int));
  const auto kv_heads = static_cast<size_t>(plan.shape.kv_heads * plan.shape.q_per_kv);
  const bool keeps_scores = any_layer(/*rows_alone=*/false) || plan.weighs();
  take(scores, device,
       keeps_scores ? slots * kv_heads * static_cast<size_t>(longest()) * sizeof(float) : 0);
  take(ranges, device,
       slots * kv_heads * static_cast<size_t>(plan.shape.remaps) * sizeof(ScoreRange));
  const bool rows_apart = any_layer(/*rows_alone=*/true) || may_hold_images();
  take(row_splits, device, rows_apart ? slot_heads * sizeof(DeviceRowSplit) : 0);
}

/// Enlarges launches to cover a draft.
void DecodeTable::State::note(SlotDraft& draft) {
  if (std::exchange(draft.bounds().changed, false)) bounds.take(draft.bounds());
  assert(draft.ring_rows == 0 || row_splits.bytes() > 0);
  note_ring(draft.ring_rows);
  if (draft.weighs_slots && !std::exchange(weighs_slots, true)) bounds.changed = true;
}

/// Uploads a draft to its slot.
void DecodeTable::State::send(SlotDraft& draft, Stream& stream) {
  note(draft);
  if (formats.all().size() != sent_formats) send_formats(stream);
  send_all(draft, draft.heads, heads, stream);
  send_all(draft, draft.segments, segments, stream);
  send_all(draft, draft.tails, tails, stream);
  send_all(draft, draft.remaps, remaps, stream);
  send_some(draft, draft.blocks, draft.used_blocks, blocks, stream);
  send_some(draft, draft.words, draft.used_words, words, stream);
  send_all(draft, draft.weighed, weighed, stream);
  send_all(draft, draft.turned, turned, stream);
  const bool placed = draft.heads[0].placed;
  is_placed[static_cast<size_t>(draft.slot)] = placed ? 1 : 0;
  if (!draft.weighed.empty() && draft.weighed[0].by_slots) return;  // the host evicts
  send_all(draft, draft.scores, row_scores, stream);
  if (placed) {
    send_placed(draft, stream);
  } else if (plan.weighs()) {
    send_all(draft, draft.came, came, stream);
  }
}

/// Uploads the rest of placed KV heads, and completes them on the GPU.
void DecodeTable::State::send_placed(SlotDraft& draft, Stream& stream) {
  if (draft.out_of_order) {
    send_all(draft, draft.came, came, stream);
    send_all(draft, draft.value_at, value_at, stream);
    send_all(draft, draft.key_at, key_at, stream);
  }
  send_all(draft, draft.fixed, fixed, stream);
  begin_places(table_args(), draft.slot, stream);
}

/// Uploads the rows of a step unless they are those of the last one.
void DecodeTable::State::take_step(std::span<const TableRow> rows, Stream& stream) {
  if (std::ranges::equal(step, rows)) return;
  step.assign(rows.begin(), rows.end());
  try {
    stream.queue().copy(device_step.data(), true, step.data(), false,
                        step.size() * sizeof(TableRow));
  } catch (...) {
    step.clear();  // not uploaded
    throw;
  }
}

void DecodeTable::State::send_formats(Stream& stream) {
  const std::vector<PackedFormat>& all = formats.all();
  const size_t bytes = all.size() * sizeof(PackedFormat);
  if (device_formats.bytes() < bytes) device_formats = Buffer(device, 2 * bytes);
  stream.queue().copy(device_formats.data(), true, all.data(), false, bytes);
  sent_formats = all.size();
  bounds.changed = true;  // their address may have changed
}

TableArgs DecodeTable::State::table_args() {
  TableArgs args{};
  args.step = reinterpret_cast<const TableRow*>(device_step.data());
  args.heads = reinterpret_cast<DeviceHead*>(heads.data());
  args.segments = reinterpret_cast<DeviceSegment*>(segments.data());
  args.tails = reinterpret_cast<DeviceTail*>(tails.data());
  args.windows = reinterpret_cast<const DeviceWindow*>(device_windows.data());
  args.formats = reinterpret_cast<const PackedFormat*>(device_formats.data());
  args.compares = plan.compares();
  args.scored = plan.shape.scored;
  args.together = reinterpret_cast<const int*>(together.data());
  if (plan.compares() || plan.shape.drops_packed) point_weighed(args);
  if (turns) {
    args.turned = reinterpret_cast<TurnedRows*>(turned.data());
    args.waves = reinterpret_cast<const double*>(waves.data());
    args.turned_half = static_cast<int>(plan.shape.turned_by.size());
  }
  args.scores = reinterpret_cast<float*>(scores.data());
  args.ranges = reinterpret_cast<ScoreRange*>(ranges.data());
  take_sizes(plan, args);
  args.rows = static_cast<int>(step.size());
  args.longest = longest();
  if (row_splits.bytes() == 0) return args;
  args.row_splits = reinterpret_cast<DeviceRowSplit*>(row_splits.data());
  args.row_parts = row_parts;
  return args;
}

/// Sets what the kernels of weights and eviction read.
void DecodeTable::State::point_weighed(TableArgs& args) {
  args.weighed = reinterpret_cast<DeviceWeighed*>(weighed.data());
  args.came = reinterpret_cast<int*>(came.data());
  args.weighed_rows = plan.load.weighed_rows;
  args.weighed_slots = weighed_slots();
  if (!plan.shape.drops_packed) return;
  args.value_at = reinterpret_cast<int16_t*>(value_at.data());
  args.key_at = reinterpret_cast<int16_t*>(key_at.data());
  args.live = reinterpret_cast<int*>(live.data());
  args.bytes = reinterpret_cast<unsigned long long*>(gained_bytes.data());
  args.fixed = reinterpret_cast<DeviceFixedBlock*>(fixed.data());
  args.row_bits = reinterpret_cast<uint32_t*>(row_bits.data());
  args.bit_words = plan.bit_words;
  args.blocks = plan.load.blocks;
  args.fixed_blocks = plan.load.fixed_blocks;
}

/// The unpacked tokens of a layer for row_splits.cu.
RowSplitLaunch DecodeTable::State::rows_of(int layer, const float* q, float scale) {
  const TableArgs table = table_args();
  RowSplitLaunch launch{};
  launch.row_splits = table.row_splits + int64_t{layer} * heads_of_step();
  launch.count = static_cast<unsigned>(heads_of_step());
  launch.parts = static_cast<unsigned>(table.row_parts);
  launch.q_per_kv = plan.shape.q_per_kv;
  launch.head_dim = plan.shape.head_dim;
  launch.scale = scale;
  launch.q = q;
  if (plan.weighs()) {
    launch.scores = table.scores;
    launch.score_stride = table.longest;
  }
  return launch;
}

AttendArgs DecodeTable::State::attend_args(int layer, const float* q, float* out, float scale) {
  AttendArgs args{};
  args.heads = reinterpret_cast<const DeviceHead*>(heads.data());
  args.segments = reinterpret_cast<const DeviceSegment*>(segments.data());
  args.blocks = reinterpret_cast<const DeviceBlock*>(blocks.data());
  args.formats = reinterpret_cast<const PackedFormat*>(device_formats.data());
  args.remaps = reinterpret_cast<const ScoreRemap*>(remaps.data());
  args.guarded = reinterpret_cast<unsigned long long*>(clamped.data()) + layer;
  args.q_per_kv = plan.shape.q_per_kv;
  args.head_dim = plan.shape.head_dim;
  args.scale = scale;
  args.q = q;
  args.out = out;
  args.step = reinterpret_cast<const TableRow*>(device_step.data());
  args.layer = layer;
  args.layers = plan.shape.layers;
  args.kv_heads = plan.shape.kv_heads;
  args.head_segments = 2 * plan.side_segments();
  args.ranges = reinterpret_cast<ScoreRange*>(ranges.data());
  args.most_remaps = plan.shape.remaps;
  args.score_stride = longest();
  args.weighs = plan.weighs();
  if (!plan.shape.drops_packed) return args;
  args.value_at = reinterpret_cast<const int16_t*>(value_at.data());
  args.key_at = reinterpret_cast<const int16_t*>(key_at.data());
  args.places = plan.load.weighed_rows;
  return args;
}

DecodeTable::DecodeTable(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
                         Device device)
    : state_(std::make_unique<State>(shape, windows, device)) {}
DecodeTable::~DecodeTable() = default;

bool DecodeTable::holds(const TableLoad& load) const noexcept {
  return state_->plan.load.holds(load);
}

void DecodeTable::reserve(const TableLoad& load) {
  if (holds(load)) return;
  TableLoad& held = state_->plan.load;
  const int slots = held.slots;
  held.grow(load);
  if (held.slots > slots) held.slots = std::max(held.slots, slots + slots / 2);
  try {
    state_->place_slots();
  } catch (...) {
    held = {};  // the old memory is freed: the next call allocates again
    state_->step.clear();
    throw;
  }
}

void DecodeTable::set(int slot, int layer, std::span<const TableHead> heads, Stream& stream) {
  if (layer == 0) await_drafts(1);
  lay(0, slot, layer, heads);
  if (layer + 1 == state_->plan.shape.layers) send(0, stream);
}

int DecodeTable::drafts() const noexcept { return static_cast<int>(state_->drafts.size()); }

void DecodeTable::await_drafts(size_t count) const {
  for (size_t i = 0; i < count; ++i) state_->drafts[i]->wait();
}

void DecodeTable::lay(int draft, int slot, int layer, std::span<const TableHead> heads) {
  assert(slot < state_->plan.load.slots &&
         heads.size() == static_cast<size_t>(state_->plan.shape.kv_heads));
  state_->drafts[static_cast<size_t>(draft)]->lay(slot, layer, heads);
}

void DecodeTable::send(int draft, Stream& stream) {
  SlotDraft& of = *state_->drafts[static_cast<size_t>(draft)];
  state_->send(of, stream);
  of.lend(stream);
}

void DecodeTable::start(std::span<const TableRow> rows, Stream& stream) {
  State& state = *state_;
  state.take_step(rows, stream);
  if (state.bounds.changed) {
    state.bounds.changed = false;
    std::fill(state.versions.begin(), state.versions.end(), 0);
  }
  uint64_t& version = state.versions[rows.size()];
  if (version == 0) version = new_version();
  if (rows.empty()) return;
  count_step(state.table_args(), stream);
  state.counted = true;
}

void DecodeTable::store(int layer, const float* k, const float* v, Stream& stream) {
  State& state = *state_;
  if (state.step.empty()) return;
  const bool waits = std::exchange(state.counted, false) || state.bounds.has_images(layer);
  store_new_rows(state.table_args(), layer, waits, k, v, stream);
}

void DecodeTable::attend(int layer, const float* q, float* out, float scale, Stream& stream) {
  State& state = *state_;
  if (state.step.empty()) return;
  LayerLaunch launch;
  launch.kinds = state.bounds.kinds(layer);
  launch.heads = static_cast<unsigned>(state.heads_of_step());
  launch.dtype = state.plan.shape.rows;
  launch.rows_alone = state.holds_rows_alone(layer);
  launch.most_slots = state.longest();
  launch.channels = state.formats.channels(state.plan.shape.head_dim);
  if (launch.rows_alone || launch.kinds.image_rows) launch.rows = state.rows_of(layer, q, scale);
  const AttendArgs args = state.attend_args(layer, q, out, scale);
  const FusedArgs fused = attend_splits(launch, args, stream);
  if (state.plan.weighs()) {
    const bool summed = state.plan.shape.weights == RowWeights::kSummed;
    join_and_weigh_rows(state.table_args(), args, fused, summed, launch.rows_alone, stream);
  } else if (needs_join(launch, fused)) {
    join_fused(args, fused, /*early=*/launch.rows_alone, stream);
  }
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
  assert(slots.size() == state.step.size() * static_cast<size_t>(state.plan.shape.layers));
  stream.queue().copy(state.evicted.data(), true, slots.data(), false, slots.size_bytes());
  const auto* evicted = reinterpret_cast<const int*>(state.evicted.data());
  const auto is_placed = [&](const TableRow& row) {
    return state.is_placed[static_cast<size_t>(row.slot)] != 0;
  };
  if (!std::all_of(state.step.begin(), state.step.end(), is_placed)) {
    evict_slots(state.table_args(), evicted, stream);
  }
  if (std::any_of(state.step.begin(), state.step.end(), is_placed)) {
    const bool alike = state.plan.weighs() && state.plan.shape.drops_alike;
    evict_placed(state.table_args(), alike, evicted, stream);
  }
}

void DecodeTable::drop_least(Stream& stream) {
  if (state_->step.empty()) return;
  const TableShape& shape = state_->plan.shape;
  if (shape.drops_packed) {
    return drop_least_placed(state_->table_args(), shape.drops_alike, stream);
  }
  drop_least_weighed(state_->table_args(), shape.drops_alike, stream);
}

std::vector<int> DecodeTable::came(int slot) const {
  const State& state = *state_;
  const size_t of_slot = static_cast<size_t>(state.plan.heads_of_slot()) *
                         static_cast<size_t>(state.plan.load.weighed_rows);
  return read_back<int>(state.came, static_cast<size_t>(slot) * of_slot, of_slot,
                        "DecodeTable::came");
}

std::vector<int64_t> DecodeTable::gained_bytes() const {
  return read_back<int64_t>(state_->gained_bytes, 0, static_cast<size_t>(state_->plan.load.slots),
                            "DecodeTable::gained_bytes");
}

void DecodeTable::put_weights(std::span<const float> weights, float* to) const {
  copy_now(to, weights.data(), weights.size_bytes());
}

void DecodeTable::read_placed(int slot, int layer, int layers, PlacedCopy& copy) const {
  const State& state = *state_;
  const auto kv_heads = static_cast<size_t>(state.plan.shape.kv_heads);
  const size_t heads = kv_heads * static_cast<size_t>(layers);
  const size_t before =
      kv_heads * (static_cast<size_t>(slot) * static_cast<size_t>(state.plan.shape.layers) +
                  static_cast<size_t>(layer));
  copy.places = static_cast<size_t>(state.plan.load.weighed_rows);
  check(cudaDeviceSynchronize(), "DecodeTable::read_placed");  // all streams
  const auto read = [&]<class T>(std::vector<T>& to, const Buffer& from, size_t of_head) {
    to.resize(heads * of_head);
    copy_now(to.data(), reinterpret_cast<const T*>(from.data()) + before * of_head,
             to.size() * sizeof(T));
  };
  read(copy.came, state.came, copy.places);
  read(copy.value_at, state.value_at, copy.places);
  if (state.plan.compares()) read(copy.weights, state.place_weights, copy.places);
  std::vector<DeviceTail> tails;
  read(tails, state.tails, 2);
  take_sides(tails, copy);
}

bool DecodeTable::attends_in_place(int layer) const noexcept {
  return state_->holds_rows_alone(layer);
}

uint64_t DecodeTable::version() const noexcept { return state_->versions[state_->step.size()]; }

int64_t DecodeTable::guarded_remaps(int layer) const {
  const auto count = read_back<unsigned long long>(state_->clamped, static_cast<size_t>(layer), 1,
                                                   "DecodeTable::guarded_remaps");
  return static_cast<int64_t>(count[0]);
}

}  // namespace kvlm
