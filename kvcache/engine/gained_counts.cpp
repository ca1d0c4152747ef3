// What a row of decode adds to a sequence whose counters are on a GPU follows from numbers of rows:
// a row to each ring, or a flush, or a slot less. gain() counts that in a few numbers a sequence,
// so that its bytes are known at every step; catch_up() repeats it in every plane.
#include "kvcache/engine/gained_counts.h"

#include <algorithm>
#include <array>
#include <optional>

#include "kvcache/engine/least_score.h"
#include "kvcache/engine/table_load.h"

namespace kvlm {

void GainedCounts::start(Sequence& sequence) const {
  sequence.gained.clear();
  sequence.dropped.clear();
  if (traits_.evicts()) group_layers(sequence);
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    for (const HeadState& head : sequence.layers[at].heads) {
      for (const KvSide side : kSides) {
        GainedRows rows = rows_of(head.plane(kRest, side), side, layer);
        if (traits_.evicts()) rows.dropping = sequence.dropping_of[at];
        add(sequence, rows);
      }
    }
  }
}

/// Finds out which layers drop alike, so that the rule is asked once for all of them.
void GainedCounts::group_layers(Sequence& sequence) const {
  sequence.dropping.clear();
  sequence.dropping_of.clear();
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    if (const int pair = traits_.pair_of(layer); pair != layer) {
      sequence.dropping_of.push_back(sequence.dropping_of[static_cast<size_t>(pair)]);
      continue;
    }
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    const DroppingLayers of = dropping_of(state, layer);
    const auto known = std::find(sequence.dropping.begin(), sequence.dropping.end(), of);
    sequence.dropping_of.push_back(static_cast<int16_t>(known - sequence.dropping.begin()));
    if (known == sequence.dropping.end()) sequence.dropping.push_back(of);
  }
  if (traits_.table().weighs || sequence.placed) return;
  const auto steps = static_cast<size_t>(sequence.size.max_rows - sequence.rows);
  sequence.dropped.reserve(steps * sequence.dropping.size());
}

DroppingLayers GainedCounts::dropping_of(const LayerState& state, int layer) const {
  DroppingLayers of;
  of.slots = state.heads[0].slots();
  of.scored = static_cast<int>(state.heads[0].scores.size());
  of.kept = state.kept;
  of.forget = state.forget;
  of.turned = state.sink_rows > 0 || traits_.retention()->most_sinks() == 0;
  for (const HeadState& head : state.heads) {
    of.behind_pictures = std::max(of.behind_pictures, behind_pictures(head));
  }
  if (traits_.retention()->evicts_by_score() && !traits_.table().scores) of.chosen_by = layer;
  return of;
}

/// The first slot behind all that are stored apart: from there on a slot's number among all is its
/// number in the order of the stores.
int GainedCounts::behind_pictures(const HeadState& head) const {
  if (!traits_.plan().split) return 0;
  const auto last = std::find_if(head.tags.rbegin(), head.tags.rend(),
                                 [&](int16_t tag) { return traits_.store_of(tag) == kVisual; });
  return static_cast<int>(head.tags.rend() - last);
}

/// What a row adds to one plane.
GainedRows GainedCounts::rows_of(const Plane& plane, KvSide side, int layer) const {
  const PlaneLayout& layout = plane.layout();
  GainedRows rows;
  rows.side = side;
  rows.window = traits_.flush_rule(side, layer);
  rows.host = traits_.host_flushes(layer, side);
  rows.full = plane.full();
  rows.row_bytes = layout.row_bytes();
  if (rows.window == nullptr || rows.host) return rows;
  const int packed = rows.window->rows;
  const int block = std::min(layout.block_rows(), packed);
  rows.packed_bytes = static_cast<size_t>(packed / block) * layout.packed_bytes(block);
  if (packed % block != 0) rows.packed_bytes += layout.packed_bytes(packed % block);
  return rows;
}

/// Planes that are alike are counted together.
void GainedCounts::add(Sequence& sequence, const GainedRows& rows) {
  const auto alike = std::find_if(sequence.gained.begin(), sequence.gained.end(),
                                  [&](const GainedRows& other) { return other.alike(rows); });
  if (alike == sequence.gained.end()) {
    sequence.gained.push_back(rows);
  } else {
    ++alike->planes;
  }
}

Gain GainedCounts::gain(Sequence& sequence, std::span<int> dropped) const {
  ++sequence.uncounted;
  if (sequence.placed) {  // bytes the GPU alone knows
    if (!traits_.table().weighs) name_dropped(sequence, dropped);
    return {};
  }
  Gain gain = gain_row(sequence);
  if (traits_.table().weighs) {
    drop_weighed(sequence, gain);
    return gain;
  }
  if (!traits_.evicts()) return gain;
  dropped = dropped.first(sequence.dropping.size());
  for (DroppingLayers& layers : sequence.dropping) ++layers.slots;
  if (!gain.host) {
    choose_dropped(sequence, dropped);
    gain.host = !gpu_may_drop(sequence, dropped);
  }
  if (gain.host) {
    std::fill(dropped.begin(), dropped.end(), kNoSlot);
  } else {
    gain.bytes -= drop_rows(sequence, dropped);
  }
  return gain;
}

/// The slots that a sequence drops whose packed rows the GPU drops.
void GainedCounts::name_dropped(Sequence& sequence, std::span<int> dropped) const {
  dropped = dropped.first(sequence.dropping.size());
  for (DroppingLayers& layers : sequence.dropping) ++layers.slots;
  choose_dropped(sequence, dropped);
  forget_slots(sequence, dropped);
}

/// Each KV head has dropped a full row for the one that it has gained.
void GainedCounts::drop_weighed(Sequence& sequence, Gain& gain) {
  for (GainedRows& rows : sequence.gained) {
    --rows.full;
    gain.bytes -= rows.planes * rows.row_bytes;
  }
}

Gain GainedCounts::gain_row(Sequence& sequence) {
  Gain gain;
  for (GainedRows& rows : sequence.gained) {
    ++rows.full;
    gain.bytes += rows.planes * rows.row_bytes;
    if (rows.window == nullptr || rows.full < rows.window->trigger) continue;
    if (rows.host) {
      gain.host = true;
      continue;
    }
    gain.due[static_cast<size_t>(rows.side)] = true;
    const auto packed = static_cast<size_t>(rows.window->rows);
    rows.full -= rows.window->rows;
    gain.bytes += rows.planes * (rows.packed_bytes - packed * rows.row_bytes);
  }
  return gain;
}

/// Layers of a sequence after this step's row, for rules that ask for no weights.
DecodeView GainedCounts::view_of(const Sequence& sequence, const DroppingLayers& layers) noexcept {
  DecodeView view;
  view.rows = layers.slots;
  view.prompt_rows = sequence.prompt_rows;
  view.step = sequence.rows + 1 - sequence.prompt_rows;
  view.kept = layers.kept;
  view.forget = layers.forget;
  view.scored = layers.scored;
  return view;
}

/// What layers of a sequence drop after this step's row. By score the table chooses, or where it
/// does not the host, for all KV heads.
void GainedCounts::choose_dropped(const Sequence& sequence, std::span<int> dropped) const {
  const Retention& rule = *traits_.retention();
  for (size_t i = 0; i < sequence.dropping.size(); ++i) {
    const DroppingLayers& layers = sequence.dropping[i];
    const DecodeView view = view_of(sequence, layers);
    dropped[i] = rule.evict(view);
    if (dropped[i] != kLeastScore || traits_.table().scores) continue;
    const LayerState& state = sequence.layers[static_cast<size_t>(layers.chosen_by)];
    dropped[i] = least_scored(*rule.least_weight(view), state.heads[0].scores);
  }
}

/// Whether all of these are full rows behind all pictures that are stored apart, and the first rows
/// have been turned before if they turn: the host has to drop others.
bool GainedCounts::gpu_may_drop(const Sequence& sequence,
                                std::span<const int> dropped) const noexcept {
  const bool turns = traits_.retention()->rerotates();
  for (size_t i = 0; i < dropped.size(); ++i) {
    const DroppingLayers& layers = sequence.dropping[i];
    if (dropped[i] >= 0 && dropped[i] < layers.behind_pictures) return false;
    if (dropped[i] != kNoSlot && turns && !layers.turned) return false;
  }
  return std::none_of(sequence.gained.begin(), sequence.gained.end(), [&](const GainedRows& rows) {
    const auto i = static_cast<size_t>(rows.dropping);
    return dropped[i] >= 0 && dropped[i] < sequence.dropping[i].slots - rows.full;
  });
}

/// Counts the slots that a sequence drops on the GPU. Returns the bytes that they free.
size_t GainedCounts::drop_rows(Sequence& sequence, std::span<const int> dropped) const {
  size_t bytes = 0;
  for (GainedRows& rows : sequence.gained) {
    if (dropped[static_cast<size_t>(rows.dropping)] == kNoSlot) continue;
    --rows.full;
    bytes += rows.planes * rows.row_bytes;
  }
  sequence.dropped.insert(sequence.dropped.end(), dropped.begin(), dropped.end());
  forget_slots(sequence, dropped);
  return bytes;
}

/// What the host knows of slots that are dropped goes.
void GainedCounts::forget_slots(Sequence& sequence, std::span<const int> dropped) const {
  bool scored = false;  // some of them are
  for (size_t i = 0; i < dropped.size(); ++i) {
    DroppingLayers& layers = sequence.dropping[i];
    if (dropped[i] == kNoSlot) continue;
    --layers.slots;
    if (dropped[i] >= layers.scored) continue;
    --layers.scored;
    scored = true;
  }
  if (scored && !traits_.table().scores) forget_scores(sequence, dropped);
}

void GainedCounts::forget_scores(Sequence& sequence, std::span<const int> dropped) const {
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    const int slot = dropped[static_cast<size_t>(sequence.dropping_of[layer])];
    if (slot < 0) continue;
    for (HeadState& head : sequence.layers[layer].heads) {
      if (static_cast<size_t>(slot) < head.scores.size()) {
        head.scores.erase(head.scores.begin() + slot);
      }
    }
  }
}

void GainedCounts::catch_up(Sequence& sequence) const {
  if (traits_.table().weighs) sequence.uncounted = 0;  // planes hold as many rows as before
  if (sequence.uncounted == 0) return;
  std::vector<Dropped> dropped;
  if (traits_.evicts()) {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      dropped.push_back(replay_choices(sequence, layer));
    }
  }
  // Blocks of shared codes are found by those of the layer that has them.
  for (const bool shared : {false, true}) {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      LayerState& state = sequence.layers[static_cast<size_t>(layer)];
      for (size_t h = 0; h < traits_.kv_heads(); ++h) {
        HeadState& head = state.heads[h];
        std::span<const int> slots;
        if (!dropped.empty()) slots = dropped[static_cast<size_t>(layer)].of(h);
        for (const KvSide side : kSides) {
          Plane& plane = head.plane(kRest, side);
          if (plane.layout().shared != shared) continue;
          state.plane_bytes -= plane.bytes();
          const int before = head.stores[kVisual].keys.slots();
          replay(plane, sequence.uncounted, slots, before, window_of(side, layer));
          state.plane_bytes += plane.bytes();
        }
        if (!shared && traits_.retention() != nullptr) {
          replay_tags(head, sequence.uncounted, slots);
        }
      }
    }
  }
  sequence.uncounted = 0;
  sequence.dropped.clear();
}

/// What the KV heads of a layer have dropped after each row that is not counted, as the table has
/// chosen. What the host knows of these rows goes.
GainedCounts::Dropped GainedCounts::replay_choices(Sequence& sequence, int layer) const {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const bool apart = traits_.table().scores && traits_.layouts().per_head();
  const size_t lists = apart ? state.heads.size() : 1;
  const auto group = static_cast<size_t>(sequence.dropping_of[static_cast<size_t>(layer)]);
  Dropped dropped;
  dropped.lists.resize(lists);
  for (int row = 0; row < sequence.uncounted; ++row) {
    // A row that the host settles itself has none.
    const size_t at = static_cast<size_t>(row) * sequence.dropping.size() + group;
    const int said = at < sequence.dropped.size() ? sequence.dropped[at] : kNoSlot;
    if (said != kNoSlot && traits_.retention()->rerotates()) ++state.rotated_by;
    std::optional<LeastWeight> of;
    if (said == kLeastScore) of = least_weight(traits_, sequence, layer);
    for (size_t list = 0; list < lists; ++list) {
      std::vector<float>& scores = state.heads[list].scores;
      const int slot = of ? least_scored(*of, scores) : said;
      dropped.lists[list].push_back(slot);
      if (traits_.table().scores && slot >= 0 && static_cast<size_t>(slot) < scores.size()) {
        scores.erase(scores.begin() + slot);
      }
    }
  }
  return dropped;
}

/// The window that a table packs.
const FlushRule* GainedCounts::window_of(KvSide side, int layer) const noexcept {
  return traits_.host_flushes(layer, side) ? nullptr : traits_.flush_rule(side, layer);
}

/// Counts in one plane what a KV head has gained and dropped: behind `before` slots of others.
void GainedCounts::replay(Plane& plane, int gained, std::span<const int> dropped, int before,
                          const FlushRule* window) {
  if (dropped.empty()) return plane.gain(gained, window);
  for (const int slot : dropped) {
    plane.gain(1, window);
    if (slot >= 0) static_cast<void>(plane.evict(slot - before));  // the GPU has closed the gap
  }
}

/// The same for the tags of a KV head.
void GainedCounts::replay_tags(HeadState& head, int gained, std::span<const int> dropped) {
  for (int row = 0; row < gained; ++row) {
    head.tags.push_back(kTextRow);
    const int slot = dropped.empty() ? kNoSlot : dropped[static_cast<size_t>(row)];
    if (slot >= 0) head.tags.erase(head.tags.begin() + slot);
  }
}

void GainedCounts::count_rows(Sequence& sequence) const {
  for (LayerState& state : sequence.layers) {
    const auto rows = static_cast<size_t>(sequence.uncounted);
    state.plane_bytes += rows * 2 * traits_.kv_heads() * traits_.row_bytes();
    for (HeadState& head : state.heads) {
      for (size_t row = 0; row < rows; ++row) count_newest(head);
    }
  }
  sequence.uncounted = 0;
}

/// Counts the windows that are full, as RowAppender does.
void GainedCounts::count_due(Sequence& sequence) const {
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    state.due = {};
    for (const HeadState& head : state.heads) {
      for (const Window& window : traits_.layer(layer).windows) {
        const Plane& plane = head.plane(window.store, window.side);
        if (window.store != kRest || plane.full() < window.packing->flush.trigger) continue;
        ++state.due[window.store][static_cast<size_t>(window.side)];
      }
    }
  }
}

void GainedCounts::count_newest(HeadState& head) const {
  static_cast<void>(head.stores[kRest].keys.ring.push());
  static_cast<void>(head.stores[kRest].values.ring.push());
  if (traits_.retention() != nullptr) head.tags.push_back(kTextRow);
}

}  // namespace kvlm
