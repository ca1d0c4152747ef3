// A decode step on a GPU. begin() uploads sequences that are not on the table and has the table
// count one more token for each. end() has it pack full windows and evict. If a DecodeTable cannot
// pack a window, the host takes the sequence back and flushes it. If the table cannot follow a
// sequence's evictions, the host takes it back and uploads it again at every step.
#include "kvcache/engine/gpu_decode.h"

#include <algorithm>
#include <cassert>
#include <climits>

#include "kvcache/engine/for_sequences.h"
#include "kvcache/engine/table_load.h"

namespace kvlm {

namespace {

RowWeights weights_of(const CacheTraits& traits) {
  if (!traits.layouts().keeps_weights()) return RowWeights::kNone;
  return traits.layouts().sums_weights() ? RowWeights::kSummed : RowWeights::kOfStep;
}

/// RoPE's frequencies, if kept keys are rotated in decode.
std::span<const float> turned_by(const CacheTraits& traits) {
  const bool turns = traits.evicts() && traits.retention()->rerotates();
  return turns ? std::span(traits.shape().rope_frequencies) : std::span<const float>();
}

/// Some layer packs keys in another basis.
bool changes_key_basis(const CacheTraits& traits) {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    if (traits.layer(layer).has_key_basis) return true;
  }
  return false;
}

/// The window of a side, if the table packs it.
RowWindow window_of(const CacheTraits& traits, int layer, KvSide side) {
  if (traits.flush_rule(side, layer) == nullptr || traits.host_flushes(layer, side)) return {};
  const Packing& packing = traits.quantizer(kRest, layer)->packing(side, layer);
  return {&packing.format, packing.rules, packing.flush.trigger, packing.flush.rows};
}

/// Tokens after which a window that the host flushes may be full, assuming that all go to its ring.
int rows_to_flush(const CacheTraits& traits, const Sequence& sequence) {
  int least = INT_MAX;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      const FlushRule* window = traits.flush_rule(side, layer);
      if (window == nullptr || !traits.host_flushes(layer, side)) continue;
      for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
        least = std::min(least, window->trigger - head.buffer(kRest, side).full());
      }
    }
  }
  return least;
}

/// The decode table of a cache on a GPU; null on a CPU.
///   remaps  most remaps of a KV head
std::unique_ptr<DecodeTable> make_table(const CacheTraits& traits, int remaps) {
  if (!traits.on_gpu()) return nullptr;
  const CacheShape& shape = traits.shape();
  std::vector<std::array<RowWindow, 2>> windows;
  std::vector<uint8_t> rows_alone;
  for (int layer = 0; layer < shape.layers; ++layer) {
    rows_alone.push_back(traits.holds_rows_alone(layer) ? 1 : 0);
    windows.push_back(
        {window_of(traits, layer, KvSide::kKeys), window_of(traits, layer, KvSide::kValues)});
  }
  const TableShape table{.layers = shape.layers,
                         .kv_heads = shape.kv_heads,
                         .q_per_kv = shape.q_per_kv(),
                         .head_dim = shape.head_dim,
                         .rows = traits.plan().rows,
                         .remaps = remaps,
                         .weights = weights_of(traits),
                         .drops_alike = !traits.layouts().per_head(),
                         .drops_packed = traits.table().places,
                         .scored = traits.table().scores,
                         .drops_with = traits.plan().pairs,
                         .rows_alone = rows_alone,
                         .turned_by = turned_by(traits)};
  return std::make_unique<DecodeTable>(table, windows, traits.device());
}

}  // namespace

GpuDecode::GpuDecode(const CacheTraits& traits, SequenceStore& store, KeyBasisChange& key_basis,
                     VisualRemap& remap)
    : traits_(traits),
      store_(store),
      key_basis_(key_basis),
      remap_(remap),
      counts_(traits),
      table_(make_table(traits, static_cast<int>(remap.ranges()))),
      reader_(traits, store, counts_, table_.get()) {
  if (serves()) of_sequence_.resize(traits.layers());
}

void GpuDecode::reserve(const Workload& load) {
  if (!serves() || load.sequences == 0) return;
  rows_.reserve(load.slots);
  known_rows_.reserve(load.slots);
  const TableLoad most = table_load(traits_, store_.all(), load);
  const float* queries = key_basis_.queries();
  if (!table_->holds(most) || queries != queries_) {
    for (Sequence& sequence : store_.all()) {
      if (sequence.open) take_back(sequence);
    }
  }
  queries_ = queries;
  table_->reserve(most);
  placing_.reserve(load.sequences);
  waiting_.reserve(load.slots);
  of_host_.reserve(load.sequences);
  while (describers_.size() < static_cast<size_t>(table_->drafts())) {
    describers_.emplace_back(traits_, key_basis_, remap_, describers_.size());
  }
}

void GpuDecode::begin(std::span<const StepRows> step, Stream& stream) {
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (!rows.prompt || !sequence.prompted) continue;
    take_back(sequence);
    std::erase(waiting_, rows.sequence);
    sequence.places = -1;  // it was computed for the earlier prompt
  }
  place_generating(step, stream);
  rows_.clear();
  int row = 0;
  for (const StepRows& rows : step) {
    if (!rows.prompt) rows_.push_back({static_cast<int>(rows.sequence), row});
    row += rows.rows;
  }
  basis_known_ = rows_ == known_rows_;
  if (!basis_known_) known_rows_.assign(rows_.begin(), rows_.end());
  if (!rows_.empty()) table_->start(rows_, stream);
}

void GpuDecode::end_prompts(std::span<const StepRows> step, bool waited, Stream& stream) {
  placing_.clear();
  for (const StepRows& rows : step) {
    if (!rows.prompt || !rows.ends_prompt) continue;
    const Sequence& sequence = store_.at(rows.sequence);
    const bool first_prompt = sequence.rows == sequence.prompt_rows;
    if (!sequence.on_gpu) (waited && first_prompt ? waiting_ : placing_).push_back(rows.sequence);
  }
  place_all(placing_, stream);
}

void GpuDecode::prepare_sequences(Stream& stream) {
  if (!serves()) return;
  std::erase_if(waiting_, [&](SequenceId id) {
    const Sequence& sequence = store_.at(id);
    return !sequence.open || !sequence.prompted || sequence.on_gpu;
  });
  place_all(waiting_, stream);
  waiting_.clear();
  store_.prepare_next();
}

/// Uploads sequences with generated tokens in this step that are not on the table.
void GpuDecode::place_generating(std::span<const StepRows> step, Stream& stream) {
  placing_.clear();
  for (const StepRows& rows : step) {
    if (!rows.prompt && !store_.at(rows.sequence).on_gpu) placing_.push_back(rows.sequence);
  }
  place_all(placing_, stream);
  std::erase_if(waiting_, [&](SequenceId id) { return store_.at(id).on_gpu; });
}

void GpuDecode::place_all(std::span<const SequenceId> ids, Stream& stream) {
  if (!ids.empty()) known_rows_.clear();
  const auto together = static_cast<size_t>(table_->drafts());
  for (size_t first = 0; first < ids.size(); first += together) {
    place_some(ids.subspan(first, std::min(together, ids.size() - first)), stream);
  }
}

/// Uploads at most as many sequences as there are drafts (staging buffers).
void GpuDecode::place_some(std::span<const SequenceId> some, Stream& stream) {
  table_->await_drafts(some.size());
  for_sequences(some.size(), traits_.layers() * traits_.kv_heads(), stream,
                [&](size_t begin, size_t end) {
                  for (size_t i = begin; i < end; ++i) lay(some[i], i);
                });
  for (size_t i = 0; i < some.size(); ++i) {
    table_->send(static_cast<int>(i), stream);
    store_.at(some[i]).on_gpu = true;
  }
  laid_ += static_cast<int64_t>(some.size());
}

/// Writes the current state of a sequence to a draft.
void GpuDecode::lay(SequenceId id, size_t draft) {
  Sequence& sequence = store_.at(id);
  assert(sequence.uncounted == 0);
  if (traits_.table().places && sequence.places < 0) sequence.places = most_places(sequence);
  sequence.told_anew = !counts(sequence);
  sequence.placed = !sequence.told_anew && will_be_placed(traits_, sequence);
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    table_->lay(static_cast<int>(draft), static_cast<int>(id), layer,
                describers_[draft].describe(sequence, id, layer));
  }
  sequence.used_when_placed = sequence.memory->used();
  sequence.host_flushes_at = rows_to_flush(traits_, sequence);
  if (!sequence.told_anew) return counts_.start(sequence);
  sequence.gained.clear();
  sequence.dropping.clear();
}

/// The table can count the tokens of a sequence. After a later prompt, the sequence may need more
/// capacity than the table has.
bool GpuDecode::counts(const Sequence& sequence) const {
  return table_counts(traits_, sequence) &&
         (!will_be_placed(traits_, sequence) || table_->holds(placed_load(traits_, sequence)));
}

void GpuDecode::attend(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                       TensorView out, float scale, Stream& stream) {
  table_->store(layer, k.as<float>(), v.as<float>(), stream);
  if (traits_.layer(layer).has_key_basis) change_queries(layer, q, stream);
  table_->attend(layer, q, out.as<float>(), scale, stream);
}

/// Transforms the step's queries and writes them where the table reads them.
void GpuDecode::change_queries(int layer, const float* q, Stream& stream) {
  if (basis_known_) return key_basis_.change_queries_again(layer, q, stream);
  key_basis_.start_queries(layer);
  const size_t head_elements = traits_.q_per_kv() * traits_.dim();
  for (const TableRow& row : rows_) {
    const LayerState& state = store_.at(SequenceId{row.slot}).layers[static_cast<size_t>(layer)];
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      const float* of_head =
          q + (static_cast<size_t>(row.row) * traits_.kv_heads() + h) * head_elements;
      const size_t index = static_cast<size_t>(row.slot) * traits_.kv_heads() + h;
      for (size_t store = traits_.first_store(); store < kStores; ++store) {
        const HeadState& head = state.heads[h];
        if (head.stores[store].keys.packed() == 0) continue;
        key_basis_.add_queries(layer, store, index, of_head, head.facts[store]);
      }
    }
  }
  key_basis_.change_queries(layer, q, stream);
}

std::span<Sequence* const> GpuDecode::end(std::span<const StepRows> step, Stream& stream) {
  const bool weighs = traits_.table().weighs;
  of_host_.clear();
  if (traits_.evicts()) {
    dropped_.assign(traits_.layers() * rows_.size(), weighs ? kLeastScore : kNoSlot);
  }
  StepEnd found;
  size_t number = 0;
  for (size_t i = 0; i < step.size(); ++i) {
    if (i + SequenceStore::kAhead < step.size()) {
      store_.prefetch_counts(step[i + SequenceStore::kAhead].sequence);
    }
    Sequence& sequence = store_.at(step[i].sequence);
    if (!step[i].prompt && sequence.on_gpu) end_step_of(sequence, number++, found);
  }
  if (found.placed) found.due = {true, true};  // only the GPU knows which windows are full
  for (const KvSide side : kSides) {
    if (found.due[static_cast<size_t>(side)]) table_->pack(side == KvSide::kKeys, stream);
  }
  if (found.drops) {
    table_->evict(dropped_, stream);
  } else if (number > 0 && weighs) {
    table_->drop_least(stream);
  }
  bytes_known_ = bytes_known_ && !found.placed;
  reader_.take_back(of_host_, stream);
  return of_host_;
}

/// Counts the token of a sequence, and records what the step's end has to do. `number` is the
/// sequence's index in the step.
void GpuDecode::end_step_of(Sequence& sequence, size_t number, StepEnd& found) {
  const std::span<int> dropped =
      traits_.evicts() ? std::span(dropped_).subspan(number * traits_.layers(), traits_.layers())
                       : std::span<int>();
  found.placed |= sequence.placed;
  const bool may_flush = sequence.placed && sequence.uncounted + 1 >= sequence.host_flushes_at;
  if (sequence.told_anew || may_flush) {
    ++sequence.uncounted;
    of_host_.push_back(&sequence);
    std::fill(dropped.begin(), dropped.end(), kNoSlot);
    found.drops |= sequence.placed;
    return;
  }
  const Gain gain = counts_.gain(sequence, of_sequence_);
  sequence.memory->set_used(sequence.memory->used() + gain.bytes);
  for (const KvSide side : kSides) {
    found.due[static_cast<size_t>(side)] |= gain.due[static_cast<size_t>(side)];
  }
  if (gain.host) {
    of_host_.push_back(&sequence);
    return;
  }
  if (traits_.table().weighs) return;
  for (size_t layer = 0; layer < dropped.size(); ++layer) {
    dropped[layer] = of_sequence_[static_cast<size_t>(sequence.dropping_of[layer])];
    found.drops |= sequence.placed || dropped[layer] != kNoSlot;
  }
}

void GpuDecode::give_up() {
  for (const TableRow& row : rows_) {
    if (Sequence& sequence = store_.at(SequenceId{row.slot}); sequence.open) take_back(sequence);
  }
}

uint64_t GpuDecode::repetition() const noexcept {
  if (rows_.empty()) return 0;
  if (changes_key_basis(traits_) && !basis_known_) return 0;
  return table_->version();
}

void GpuDecode::take_back(Sequence& sequence) const {
  reader_.catch_up(sequence);
  sequence.on_gpu = false;
}

void GpuDecode::count_bytes() const {
  if (bytes_known_) return;
  const std::vector<int64_t> gained = table_->gained_bytes();
  for (const Sequence& sequence : store_.all()) {
    if (!sequence.open || !sequence.drops_on_gpu()) continue;
    const auto more = static_cast<size_t>(gained[static_cast<size_t>(reader_.slot_of(sequence))]);
    sequence.memory->set_used(sequence.used_when_placed + more);
  }
  bytes_known_ = true;
}

}  // namespace kvlm
