// The host's part of a DecodeTable. It says once what a sequence holds (LaneLayout) and sends it to
// the sequence's place; count_rows.cu then counts on the GPU, at the begin of every step, the row
// that each lane gains and the rows that the last step has packed. Attention (attend_layer.cu)
// reads the runs; row_pieces.cu serves layers that pack nothing and the full rows behind pictures.
#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/cuda/attend_layer.h"
#include "kernels/cuda/count_rows.h"
#include "kernels/cuda/drop_rows.h"
#include "kernels/cuda/lane_layout.h"
#include "kernels/cuda/launch_bounds.h"
#include "kernels/cuda/pack_windows.h"
#include "kernels/cuda/placed_rows.h"
#include "kernels/cuda/weigh_rows.h"
#include "kernels/decode_table.h"
#include "kernels/row_moves.h"

namespace kvlm {

namespace {

using namespace cuda;
using namespace cuda::packed;

/// A number that no table has given.
uint64_t new_version() {
  static std::atomic<uint64_t> last{uint64_t{1} << 63};
  return ++last;
}

/// Layers whose windows are packed alike.
struct ClassOfLayers {
  WindowClass window;
  std::vector<int> layers;
};

/// The most slots of a split of keys, for a batch whose lanes have `slots` in all.
int key_split_slots(int64_t slots, Stream& stream) {
  const int64_t wanted = int64_t{4} * stream.queue().multiprocessors();
  int split = kAnySplitSlots;
  while (split < 2048 && slots > split * wanted) split *= 2;
  return split;
}

/// By what first rows turn, as often as they may: TableArgs::waves.
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

}  // namespace

struct DecodeTable::State {
  State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers, Device at);

  TableShape shape;
  std::vector<uint8_t> rows_alone;                // of `shape`
  std::vector<std::array<RowWindow, 2>> windows;  // (layers,)
  std::array<std::vector<ClassOfLayers>, 2> classes;
  Device device;
  TableLoad load;
  int side_runs = 0;
  LaunchBounds bounds;
  std::optional<LaneLayout> layout;
  std::vector<uint64_t> versions;  // by rows of a step
  std::vector<StepSlot> step;

  // (slots, layers, kv_heads, ...)
  Buffer lanes, runs, tails, remaps, blocks, words;
  // (layers, 2) windows and parts; layers by class; (layers,) slopes that were clamped
  Buffer device_windows, device_parts, class_layers, together, clamped;
  Buffer device_formats, device_step, scores, evicted;
  Buffer weighed, came;
  Buffer value_at, key_at, live, fixed, place_weights, gained_bytes;  // where packed rows may go
  Buffer row_bits;
  Buffer row_scores;  // (slots, layers, kv_heads, weighed_rows), if rows are scored
  Buffer turned, waves;
  Buffer pieces, row_lanes;  // (layers, rows of the step, kv_heads)
  int row_parts = 0;         // of such a lane, at most

  // One sequence on its way.
  std::vector<DeviceLane> new_lanes;
  std::vector<DeviceRun> new_runs;
  std::vector<DeviceTail> new_tails;
  std::vector<ScoreRemap> new_remaps;
  std::vector<DeviceBlock> new_blocks;
  std::vector<uint64_t> new_words;
  std::vector<DeviceWeighed> new_weighed;
  std::vector<int> new_came;
  std::vector<int16_t> new_value_at, new_key_at;
  std::vector<DeviceFixedBlock> new_fixed;
  std::vector<float> new_scores;
  std::vector<DeviceTurned> new_turned;
  int used_blocks = 0;  // of new_blocks, and words of new_words
  int used_words = 0;
  bool out_of_order = false;       // some lane's packed rows do not lie in order
  std::vector<uint8_t> is_placed;  // (slots,) whose lanes are
  int most_places = 0;             // TableArgs::most_places
  bool weighs_slots = false;       // some lane is WeighedRows::by_slots
  int bit_words = 0;               // TableArgs::bit_words
  bool turns;                      // kept keys do

  int lanes_of_slot() const { return shape.layers * shape.kv_heads; }
  bool weighs() const { return shape.weights != RowWeights::kNone; }
  /// Rows have weights or scores, by which they go.
  bool compares() const { return weighs() || shape.scored; }
  /// Slots of a lane, at most: where packed rows may go, empty places among them.
  int longest() const { return std::max(load.longest, load.weighed_rows); }
  int lanes_of_step() const { return static_cast<int>(step.size()) * shape.kv_heads; }
  bool holds_rows_alone(int layer) const;
  /// Some lanes that are weighed may not be placed.
  bool holds_unplaced() const { return !shape.drops_packed || weighs_slots; }
  bool any_layer(bool rows_alone) const;
  bool may_hold_pictures() const;
  void note_ring(int rows);
  void note_places(const TableLane& lane, const LaneSpace& space);
  PieceLaunch rows_of(int layer, const float* q, float scale, Stream& stream);
  void attend_rows(int layer, const float* q, float* out, float scale, Stream& stream);
  void class_layers_of(size_t side);
  void place_slots();
  LaneSpace space_of(int slot, int layer, size_t head);
  void take_weighed(const WeighedRows& rows, LaneSpace& space);
  void take_by_slots(const WeighedRows& rows, const LaneSpace& space);
  void take_placed(const WeighedRows& rows, const LaneSpace& space);
  void take_scores(const WeighedRows& rows, const LaneSpace& space);
  void take_fixed(const TableLane& lane, const LaneSpace& space);
  void send_slot(int slot, Stream& stream);
  void take_step(std::span<const TableRow> rows, Stream& stream);
  void send_bounds(Stream& stream);
  TableArgs table_args();
  AttendArgs attend_args(int layer, const float* q, float* out, float scale);
};

DecodeTable::State::State(const TableShape& of, std::span<const std::array<RowWindow, 2>> of_layers,
                          Device at)
    : shape(of),
      rows_alone(of.rows_alone.begin(), of.rows_alone.end()),
      windows(of_layers.begin(), of_layers.end()),
      device(at),
      bounds(of.layers, 0),
      device_windows(at, 2 * windows.size() * sizeof(DeviceWindow)),
      device_parts(at, 2 * windows.size() * sizeof(int)),
      class_layers(at, 2 * windows.size() * sizeof(int)),
      together(at, windows.size() * sizeof(int)),
      clamped(at, windows.size() * sizeof(unsigned long long)),
      turns(!of.turned_by.empty()) {
  assert(windows.size() == static_cast<size_t>(of.layers));
  clear_now(clamped.data(), clamped.bytes());
  std::vector<DeviceWindow> sizes;
  for (const std::array<RowWindow, 2>& layer : windows) {
    for (const RowWindow& window : layer) sizes.push_back({window.trigger, window.rows});
  }
  copy_now(device_windows.data(), sizes.data(), device_windows.bytes());
  for (const size_t side : {size_t{0}, size_t{1}}) class_layers_of(side);
  std::vector<int> counts(windows.size(), of.drops_with.empty() ? 1 : 0);
  for (const int first : of.drops_with) ++counts[static_cast<size_t>(first)];
  copy_now(together.data(), counts.data(), together.bytes());
}

/// Whether a layer's lanes hold full rows and nothing else, of which nobody wants the weights, in a
/// shape that row_pieces.cu reads at full speed.
bool DecodeTable::State::holds_rows_alone(int layer) const {
  const std::array<RowWindow, 2>& of = windows[static_cast<size_t>(layer)];
  const bool no_runs =
      load.fixed_runs == 0 || (!rows_alone.empty() && rows_alone[static_cast<size_t>(layer)] != 0);
  return no_runs && shape.remaps == 0 && shape.weights == RowWeights::kNone &&
         of[0].format == nullptr && of[1].format == nullptr &&
         reads_by_16(shape.head_dim, shape.rows);
}

/// Some layer does, or does not.
bool DecodeTable::State::any_layer(bool rows_alone) const {
  bool any = false;
  for (int layer = 0; layer < shape.layers; ++layer) any |= holds_rows_alone(layer) == rows_alone;
  return any;
}

/// Some lanes may be such as picture_lanes.cu serves.
bool DecodeTable::State::may_hold_pictures() const {
  return load.fixed_runs > 0 && shape.weights == RowWeights::kNone && shape.rows == DType::kF16 &&
         reads_by_16(shape.head_dim, shape.rows);
}

/// Makes room for the parts of a lane whose full rows are attended by row_pieces.cu.
void DecodeTable::State::note_ring(int rows) {
  const auto parts = static_cast<int>(ceil_div(rows, kPartRows));
  if (parts <= row_parts) return;
  row_parts = parts;
  bounds.changed = true;
}

/// Makes room for the weights of a lane that is placed, whose fixed runs have been laid.
void DecodeTable::State::note_places(const TableLane& lane, const LaneSpace& space) {
  int places = 0;
  for (const int side : {0, 1}) {
    const GrowingRows& gained = side == 0 ? lane.keys_gained : lane.values_gained;
    places = std::max(places, space.tails[side].fixed_slots +
                                  gained.most_blocks * gained.block_rows + gained.ring_rows);
  }
  // Rounded up, so that sequences of about the same length launch the same.
  int rounded = std::max(most_places, 2048);
  while (rounded < places) rounded *= 2;
  if (rounded == most_places) return;
  most_places = rounded;
  bounds.changed = true;
}

/// Groups layers whose windows are packed alike, so that one launch serves them.
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

/// Takes memory for `load`, in which nothing is set.
void DecodeTable::State::place_slots() {
  const auto slots = static_cast<size_t>(load.slots);
  const auto of_slot = static_cast<size_t>(lanes_of_slot());
  side_runs = load.fixed_runs + kGainedRuns;
  assert(2 * side_runs <= kMostRuns);
  bounds = LaunchBounds(shape.layers, side_runs);
  layout.emplace(shape, windows, load.fixed_runs, longest(), bounds);
  const auto take = [&](Buffer& buffer, size_t bytes) {
    buffer = Buffer();  // first, so that not both are held
    buffer = Buffer(device, bytes);
  };
  const auto make = [&](Buffer& buffer, auto& one, size_t of_lane) {
    one.clear();
    one.resize(of_slot * of_lane);
    take(buffer, slots * one.size() * sizeof(one[0]));
  };
  make(lanes, new_lanes, 1);
  make(runs, new_runs, 2 * static_cast<size_t>(side_runs));
  make(tails, new_tails, 2);
  make(remaps, new_remaps, static_cast<size_t>(shape.remaps));
  make(blocks, new_blocks, static_cast<size_t>(load.listed_blocks));
  make(words, new_words, static_cast<size_t>(load.words));
  make(weighed, new_weighed, compares() || shape.drops_packed ? 1 : 0);
  make(came, new_came, weighs() || shape.drops_packed ? static_cast<size_t>(load.weighed_rows) : 0);
  make(row_scores, new_scores, shape.scored ? static_cast<size_t>(load.weighed_rows) : 0);
  make(turned, new_turned, turns ? 1 : 0);
  if (turns) waves = waves_of(shape.turned_by, load.turns, device);
  bit_words = shape.drops_packed ? PackedRowBits::words(load.weighed_rows) : 0;
  if (shape.drops_packed) {
    make(value_at, new_value_at, static_cast<size_t>(load.weighed_rows));
    make(key_at, new_key_at, static_cast<size_t>(load.weighed_rows));
    make(fixed, new_fixed, 2 * static_cast<size_t>(load.fixed_blocks));
    take(live, slots * of_slot * 2 * static_cast<size_t>(load.blocks) * sizeof(int));
    take(place_weights, compares() ? came.bytes() : 0);
    take(gained_bytes, slots * sizeof(int64_t));
    take(row_bits, slots * of_slot * static_cast<size_t>(bit_words) * sizeof(uint32_t));
  }
  take(device_step, slots * sizeof(StepSlot));
  take(evicted, slots * static_cast<size_t>(shape.layers) * sizeof(int));
  const auto heads = static_cast<size_t>(shape.kv_heads * shape.q_per_kv);
  take(scores, any_layer(/*rows_alone=*/false)
                   ? slots * heads * static_cast<size_t>(longest()) * sizeof(float)
                   : 0);
  const bool rows_apart = any_layer(/*rows_alone=*/true) || may_hold_pictures();
  take(pieces, rows_apart ? slots * of_slot * sizeof(DevicePiece) : 0);
  take(row_lanes, rows_apart ? slots * of_slot * sizeof(DeviceRowLane) : 0);
  is_placed.assign(slots, 0);
  most_places = 0;
  weighs_slots = false;
  step.reserve(slots);
  step.clear();
  versions.assign(slots + 1, 0);
}

/// Where a lane of a slot is described, on its way.
LaneSpace DecodeTable::State::space_of(int slot, int layer, size_t head) {
  const size_t in_slot = static_cast<size_t>(layer) * static_cast<size_t>(shape.kv_heads) + head;
  const int index = slot * lanes_of_slot() + static_cast<int>(in_slot);
  // Lanes list their blocks one after the other, so that no more is sent than there is.
  const auto listed = new_blocks.size();
  const auto of_words = new_words.size();
  const auto* words_at = reinterpret_cast<const uint64_t*>(words.data());
  const auto before = static_cast<size_t>(used_words);
  return {index,
          new_lanes.data() + in_slot,
          new_runs.data() + in_slot * 2 * static_cast<size_t>(side_runs),
          new_tails.data() + in_slot * 2,
          {new_blocks.data() + used_blocks, new_words.data() + before,
           slot * static_cast<int>(listed) + used_blocks,
           words_at + static_cast<size_t>(slot) * of_words + before,
           static_cast<int>(listed) - used_blocks, static_cast<int>(of_words) - used_words}};
}

/// Says of a lane whose rows are weighed which number each place's row has.
void DecodeTable::State::take_weighed(const WeighedRows& rows, LaneSpace& space) {
  if (shape.scored) take_scores(rows, space);
  if (space.lane->placed) return take_placed(rows, space);
  if (rows.by_slots) return take_by_slots(rows, space);
  if (!weighs()) return;
  const std::ptrdiff_t in_slot = space.lane - new_lanes.data();
  const auto places = static_cast<std::ptrdiff_t>(load.weighed_rows);
  const auto numbers = new_came.begin() + in_slot * places;
  int next = space.tails[0].full;
  assert(next < places && static_cast<std::ptrdiff_t>(rows.came.size()) <= places);
  if (!rows.came.empty()) {
    std::copy(rows.came.begin(), rows.came.end(), numbers);
    next = 0;
    for (size_t place = 0; place < rows.came.size(); ++place) {
      if (rows.came[place] == WeighedRows::kNoRow) {
        for (const int side : {0, 1}) space.tails[side].vacated = static_cast<int>(place);
      } else {
        next = std::max(next, rows.came[place] + 1);
      }
    }
  } else {
    std::iota(numbers, numbers + next, 0);
  }
  new_weighed[static_cast<size_t>(in_slot)] = {.weights = rows.weights,
                                               .of_numbers = nullptr,
                                               .least = rows.least,
                                               .next = next,
                                               .scored = 0,
                                               .tail = 0,
                                               .in_order = false,
                                               .by_slots = false,
                                               .first_places = 0};
}

/// Says of a lane whose rows the host drops where their weights are.
void DecodeTable::State::take_by_slots(const WeighedRows& rows, const LaneSpace& space) {
  if (!compares() && !shape.drops_packed) return;
  DeviceWeighed& made = new_weighed[static_cast<size_t>(space.lane - new_lanes.data())];
  made = {};
  made.weights = rows.weights;
  made.by_slots = true;
  if (weighs() && !std::exchange(weighs_slots, true)) bounds.changed = true;
}

/// Takes the scores of a lane's first rows.
void DecodeTable::State::take_scores(const WeighedRows& rows, const LaneSpace& space) {
  const auto in_slot = static_cast<size_t>(space.lane - new_lanes.data());
  const auto most = static_cast<size_t>(load.weighed_rows);
  assert(rows.scores.size() <= most);
  const auto of_lane = new_scores.begin() + static_cast<std::ptrdiff_t>(in_slot * most);
  std::copy(rows.scores.begin(), rows.scores.end(), of_lane);
  float* scores =
      reinterpret_cast<float*>(row_scores.data()) + static_cast<size_t>(space.index) * most;
  const auto scored = static_cast<int>(rows.scores.size());
  new_weighed[in_slot] = {.weights = scores,
                          .of_numbers = nullptr,
                          .least = rows.least,
                          .next = 0,
                          .scored = scored,
                          .tail = std::max(0, scored - rows.least.spared),
                          .in_order = false,
                          .by_slots = false,
                          .first_places = 0};
}

/// Says of a lane whose packed rows may go which number each place's row has, and where each row's
/// key and value are. The GPU says it of rows that lie in order.
void DecodeTable::State::take_placed(const WeighedRows& rows, const LaneSpace& space) {
  const auto in_slot = static_cast<size_t>(space.lane - new_lanes.data());
  const auto places = static_cast<size_t>(load.weighed_rows);
  float* weights = reinterpret_cast<float*>(place_weights.data());
  if (compares()) weights += static_cast<size_t>(space.index) * places;
  const DeviceWeighed scored = new_weighed[in_slot];  // of take_scores(), if rows are
  new_weighed[in_slot] = {.weights = weights,
                          .of_numbers = shape.scored ? scored.weights : rows.weights,
                          .least = rows.least,
                          .next = 0,
                          .scored = scored.scored,
                          .tail = scored.tail,
                          .in_order = rows.came.empty(),
                          .by_slots = false,
                          .first_places = rows.first_places};
  if (rows.came.empty()) return;
  out_of_order = true;
  assert(rows.came.size() <= places && rows.values_came.size() <= places);
  const auto of_lane = [&](auto& all) { return std::span(all).subspan(in_slot * places, places); };
  const std::span<int> numbers = of_lane(new_came);
  const std::span<int16_t> values = of_lane(new_value_at);
  const std::span<int16_t> keys = of_lane(new_key_at);
  std::fill(numbers.begin(), numbers.end(), WeighedRows::kNoRow);
  std::fill(values.begin(), values.end(), int16_t{-1});
  std::fill(keys.begin(), keys.end(), int16_t{-1});
  std::copy(rows.came.begin(), rows.came.end(), numbers.begin());
  std::vector<int16_t> value_of(rows.values_came.size());  // by number
  for (size_t place = 0; place < rows.values_came.size(); ++place) {
    const int number = rows.values_came[place];
    if (number == WeighedRows::kNoRow) continue;
    value_of[static_cast<size_t>(number)] = static_cast<int16_t>(place);
  }
  int& next = new_weighed[in_slot].next;
  for (size_t place = 0; place < rows.came.size(); ++place) {
    const int number = rows.came[place];
    if (number == WeighedRows::kNoRow) continue;
    values[place] = value_of[static_cast<size_t>(number)];
    keys[static_cast<size_t>(values[place])] = static_cast<int16_t>(place);
    next = std::max(next, number + 1);
  }
}

void DecodeTable::State::take_fixed(const TableLane& lane, const LaneSpace& space) {
  const auto most = static_cast<size_t>(load.fixed_blocks);
  auto of_side =
      new_fixed.begin() +
      static_cast<std::ptrdiff_t>(static_cast<size_t>(space.lane - new_lanes.data()) * 2 * most);
  for (const std::span<const FixedBlock> blocks : lane.fixed) {
    assert(blocks.size() <= most);
    auto to = of_side;
    int end = 0;
    for (const FixedBlock& block : blocks) {
      end += block.rows;
      *to++ = {end, block.live, block.bytes};
    }
    of_side += static_cast<std::ptrdiff_t>(most);
  }
}

/// Sends what was set of a slot to its place.
void DecodeTable::State::send_slot(int slot, Stream& stream) {
  const auto send_first = [&](Buffer& to, const auto& from, int count) {
    constexpr size_t kPiece = size_t{1} << 20;  // staging memory is not to grow in decode
    const size_t before = static_cast<size_t>(slot) * from.size() * sizeof(from[0]);
    const size_t bytes = static_cast<size_t>(count) * sizeof(from[0]);
    const auto* first = reinterpret_cast<const std::byte*>(from.data());
    for (size_t at = 0; at < bytes; at += kPiece) {
      const size_t some = std::min(kPiece, bytes - at);
      std::byte* staged = stream.queue().stage(some);
      std::memcpy(staged, first + at, some);
      stream.queue().send(to.data() + before + at, staged, some);
    }
  };
  const auto send = [&](Buffer& to, const auto& from) {
    send_first(to, from, static_cast<int>(from.size()));
  };
  send(lanes, new_lanes);
  send(runs, new_runs);
  send(tails, new_tails);
  send(remaps, new_remaps);
  send_first(blocks, new_blocks, std::exchange(used_blocks, 0));
  send_first(words, new_words, std::exchange(used_words, 0));
  send(weighed, new_weighed);
  const bool by_slots = !new_weighed.empty() && new_weighed[0].by_slots;
  if (!by_slots) send(row_scores, new_scores);
  send(turned, new_turned);
  is_placed[static_cast<size_t>(slot)] = new_lanes[0].placed ? 1 : 0;
  if (!new_lanes[0].placed) return weighs() && !by_slots ? send(came, new_came) : void();
  if (std::exchange(out_of_order, false)) {
    send(came, new_came);
    send(value_at, new_value_at);
    send(key_at, new_key_at);
  }
  send(fixed, new_fixed);
  send_bounds(stream);  // formats, which this slot may be the first to have
  begin_places(table_args(), slot, stream);
}

/// Takes the rows of a step, which may be those of the last one.
void DecodeTable::State::take_step(std::span<const TableRow> rows, Stream& stream) {
  const auto same = [](const StepSlot& held, const TableRow& row) {
    return held.slot == row.slot && held.row == row.row;
  };
  if (std::equal(step.begin(), step.end(), rows.begin(), rows.end(), same)) return;
  step.clear();
  for (const TableRow& row : rows) step.push_back({row.slot, row.row});
  bounds.cut_keys(key_split_slots(int64_t{lanes_of_step()} * load.longest, stream));
  try {
    stream.queue().copy(device_step.data(), true, step.data(), false,
                        step.size() * sizeof(StepSlot));
  } catch (...) {
    step.clear();  // the GPU does not know these rows
    throw;
  }
}

/// Sends what the kernels that count have to know of all layers.
void DecodeTable::State::send_bounds(Stream& stream) {
  std::vector<int> parts;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const bool keys : {true, false}) parts.push_back(bounds.parts(layer, keys));
  }
  stream.queue().copy(device_parts.data(), true, parts.data(), false, device_parts.bytes());
  const std::vector<PackedFormat>& formats = layout->formats();
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
  args.compares = compares();
  args.scored = shape.scored;
  args.together = reinterpret_cast<const int*>(together.data());
  if (compares() || shape.drops_packed) {
    args.weighed = reinterpret_cast<DeviceWeighed*>(weighed.data());
    args.came = reinterpret_cast<int*>(came.data());
    args.weighed_rows = load.weighed_rows;
    args.weighed_slots = weighs_slots ? longest() : load.weighed_rows;
  }
  if (shape.drops_packed) {
    args.value_at = reinterpret_cast<int16_t*>(value_at.data());
    args.key_at = reinterpret_cast<int16_t*>(key_at.data());
    args.live = reinterpret_cast<int*>(live.data());
    args.bytes = reinterpret_cast<unsigned long long*>(gained_bytes.data());
    args.fixed = reinterpret_cast<DeviceFixedBlock*>(fixed.data());
    args.row_bits = reinterpret_cast<uint32_t*>(row_bits.data());
    args.bit_words = bit_words;
    args.most_places = most_places;
    args.blocks = load.blocks;
    args.fixed_blocks = load.fixed_blocks;
  }
  if (turns) {
    args.turned = reinterpret_cast<DeviceTurned*>(turned.data());
    args.waves = reinterpret_cast<const double*>(waves.data());
    args.turned_half = static_cast<int>(shape.turned_by.size());
  }
  args.scores = reinterpret_cast<float*>(scores.data());
  args.rows = static_cast<int>(step.size());
  args.layers = shape.layers;
  args.heads = shape.kv_heads;
  args.side_runs = side_runs;
  args.q_per_kv = shape.q_per_kv;
  args.head_dim = shape.head_dim;
  args.longest = longest();
  args.key_slots = bounds.key_slots();
  args.weightings = shape.remaps + 1;
  args.dtype = shape.rows;
  if (pieces.bytes() == 0) return args;
  args.pieces = reinterpret_cast<DevicePiece*>(pieces.data());
  args.row_lanes = reinterpret_cast<DeviceRowLane*>(row_lanes.data());
  args.row_parts = row_parts;
  args.pictures = may_hold_pictures();
  return args;
}

/// The full rows of a layer that row_pieces.cu serves, and where their states go.
PieceLaunch DecodeTable::State::rows_of(int layer, const float* q, float scale, Stream& stream) {
  const TableArgs table = table_args();
  PieceLaunch launch{};
  launch.pieces = table.pieces + int64_t{layer} * lanes_of_step();
  launch.count = static_cast<unsigned>(lanes_of_step());
  launch.parts = static_cast<unsigned>(table.row_parts);
  launch.q_per_kv = shape.q_per_kv;
  launch.head_dim = shape.head_dim;
  launch.scale = scale;
  launch.q_moved = q - static_cast<const float*>(nullptr);
  launch.states = place_states(launch, int64_t{lanes_of_step()} * table.row_parts, stream);
  return launch;
}

/// Attends in a layer that holds_rows_alone().
void DecodeTable::State::attend_rows(int layer, const float* q, float* out, float scale,
                                     Stream& stream) {
  const PieceLaunch launch = rows_of(layer, q, scale, stream);
  attend_pieces(launch, shape.rows, stream);
  join_parts(launch, table_args().row_lanes + int64_t{layer} * lanes_of_step(), launch.count,
             out - static_cast<float*>(nullptr), stream);
}

AttendArgs DecodeTable::State::attend_args(int layer, const float* q, float* out, float scale) {
  AttendArgs args{};
  args.lanes = reinterpret_cast<const DeviceLane*>(lanes.data());
  args.runs = reinterpret_cast<const DeviceRun*>(runs.data());
  args.blocks = reinterpret_cast<const DeviceBlock*>(blocks.data());
  args.formats = reinterpret_cast<const PackedFormat*>(device_formats.data());
  args.remaps = reinterpret_cast<const ScoreRemap*>(remaps.data());
  args.guarded = reinterpret_cast<unsigned long long*>(clamped.data()) + layer;
  args.q_per_kv = shape.q_per_kv;
  args.head_dim = shape.head_dim;
  args.scale = scale;
  args.q_moved = q - static_cast<const float*>(nullptr);
  args.out_moved = out - static_cast<float*>(nullptr);
  args.step = reinterpret_cast<const StepSlot*>(device_step.data());
  args.layer = layer;
  args.layers = shape.layers;
  args.heads = shape.kv_heads;
  args.lane_runs = 2 * side_runs;
  return args;
}

DecodeTable::DecodeTable(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
                         Device device)
    : state_(std::make_unique<State>(shape, windows, device)) {}
DecodeTable::~DecodeTable() = default;

bool DecodeTable::holds(const TableLoad& load) const noexcept {
  const TableLoad& held = state_->load;
  return load.slots <= held.slots && load.longest <= held.longest &&
         load.fixed_runs <= held.fixed_runs && load.listed_blocks <= held.listed_blocks &&
         load.words <= held.words && load.weighed_rows <= held.weighed_rows &&
         load.blocks <= held.blocks && load.fixed_blocks <= held.fixed_blocks &&
         load.turns <= held.turns;
}

void DecodeTable::reserve(const TableLoad& load) {
  if (holds(load)) return;
  TableLoad& held = state_->load;
  if (load.slots > held.slots) held.slots = std::max(load.slots, held.slots + held.slots / 2);
  held.longest = std::max(held.longest, load.longest);
  held.fixed_runs = std::max(held.fixed_runs, load.fixed_runs);
  held.listed_blocks = std::max(held.listed_blocks, load.listed_blocks);
  held.words = std::max(held.words, load.words);
  held.weighed_rows = std::max(held.weighed_rows, load.weighed_rows);
  held.blocks = std::max(held.blocks, load.blocks);
  held.fixed_blocks = std::max(held.fixed_blocks, load.fixed_blocks);
  held.turns = std::max(held.turns, load.turns);
  try {
    state_->place_slots();
  } catch (...) {
    held = {};  // what was there is gone: the next call takes memory again
    state_->step.clear();
    throw;
  }
}

void DecodeTable::set(int slot, int layer, std::span<const TableLane> lanes, Stream& stream) {
  State& state = *state_;
  assert(slot < state.load.slots && lanes.size() == static_cast<size_t>(state.shape.kv_heads));
  if (layer == 0) {  // of one before that failed half way
    state.used_blocks = state.used_words = 0;
    state.out_of_order = false;
  }
  for (size_t h = 0; h < lanes.size(); ++h) {
    LaneSpace space = state.space_of(slot, layer, h);
    state.layout->lay(layer, lanes[h], space);
    state.used_blocks += space.list.used_blocks;
    state.used_words += space.list.used_words;
    if (state.holds_rows_alone(layer) || is_picture(space.lane->fused)) {
      assert(state.pieces.bytes() > 0);
      state.note_ring(lanes[h].keys_gained.ring_rows);
    }
    if (space.lane->placed && space.lane->fused != 0) {
      space.lane->live = reinterpret_cast<const uint32_t*>(state.row_bits.data()) +
                         int64_t{space.index} * state.bit_words;
    } else if (space.lane->placed) {
      state.note_places(lanes[h], space);
    }
    state.take_weighed(lanes[h].weighed, space);
    if (space.lane->placed) state.take_fixed(lanes[h], space);
    if (state.turns) {
      const TurnedRows& turned = lanes[h].turned;
      state.new_turned[static_cast<size_t>(space.lane - state.new_lanes.data())] = {
          turned.keys, turned.rows, turned.by};
    }
    const std::ptrdiff_t at =
        static_cast<std::ptrdiff_t>(space.lane - state.new_lanes.data()) * state.shape.remaps;
    std::copy(lanes[h].remaps.begin(), lanes[h].remaps.end(), state.new_remaps.begin() + at);
  }
  if (layer + 1 == state.shape.layers) state.send_slot(slot, stream);
}

void DecodeTable::start(std::span<const TableRow> rows, Stream& stream) {
  State& state = *state_;
  state.take_step(rows, stream);
  if (state.bounds.changed) {
    state.send_bounds(stream);
    state.bounds.changed = false;
    std::fill(state.versions.begin(), state.versions.end(), 0);
  }
  uint64_t& version = state.versions[rows.size()];
  if (version == 0) version = new_version();
  if (!rows.empty()) count_step(state.table_args(), stream);
}

void DecodeTable::store(int layer, const float* k, const float* v, Stream& stream) {
  State& state = *state_;
  if (!state.step.empty()) store_new_rows(state.table_args(), layer, k, v, stream);
}

void DecodeTable::attend(int layer, const float* q, float* out, float scale, Stream& stream) {
  State& state = *state_;
  if (state.step.empty()) return;
  if (state.holds_rows_alone(layer)) return state.attend_rows(layer, q, out, scale, stream);
  LayerLaunch launch = state.bounds.layer_launch(layer, state.lanes_of_step());
  launch.most_slots = state.longest();
  const TableArgs table = state.table_args();
  launch.table = &table;
  launch.weightings = state.lanes_of_step() * (state.shape.remaps + 1);
  launch.channels = state.layout->channels();
  if ((launch.fused & kPictureKernels) != 0) {
    launch.pictures.rows = state.rows_of(layer, q, scale, stream);
    launch.pictures.lanes = table.row_lanes + int64_t{layer} * state.lanes_of_step();
  }
  launch_layer(launch, state.attend_args(layer, q, out, scale), stream);
  if (!state.weighs()) return;
  const bool summed = state.shape.weights == RowWeights::kSummed;
  if (state.most_places > 0) add_place_weights(table, layer, summed, stream);
  if (state.holds_unplaced()) add_row_weights(table, layer, summed, stream);
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
  assert(slots.size() == state.step.size() * static_cast<size_t>(state.shape.layers));
  stream.queue().copy(state.evicted.data(), true, slots.data(), false, slots.size_bytes());
  const auto* evicted = reinterpret_cast<const int*>(state.evicted.data());
  const auto is_placed = [&](const StepSlot& row) {
    return state.is_placed[static_cast<size_t>(row.slot)] != 0;
  };
  if (!std::all_of(state.step.begin(), state.step.end(), is_placed)) {
    evict_slots(state.table_args(), evicted, stream);
  }
  if (std::any_of(state.step.begin(), state.step.end(), is_placed)) {
    const bool alike = state.weighs() && state.shape.drops_alike;
    evict_placed(state.table_args(), alike, evicted, stream);
  }
}

void DecodeTable::drop_least(Stream& stream) {
  if (state_->step.empty()) return;
  const TableShape& shape = state_->shape;
  if (shape.drops_packed) {
    return drop_least_placed(state_->table_args(), shape.drops_alike, stream);
  }
  drop_least_weighed(state_->table_args(), shape.drops_alike, stream);
}

std::vector<int> DecodeTable::came(int slot) const {
  const State& state = *state_;
  std::vector<int> numbers(static_cast<size_t>(state.lanes_of_slot()) *
                           static_cast<size_t>(state.load.weighed_rows));
  const size_t at = static_cast<size_t>(slot) * numbers.size();
  check(cudaDeviceSynchronize(), "DecodeTable::came");  // whichever stream fed it
  copy_now(numbers.data(), reinterpret_cast<const int*>(state.came.data()) + at,
           numbers.size() * sizeof(int));
  return numbers;
}

std::vector<int64_t> DecodeTable::gained_bytes() const {
  const State& state = *state_;
  std::vector<int64_t> bytes(static_cast<size_t>(state.load.slots));
  check(cudaDeviceSynchronize(), "DecodeTable::gained_bytes");  // whichever stream fed it
  copy_now(bytes.data(), reinterpret_cast<const int64_t*>(state.gained_bytes.data()),
           bytes.size() * sizeof(int64_t));
  return bytes;
}

void DecodeTable::put_weights(std::span<const float> weights, float* to) const {
  copy_now(to, weights.data(), weights.size_bytes());
}

std::vector<PlacedRows> DecodeTable::placed(int slot, int layer, int layers) const {
  const State& state = *state_;
  const auto heads = static_cast<size_t>(state.shape.kv_heads);
  const size_t lanes = heads * static_cast<size_t>(layers);
  const size_t before =
      heads * (static_cast<size_t>(slot) * static_cast<size_t>(state.shape.layers) +
               static_cast<size_t>(layer));
  const auto places = static_cast<size_t>(state.load.weighed_rows);
  check(cudaDeviceSynchronize(), "DecodeTable::placed");  // whichever stream fed it
  const auto read = [&]<class T>(const Buffer& from, size_t of_lane, T) {
    std::vector<T> all(lanes * of_lane);
    copy_now(all.data(), reinterpret_cast<const T*>(from.data()) + before * of_lane,
             all.size() * sizeof(T));
    return all;
  };
  const std::vector<int> came = read(state.came, places, 0);
  const std::vector<int16_t> value_at = read(state.value_at, places, int16_t{0});
  const std::vector<float> weights = read(state.place_weights, state.compares() ? places : 0, 0.0f);
  const std::vector<DeviceTail> tails = read(state.tails, 2, DeviceTail{});
  std::vector<PlacedRows> rows(lanes);
  for (size_t lane = 0; lane < lanes; ++lane) {
    PlacedRows& of = rows[lane];
    for (const size_t side : {size_t{0}, size_t{1}}) {
      const DeviceTail& tail = tails[lane * 2 + side];
      const int held = tail.fixed_slots + tail.most_blocks * tail.block_rows + tail.ring_rows;
      of.sides[side] = {std::vector<int>(static_cast<size_t>(held), WeighedRows::kNoRow),
                        tail.first,
                        tail.full,
                        tail.blocks,
                        tail.filling,
                        tail.filled};
    }
    const size_t held = of.sides[0].came.size();
    if (state.compares()) of.weights.resize(held);
    for (size_t place = 0; place < held; ++place) {
      const int number = came[lane * places + place];
      if (number == WeighedRows::kNoRow) continue;
      of.sides[0].came[place] = number;
      if (state.compares()) of.weights[place] = weights[lane * places + place];
      // The row of a step that has not come to this layer has no value yet.
      const int value = value_at[lane * places + place];
      if (value >= 0) of.sides[1].came[static_cast<size_t>(value)] = number;
    }
  }
  return rows;
}

bool DecodeTable::attends_in_place(int layer) const noexcept {
  return state_->holds_rows_alone(layer);
}

uint64_t DecodeTable::version() const noexcept { return state_->versions[state_->step.size()]; }

int64_t DecodeTable::guarded_remaps(int layer) const {
  unsigned long long count = 0;
  check(cudaDeviceSynchronize(), "DecodeTable::guarded_remaps");  // whichever stream fed it
  copy_now(&count, reinterpret_cast<unsigned long long*>(state_->clamped.data()) + layer,
           sizeof count);
  return static_cast<int64_t>(count);
}

}  // namespace kvlm
