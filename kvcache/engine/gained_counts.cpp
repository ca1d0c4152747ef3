// If the GPU keeps a sequence's counters, the effect of a decode token still follows from token
// counts: one more token in each ring, a flush, or a slot less. gain() applies this to a few
// numbers per sequence, so that its bytes are known at every step. catch_up() replays it in every K
// and V buffer.
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
        GainedRows rows = rows_of(head.buffer(kRest, side), side, layer);
        if (traits_.evicts()) rows.dropping = sequence.dropping_of[at];
        add(sequence, rows);
      }
    }
  }
}

/// Groups layers that evict alike, so that the rule is called once per group.
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
    of.behind_images = std::max(of.behind_images, behind_images(head));
  }
  if (traits_.retention()->evicts_by_score() && !traits_.table().scores) of.chosen_by = layer;
  return of;
}

/// The first slot after all tokens that are stored separately. From it on, token order and store
/// order agree.
int GainedCounts::behind_images(const HeadState& head) const {
  if (!traits_.plan().split) return 0;
  const auto last = std::find_if(head.tags.rbegin(), head.tags.rend(),
                                 [&](int16_t tag) { return traits_.store_of(tag) == kVisual; });
  return static_cast<int>(head.tags.rend() - last);
}

/// Counters of one K or V buffer.
GainedRows GainedCounts::rows_of(const KvBuffer& buffer, KvSide side, int layer) const {
  const BufferLayout& layout = buffer.layout();
  GainedRows rows;
  rows.side = side;
  rows.window = traits_.flush_rule(side, layer);
  rows.host = traits_.host_flushes(layer, side);
  rows.full = buffer.full();
  rows.row_bytes = layout.row_bytes();
  if (rows.window == nullptr || rows.host) return rows;
  const int packed = rows.window->rows;
  const int block = std::min(layout.block_rows(), packed);
  rows.packed_bytes = static_cast<size_t>(packed / block) * layout.packed_bytes(block);
  if (packed % block != 0) rows.packed_bytes += layout.packed_bytes(packed % block);
  return rows;
}

/// Buffers with equal counters share an entry.
void GainedCounts::add(Sequence& sequence, const GainedRows& rows) {
  const auto alike = std::find_if(sequence.gained.begin(), sequence.gained.end(),
                                  [&](const GainedRows& other) { return other.alike(rows); });
  if (alike == sequence.gained.end()) {
    sequence.gained.push_back(rows);
  } else {
    ++alike->buffers;
  }
}

Gain GainedCounts::gain(Sequence& sequence, std::span<int> dropped) const {
  ++sequence.uncounted;
  if (sequence.placed) {  // only the GPU knows the bytes
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

/// Names the slots to evict, for a sequence whose packed tokens the GPU evicts.
void GainedCounts::name_dropped(Sequence& sequence, std::span<int> dropped) const {
  dropped = dropped.first(sequence.dropping.size());
  for (DroppingLayers& layers : sequence.dropping) ++layers.slots;
  choose_dropped(sequence, dropped);
  forget_slots(sequence, dropped);
}

/// Each KV head has evicted an unpacked token for the one it gained.
void GainedCounts::drop_weighed(Sequence& sequence, Gain& gain) {
  for (GainedRows& rows : sequence.gained) {
    --rows.full;
    gain.bytes -= rows.buffers * rows.row_bytes;
  }
}

Gain GainedCounts::gain_row(Sequence& sequence) {
  Gain gain;
  for (GainedRows& rows : sequence.gained) {
    ++rows.full;
    gain.bytes += rows.buffers * rows.row_bytes;
    if (rows.window == nullptr || rows.full < rows.window->trigger) continue;
    if (rows.host) {
      gain.host = true;
      continue;
    }
    gain.due[static_cast<size_t>(rows.side)] = true;
    const auto packed = static_cast<size_t>(rows.window->rows);
    rows.full -= rows.window->rows;
    gain.bytes += rows.buffers * (rows.packed_bytes - packed * rows.row_bytes);
  }
  return gain;
}

/// DecodeView after this step's token, for rules that need no weights.
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

/// The slots that layers evict after this step's token. By score the table chooses; if it cannot,
/// the host chooses for all KV heads.
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

/// The GPU may evict these slots: all are unpacked tokens after separately stored images, and sinks
/// that rotate were rotated before. Otherwise the host evicts.
bool GainedCounts::gpu_may_drop(const Sequence& sequence,
                                std::span<const int> dropped) const noexcept {
  const bool turns = traits_.retention()->rerotates();
  for (size_t i = 0; i < dropped.size(); ++i) {
    const DroppingLayers& layers = sequence.dropping[i];
    if (dropped[i] >= 0 && dropped[i] < layers.behind_images) return false;
    if (dropped[i] != kNoSlot && turns && !layers.turned) return false;
  }
  return std::none_of(sequence.gained.begin(), sequence.gained.end(), [&](const GainedRows& rows) {
    const auto i = static_cast<size_t>(rows.dropping);
    return dropped[i] >= 0 && dropped[i] < sequence.dropping[i].slots - rows.full;
  });
}

/// Counts slots that the GPU evicts. Returns the bytes freed.
size_t GainedCounts::drop_rows(Sequence& sequence, std::span<const int> dropped) const {
  size_t bytes = 0;
  for (GainedRows& rows : sequence.gained) {
    if (dropped[static_cast<size_t>(rows.dropping)] == kNoSlot) continue;
    --rows.full;
    bytes += rows.buffers * rows.row_bytes;
  }
  sequence.dropped.insert(sequence.dropped.end(), dropped.begin(), dropped.end());
  forget_slots(sequence, dropped);
  return bytes;
}

/// Removes evicted slots from the host's counters and scores.
void GainedCounts::forget_slots(Sequence& sequence, std::span<const int> dropped) const {
  bool scored = false;  // some evicted slot has a score
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
  if (traits_.table().weighs) sequence.uncounted = 0;  // counts stay equal
  if (sequence.uncounted == 0) return;
  std::vector<Dropped> dropped;
  if (traits_.evicts()) {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      dropped.push_back(replay_choices(sequence, layer));
    }
  }
  // Owners first: layers that share codes take block addresses from them.
  for (const bool shared : {false, true}) {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      LayerState& state = sequence.layers[static_cast<size_t>(layer)];
      for (size_t h = 0; h < traits_.kv_heads(); ++h) {
        HeadState& head = state.heads[h];
        std::span<const int> slots;
        if (!dropped.empty()) slots = dropped[static_cast<size_t>(layer)].of(h);
        for (const KvSide side : kSides) {
          KvBuffer& buffer = head.buffer(kRest, side);
          if (buffer.layout().shared != shared) continue;
          state.buffer_bytes -= buffer.bytes();
          const int before = head.stores[kVisual].keys.slots();
          replay(buffer, sequence.uncounted, slots, before, window_of(side, layer));
          state.buffer_bytes += buffer.bytes();
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

/// The slots that KV heads of a layer evicted after each uncounted token, as the table chose them.
/// Removes their scores.
GainedCounts::Dropped GainedCounts::replay_choices(Sequence& sequence, int layer) const {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const bool apart = traits_.table().scores && traits_.layouts().per_head();
  const size_t lists = apart ? state.heads.size() : 1;
  const auto group = static_cast<size_t>(sequence.dropping_of[static_cast<size_t>(layer)]);
  Dropped dropped;
  dropped.lists.resize(lists);
  for (int row = 0; row < sequence.uncounted; ++row) {
    // The host evicts after this token itself.
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

/// The window that the table packs; null: none.
const FlushRule* GainedCounts::window_of(KvSide side, int layer) const noexcept {
  return traits_.host_flushes(layer, side) ? nullptr : traits_.flush_rule(side, layer);
}

/// Replays gained and evicted tokens in one buffer, which follows `before` slots of another store.
void GainedCounts::replay(KvBuffer& buffer, int gained, std::span<const int> dropped, int before,
                          const FlushRule* window) {
  if (dropped.empty()) return buffer.gain(gained, window);
  for (const int slot : dropped) {
    buffer.gain(1, window);
    if (slot >= 0) static_cast<void>(buffer.evict(slot - before));  // the GPU has closed the gap
  }
}

/// Replays them in the tags of a KV head.
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
    state.buffer_bytes += rows * 2 * traits_.kv_heads() * traits_.row_bytes();
    for (HeadState& head : state.heads) {
      for (size_t row = 0; row < rows; ++row) count_newest(head);
    }
  }
  sequence.uncounted = 0;
}

void GainedCounts::count_due(Sequence& sequence) const {
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    state.due = {};
    for (const HeadState& head : state.heads) {
      for (const Window& window : traits_.layer(layer).windows) {
        const KvBuffer& buffer = head.buffer(window.store, window.side);
        if (window.store != kRest || buffer.full() < window.packing->flush.trigger) continue;
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
