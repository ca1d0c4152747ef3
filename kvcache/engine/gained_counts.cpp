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

namespace {

constexpr std::array kSides{KvSide::kKeys, KvSide::kValues};

}  // namespace

void GainedCounts::start(Sequence& sequence) const {
  sequence.gained.clear();
  sequence.dropped.clear();
  sequence.slots.clear();
  sequence.scored.clear();
  sequence.behind_pictures.clear();
  if (traits_.evicts() && !traits_.table_weighs()) {
    sequence.dropped.reserve(static_cast<size_t>(sequence.size.max_rows - sequence.rows) *
                             traits_.layers());
  }
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    if (traits_.evicts()) {
      const std::vector<HeadState>& heads = sequence.layers[static_cast<size_t>(layer)].heads;
      sequence.slots.push_back(heads[0].slots());
      sequence.scored.push_back(static_cast<int>(heads[0].scores.size()));
      int& behind = sequence.behind_pictures.emplace_back(0);
      for (const HeadState& head : heads) behind = std::max(behind, behind_pictures(head));
    }
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const KvSide side : kSides) add(sequence, rows_of(head.plane(kRest, side), side, layer));
    }
  }
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
  const Plane::Layout& layout = plane.layout();
  GainedRows rows;
  if (traits_.evicts()) rows.layer = layer;
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
  std::fill(dropped.begin(), dropped.end(), kNoSlot);
  ++sequence.uncounted;
  if (sequence.placed) {  // bytes the GPU alone knows
    if (!traits_.table_weighs()) name_dropped(sequence, dropped);
    return {};
  }
  Gain gain = gain_row(sequence);
  if (traits_.table_weighs()) {
    drop_weighed(sequence, gain);
    return gain;
  }
  for (int& slots : sequence.slots) ++slots;
  if (!traits_.evicts() || gain.host) return gain;
  choose_dropped(sequence, dropped);
  gain.host = !gpu_may_drop(sequence, dropped);
  if (gain.host) {
    std::fill(dropped.begin(), dropped.end(), kNoSlot);
  } else {
    gain.bytes -= drop_rows(sequence, dropped);
  }
  return gain;
}

/// The slots that a sequence drops whose packed rows the GPU drops.
void GainedCounts::name_dropped(Sequence& sequence, std::span<int> dropped) const {
  for (int& slots : sequence.slots) ++slots;
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

/// A layer of a sequence after this step's row, for rules that ask for no weights.
DecodeView GainedCounts::view_of(const Sequence& sequence, int layer) const {
  const auto at = static_cast<size_t>(layer);
  DecodeView view;
  view.layer = layer;
  view.rows = sequence.slots[at];
  view.prompt_rows = sequence.prompt_rows;
  view.step = sequence.rows + 1 - sequence.prompt_rows;
  view.kept = sequence.layers[at].kept;
  view.forget = sequence.layers[at].forget;
  view.scored = sequence.scored[at];
  return view;
}

/// What each layer of a sequence drops after this step's row. By score the table chooses, or where
/// it has none the host does, for all KV heads.
void GainedCounts::choose_dropped(const Sequence& sequence, std::span<int> dropped) const {
  const Retention& rule = *traits_.retention();
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    if (const int pair = traits_.pair_of(layer); pair != layer) {
      dropped[at] = dropped[static_cast<size_t>(pair)];
      continue;
    }
    const DecodeView view = view_of(sequence, layer);
    dropped[at] = rule.evict(view);
    if (dropped[at] != kLeastScore || traits_.table_scores()) continue;
    dropped[at] = least_scored(*rule.least_weight(view), sequence.layers[at].heads[0].scores);
  }
}

/// Whether all of these are full rows behind all pictures that are stored apart, and the first rows
/// have been turned before if they turn: the host has to drop others.
bool GainedCounts::gpu_may_drop(const Sequence& sequence,
                                std::span<const int> dropped) const noexcept {
  for (size_t layer = 0; layer < dropped.size(); ++layer) {
    if (dropped[layer] >= 0 && dropped[layer] < sequence.behind_pictures[layer]) return false;
    if (dropped[layer] != kNoSlot && traits_.retention()->rerotates() &&
        sequence.layers[layer].sink_rows == 0) {
      return false;
    }
  }
  return std::none_of(sequence.gained.begin(), sequence.gained.end(), [&](const GainedRows& rows) {
    const auto layer = static_cast<size_t>(rows.layer);
    return dropped[layer] >= 0 && dropped[layer] < sequence.slots[layer] - rows.full;
  });
}

/// Counts the slots that a sequence drops on the GPU. Returns the bytes that they free.
size_t GainedCounts::drop_rows(Sequence& sequence, std::span<const int> dropped) const {
  size_t bytes = 0;
  for (GainedRows& rows : sequence.gained) {
    if (dropped[static_cast<size_t>(rows.layer)] == kNoSlot) continue;
    --rows.full;
    bytes += rows.planes * rows.row_bytes;
  }
  sequence.dropped.insert(sequence.dropped.end(), dropped.begin(), dropped.end());
  forget_slots(sequence, dropped);
  return bytes;
}

/// What the host knows of slots that are dropped goes.
void GainedCounts::forget_slots(Sequence& sequence, std::span<const int> dropped) const {
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    const int slot = dropped[layer];
    if (slot == kNoSlot) continue;
    --sequence.slots[layer];
    if (slot < sequence.scored[layer]) --sequence.scored[layer];
    if (!traits_.table_scores()) forget_score(sequence.layers[layer], slot);
  }
}

void GainedCounts::forget_score(LayerState& state, int slot) {
  for (HeadState& head : state.heads) {
    if (static_cast<size_t>(slot) < head.scores.size()) {
      head.scores.erase(head.scores.begin() + slot);
    }
  }
}

void GainedCounts::catch_up(Sequence& sequence) const {
  if (traits_.table_weighs()) sequence.uncounted = 0;  // planes hold as many rows as before
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
  const bool apart = traits_.table_scores() && traits_.layouts().per_head();
  const size_t lists = apart ? state.heads.size() : 1;
  Dropped dropped;
  dropped.lists.resize(lists);
  for (int row = 0; row < sequence.uncounted; ++row) {
    // A row that the host settles itself has none.
    const size_t at = static_cast<size_t>(row) * traits_.layers() + static_cast<size_t>(layer);
    const int said = at < sequence.dropped.size() ? sequence.dropped[at] : kNoSlot;
    if (said != kNoSlot && traits_.retention()->rerotates()) ++state.rotated_by;
    std::optional<LeastWeight> of;
    if (said == kLeastScore) of = least_weight(traits_, sequence, layer);
    for (size_t list = 0; list < lists; ++list) {
      std::vector<float>& scores = state.heads[list].scores;
      const int slot = of ? least_scored(*of, scores) : said;
      dropped.lists[list].push_back(slot);
      if (traits_.table_scores() && slot >= 0 && static_cast<size_t>(slot) < scores.size()) {
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
  static_cast<void>(head.stores[kRest].keys.push_row());
  static_cast<void>(head.stores[kRest].values.push_row());
  if (traits_.retention() != nullptr) head.tags.push_back(kTextRow);
}

}  // namespace kvlm
