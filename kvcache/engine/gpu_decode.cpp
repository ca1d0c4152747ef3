// A step of decode on a GPU. begin() places the sequences that the table does not know as they are
// now and has it count a row for each; end() has it pack the windows that are full. Windows that a
// DecodeTable cannot pack are flushed by the host, which takes the sequence back for that.
#include "kvcache/engine/gpu_decode.h"

#include <algorithm>
#include <cassert>

#include "kvcache/extensions/protected_values.h"

namespace kvlm {

namespace {

constexpr std::array kParts{Part::kKeys, Part::kValues};
// As far as a recording is concerned, steps are alike for ever.
constexpr int kManySteps = 1 << 20;
// Rows of a block that is listed, at most.
constexpr int kAnyBlock = 2048;

bool same(std::span<const TableRow> a, std::span<const TableRow> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.slot == y.slot && x.row == y.row;
  });
}

}  // namespace

GpuDecode::GpuDecode(const CacheTraits& traits, SequenceStore& store, KeyBasisChange& key_basis,
                     VisualRemap& remap)
    : traits_(traits), store_(store), key_basis_(key_basis), remap_(remap) {
  if (!can_serve(traits)) return;
  evicts_ = traits.retention() != nullptr && traits.retention()->evicts();
  of_sequence_.resize(traits.layers());
  std::vector<std::array<RowWindow, 2>> windows;
  const bool split = traits.plan().split;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    windows.push_back({window_of(layer, Part::kKeys), window_of(layer, Part::kValues)});
    int runs = host_flushes(layer, Part::kKeys) || host_flushes(layer, Part::kValues) ? 1 : 0;
    if (traits.layer(layer).protects) runs = 2;
    host_windows_ |= runs > 0 || (split && !traits.layer(layer).windows.empty());
    fixed_runs_ = std::max(fixed_runs_, runs + (split ? 3 : 0));
  }
  const CacheShape& shape = traits.shape();
  table_ = std::make_unique<DecodeTable>(
      TableShape{shape.layers, shape.kv_heads, shape.q_per_kv(), shape.head_dim, traits.plan().rows,
                 fixed_runs_, static_cast<int>(remap.ranges())},
      windows, traits.device());
  lanes_.resize(traits.kv_heads());
  runs_.resize(traits.kv_heads() * 2 * static_cast<size_t>(fixed_runs_ + 1));
}

bool GpuDecode::can_serve(const CacheTraits& traits) {
  if (!traits.on_gpu()) return false;
  const Retention* rule = traits.retention();
  if (rule == nullptr || !rule->evicts()) return true;
  return !traits.layouts().keeps_weights() && !traits.layouts().per_head() && !rule->rerotates() &&
         !traits.plan().split && traits.plan().pairs.empty() && !traits.needs().prompt_embeddings;
}

/// The window of a side, as far as the table packs it.
RowWindow GpuDecode::window_of(int layer, Part part) const {
  if (traits_.flush_rule(part, layer) == nullptr || host_flushes(layer, part)) return {};
  const PartPlan& plan = traits_.quantizer(kRest, layer)->plan(part, layer);
  return {&plan.format, plan.rules, plan.flush.trigger, plan.flush.rows};
}

/// A window of a side that the table cannot pack.
bool GpuDecode::host_flushes(int layer, Part part) const noexcept {
  if (traits_.flush_rule(part, layer) == nullptr) return false;
  for (const Window& window : traits_.layer(layer).windows) {
    if (window.store != kRest || window.part != part) continue;
    const PartPlan& plan = *window.plan;
    const bool whole_blocks = plan.format.axis == ScaleAxis::kToken ||
                              plan.flush.prompt_unit % std::max(plan.format.block_rows, 1) == 0;
    return window.anew || traits_.layer(layer).protects || !whole_blocks ||
           !can_pack_windows(plan.format, plan.rules, plan.flush.rows);
  }
  return false;
}

void GpuDecode::reserve(const Workload& load) {
  if (!serves() || load.sequences == 0) return;
  TableLoad most;
  most.slots = static_cast<int>(load.slots);
  most.longest = static_cast<int>(load.longest);
  const bool protects = traits_.needs().prompt_embeddings;
  if (fixed_runs_ > 0) {
    // Of each fixed run, a block a picture or one for every few rows.
    constexpr int kLeastBlock = 8;
    const int of_run = traits_.layouts().per_image() || host_windows_
                           ? static_cast<int>(Layouts::kMaxImages) + most.longest / kLeastBlock + 2
                           : 0;
    most.listed_blocks = of_run * fixed_runs_;
  }
  if (protects) most.words = 2 * (most.longest / 64 + 1);
  if (evicts_) most.words += most.listed_blocks * (kAnyBlock / 64);  // bitmaps of their rows
  rows_.reserve(load.slots);
  known_rows_.reserve(load.slots);
  flushed_.reserve(load.slots);
  const float* queries = key_basis_.queries();
  if (!table_->reserve(most) || queries != queries_) {
    for (Sequence& sequence : store_.all()) {
      if (sequence.open) take_back(sequence);
    }
  }
  queries_ = queries;
}

void GpuDecode::begin(std::span<const StepRows> step, Stream& stream) {
  const bool placed = place_new(step, stream);
  rows_.clear();
  int row = 0;
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt && sequence.prompted) take_back(sequence);
    if (!rows.prompt && sequence.on_gpu) rows_.push_back({static_cast<int>(rows.sequence), row});
    row += rows.rows;
  }
  if (rows_.empty()) return;
  basis_known_ = !placed && same(rows_, known_rows_);
  if (!basis_known_) known_rows_.assign(rows_.begin(), rows_.end());
  table_->start(rows_, stream);
}

/// Places the sequences of a step that the table does not know. Returns whether there are any.
bool GpuDecode::place_new(std::span<const StepRows> step, Stream& stream) {
  bool any = false;
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt || sequence.on_gpu || !lies_evenly(sequence)) continue;
    place(sequence, rows.sequence, stream);
    any = true;
  }
  return any;
}

/// Whether the table can find the rows that it packed: none was evicted.
bool GpuDecode::lies_evenly(const Sequence& sequence) const noexcept {
  if (!evicts_) return true;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const Part part : kParts) {
        if (!host_flushes(layer, part) && !head.plane(kRest, part).is_even()) return false;
      }
    }
  }
  return true;
}

void GpuDecode::place(Sequence& sequence, SequenceId id, Stream& stream) {
  assert(sequence.uncounted == 0);
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    SlotRun* memory = runs_.data();
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      const HeadState& head = state.heads[h];
      TableLane& lane = lanes_[h] = {};
      RunList runs(memory);
      const size_t index = static_cast<size_t>(id) * traits_.kv_heads() + h;
      lane.keys = runs.from(0).first(describe_keys(head, layer, index, runs));
      if (traits_.plan().split) {
        head.stores[kVisual].values.add_packed(runs);
        head.stores[kVisual].values.add_full(runs);
      }
      const Plane& values = head.stores[kRest].values;
      if (traits_.layer(layer).protects) {
        ProtectedValues::add_packed(head, runs);
      } else if (host_flushes(layer, Part::kValues)) {
        values.add_packed(runs);
      }
      lane.values = runs.from(static_cast<int>(lane.keys.size()));
      lane.remaps = remap_.describe(h, head.stores[kVisual], layer);
      lane.keys_gained = head.stores[kRest].keys.growing();
      lane.values_gained = values.growing();
      if (host_flushes(layer, Part::kKeys)) lane.keys_gained.packed = 0;
      if (host_flushes(layer, Part::kValues)) lane.values_gained.packed = 0;
      memory += runs.size();
    }
    table_->set(static_cast<int>(id), layer, lanes_, stream);
  }
  sequence.on_gpu = true;
  list_gained(sequence);
}

/// The fixed runs of a KV head's keys, and where its queries will be in their basis. Returns how
/// many they are.
size_t GpuDecode::describe_keys(const HeadState& head, int layer, size_t index, RunList& runs) {
  for (size_t store = traits_.first_store(); store < kStores; ++store) {
    const Plane& keys = head.stores[store].keys;
    const int first = runs.size();
    if (store == kVisual || host_flushes(layer, Part::kKeys)) keys.add_packed(runs);
    const bool packed = runs.size() > first;
    if (packed) runs[first].q = key_basis_.queries_of(layer, store, index);
    if (store == kVisual) keys.add_full(runs);
  }
  return static_cast<size_t>(runs.size());
}

/// Lists what a row adds to a sequence: planes of kRest that are alike are counted together.
void GpuDecode::list_gained(Sequence& sequence) const {
  sequence.gained.clear();
  sequence.dropped.clear();
  sequence.slots.clear();
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    sequence.slots.push_back(sequence.layers[static_cast<size_t>(layer)].heads[0].slots());
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const Part part : kParts) {
        const Plane& plane = head.plane(kRest, part);
        const Plane::Layout& layout = plane.layout();
        GainedRows rows;
        if (evicts_) rows.layer = layer;
        rows.part = part;
        rows.window = traits_.flush_rule(part, layer);
        rows.host = host_flushes(layer, part);
        rows.full = plane.full();
        rows.row_bytes = layout.row_bytes();
        if (rows.window != nullptr && !rows.host) {
          const int block = std::min(layout.block_rows(), rows.window->rows);
          rows.packed_bytes =
              static_cast<size_t>(rows.window->rows / block) * layout.packed_bytes(block) +
              (rows.window->rows % block == 0 ? 0 : layout.packed_bytes(rows.window->rows % block));
        }
        const auto alike = std::find_if(sequence.gained.begin(), sequence.gained.end(),
                                        [&](const GainedRows& other) { return other.alike(rows); });
        if (alike == sequence.gained.end()) {
          sequence.gained.push_back(rows);
        } else {
          ++alike->planes;
        }
      }
    }
  }
}

void GpuDecode::attend(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                       TensorView out, float scale, Stream& stream) {
  if (traits_.layer(layer).has_key_basis) {
    if (basis_known_) {
      key_basis_.change_queries_again(layer, q, stream);
    } else {
      key_basis_.start_queries(layer);
      const size_t head_elements = traits_.q_per_kv() * traits_.dim();
      for (const TableRow& row : rows_) {
        const LayerState& state =
            store_.at(SequenceId{row.slot}).layers[static_cast<size_t>(layer)];
        for (size_t h = 0; h < traits_.kv_heads(); ++h) {
          const float* of_head =
              q + (static_cast<size_t>(row.row) * traits_.kv_heads() + h) * head_elements;
          for (size_t store = traits_.first_store(); store < kStores; ++store) {
            const HeadState& head = state.heads[h];
            if (head.stores[store].keys.packed() == 0) continue;
            const size_t index = static_cast<size_t>(row.slot) * traits_.kv_heads() + h;
            key_basis_.add_queries(layer, store, index, of_head, head.facts[store]);
          }
        }
      }
      key_basis_.change_queries(layer, q, stream);
    }
  }
  table_->attend(layer, q, k.as<float>(), v.as<float>(), out.as<float>(), scale, stream);
}

std::span<Sequence* const> GpuDecode::end(std::span<const StepRows> step, Stream& stream) {
  due_ = {};
  flushed_.clear();
  dropped_.assign(evicts_ ? traits_.layers() * rows_.size() : 0, -1);
  size_t number = 0;
  bool drops = false;
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt || !sequence.on_gpu) continue;
    bool host = false;
    size_t used = sequence.memory.used() + gain_row(sequence, host);
    ++sequence.uncounted;
    for (int& slots : sequence.slots) ++slots;
    if (evicts_ && !host) {
      host = !choose_dropped(sequence, of_sequence_.data());
      if (!host) used -= drop_rows(sequence, of_sequence_.data());
      for (size_t layer = 0; layer < traits_.layers() && !host; ++layer) {
        dropped_[layer * rows_.size() + number] = of_sequence_[layer];
        drops |= of_sequence_[layer] >= 0;
      }
    }
    sequence.memory.set_used(used);
    if (host) flushed_.push_back(&sequence);
    ++number;
  }
  for (const Part part : kParts) {
    if (due_[static_cast<size_t>(part)]) table_->pack(part == Part::kKeys, stream);
  }
  if (drops) table_->evict(dropped_, stream);
  for (Sequence* sequence : flushed_) {
    take_back(*sequence);
    count_due(*sequence);
  }
  return flushed_;
}

/// Counts a row of a sequence. Returns the bytes that it adds, modulo 2^64 as it may pack others,
/// and says whether the host has a window to flush.
size_t GpuDecode::gain_row(Sequence& sequence, bool& host) noexcept {
  size_t bytes = 0;
  for (GainedRows& rows : sequence.gained) {
    ++rows.full;
    bytes += rows.planes * rows.row_bytes;
    if (rows.window == nullptr || rows.full < rows.window->trigger) continue;
    if (rows.host) {
      host = true;
      continue;
    }
    due_[static_cast<size_t>(rows.part)] = true;
    const auto packed = static_cast<size_t>(rows.window->rows);
    rows.full -= rows.window->rows;
    bytes += rows.planes * (rows.packed_bytes - packed * rows.row_bytes);
  }
  return bytes;
}

/// The slot that each layer of a sequence drops after this step's row; -1: none. False if one is
/// packed, which the host has to drop.
bool GpuDecode::choose_dropped(Sequence& sequence, int* dropped) const {
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const LayerState& state = sequence.layers[at];
    DecodeView view;
    view.layer = layer;
    view.rows = sequence.slots[at];
    view.prompt_rows = sequence.prompt_rows;
    view.step = sequence.rows + 1 - sequence.prompt_rows;
    view.kept = state.kept;
    view.forget = state.forget;
    view.scores = state.heads[0].scores;
    dropped[at] = traits_.retention()->evict(view);
  }
  return std::none_of(sequence.gained.begin(), sequence.gained.end(), [&](const GainedRows& rows) {
    const auto layer = static_cast<size_t>(rows.layer);
    return dropped[layer] >= 0 && dropped[layer] < sequence.slots[layer] - rows.full;
  });
}

/// Counts the slots that a sequence drops on the GPU. Returns the bytes that they free.
size_t GpuDecode::drop_rows(Sequence& sequence, const int* dropped) const {
  size_t bytes = 0;
  for (GainedRows& rows : sequence.gained) {
    if (dropped[rows.layer] < 0) continue;
    --rows.full;
    bytes += rows.planes * rows.row_bytes;
  }
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    sequence.dropped.push_back(dropped[layer]);
    if (dropped[layer] < 0) continue;
    --sequence.slots[layer];
    std::vector<float>& scores = sequence.layers[layer].heads[0].scores;
    if (static_cast<size_t>(dropped[layer]) < scores.size()) {
      scores.erase(scores.begin() + dropped[layer]);
    }
  }
  return bytes;
}

void GpuDecode::give_up() {
  for (const TableRow& row : rows_) {
    if (Sequence& sequence = store_.at(SequenceId{row.slot}); sequence.open) take_back(sequence);
  }
}

Repetition GpuDecode::repetition() const noexcept {
  if (rows_.empty()) return {};
  if (traits_.changes_key_basis() && !basis_known_) return {};
  return {table_->version(), kManySteps};
}

void GpuDecode::catch_up(Sequence& sequence) const {
  if (sequence.uncounted == 0) return;
  // Blocks of shared codes are found by those of the layer that has them.
  for (const bool shared : {false, true}) {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      LayerState& state = sequence.layers[static_cast<size_t>(layer)];
      for (HeadState& head : state.heads) {
        for (const Part part : kParts) {
          Plane& plane = head.plane(kRest, part);
          if (plane.layout().shared != shared) continue;
          state.plane_bytes -= plane.bytes();
          replay(sequence, plane, part, layer);
          state.plane_bytes += plane.bytes();
        }
        if (!shared && traits_.retention() != nullptr) replay_tags(sequence, head, layer);
      }
    }
  }
  sequence.uncounted = 0;
  sequence.dropped.clear();
}

/// The slot that a layer has dropped after row number `row` of those that are not counted.
int GpuDecode::dropped(const Sequence& sequence, int row, int layer) const {
  // A row that the host settles itself has none.
  const size_t at = static_cast<size_t>(row) * traits_.layers() + static_cast<size_t>(layer);
  return at < sequence.dropped.size() ? sequence.dropped[at] : -1;
}

/// Counts what a sequence has gained and dropped in one plane.
void GpuDecode::replay(const Sequence& sequence, Plane& plane, Part part, int layer) const {
  const FlushRule* window = host_flushes(layer, part) ? nullptr : traits_.flush_rule(part, layer);
  if (!evicts_) return plane.gain(sequence.uncounted, window);
  for (int row = 0; row < sequence.uncounted; ++row) {
    plane.gain(1, window);
    const int slot = dropped(sequence, row, layer);
    if (slot >= 0) static_cast<void>(plane.evict(slot));  // the GPU has closed the gap
  }
}

/// The same for the tags of a KV head.
void GpuDecode::replay_tags(const Sequence& sequence, HeadState& head, int layer) const {
  for (int row = 0; row < sequence.uncounted; ++row) {
    head.tags.push_back(kTextRow);
    const int slot = dropped(sequence, row, layer);
    if (slot >= 0) head.tags.erase(head.tags.begin() + slot);
  }
}

void GpuDecode::take_back(Sequence& sequence) const {
  catch_up(sequence);
  sequence.on_gpu = false;
}

/// Counts the windows that are full, as RowAppender does.
void GpuDecode::count_due(Sequence& sequence) const {
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    state.due = {};
    for (const HeadState& head : state.heads) {
      for (const Window& window : traits_.layer(layer).windows) {
        const Plane& plane = head.plane(window.store, window.part);
        if (window.store != kRest || plane.full() < window.plan->flush.trigger) continue;
        ++state.due[window.store][static_cast<size_t>(window.part)];
      }
    }
  }
}

void GpuDecode::count_newest(HeadState& head) const {
  static_cast<void>(head.stores[kRest].keys.push_row());
  static_cast<void>(head.stores[kRest].values.push_row());
  if (traits_.retention() != nullptr) head.tags.push_back(kTextRow);
}

}  // namespace kvlm
