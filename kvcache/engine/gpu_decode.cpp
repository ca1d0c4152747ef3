// A step of decode on a GPU. begin() places the sequences that the table does not know as they are
// now and has it count a row for each; end() has it pack the windows that are full. Windows that a
// DecodeTable cannot pack are flushed by the host, which takes the sequence back for that.
#include "kvcache/engine/gpu_decode.h"

#include <algorithm>
#include <cassert>

#include "kvcache/engine/row_order.h"
#include "kvcache/engine/table_load.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

namespace {

constexpr std::array kSides{KvSide::kKeys, KvSide::kValues};

RowWeights weights_of(const CacheTraits& traits) {
  if (!traits.table().weighs) return RowWeights::kNone;
  return traits.layouts().sums_weights() ? RowWeights::kSummed : RowWeights::kOfStep;
}

/// RoPE's frequencies, where kept keys turn in decode.
std::span<const float> turned_by(const CacheTraits& traits) {
  const bool turns = traits.evicts() && traits.retention()->rerotates();
  return turns ? std::span(traits.shape().rope_frequencies) : std::span<const float>();
}

bool same(std::span<const TableRow> a, std::span<const TableRow> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.slot == y.slot && x.row == y.row;
  });
}

/// Some layer's keys are packed in a basis of their own.
bool changes_key_basis(const CacheTraits& traits) {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    if (traits.layer(layer).has_key_basis) return true;
  }
  return false;
}

/// What a policy drops in decode follows from what a table knows.
bool can_serve(const CacheTraits& traits) {
  if (!traits.on_gpu()) return false;
  const Retention* rule = traits.retention();
  if (rule == nullptr || !rule->evicts()) return true;
  if (traits.table().weighs || traits.table().scores) return true;
  // By score the host would choose for every KV head.
  const bool apart = traits.layouts().per_head() && rule->evicts_by_score();
  return !traits.layouts().keeps_weights() && !apart && !traits.needs().prompt_embeddings;
}

/// The window of a side, as far as the table packs it.
RowWindow window_of(const CacheTraits& traits, int layer, KvSide side) {
  if (traits.flush_rule(side, layer) == nullptr || traits.host_flushes(layer, side)) return {};
  const Packing& packing = traits.quantizer(kRest, layer)->packing(side, layer);
  return {&packing.format, packing.rules, packing.flush.trigger, packing.flush.rows};
}

/// Sequence.came, of all that a table says of a sequence.
std::vector<std::vector<int>> came_of(const CacheTraits& traits, const Sequence& sequence,
                                      std::span<const int> all) {
  const auto places =
      static_cast<std::ptrdiff_t>(all.size() / (traits.layers() * traits.kv_heads()));
  std::vector<std::vector<int>> came;
  auto first = all.begin();
  for (size_t layer = 0; layer < traits.layers(); ++layer) {
    const int slots = sequence.slots_of(layer);
    for (size_t h = 0; h < traits.kv_heads(); ++h, first += places) {
      forget_newest(came.emplace_back(first, first + slots + 1));
    }
  }
  return came;
}

}  // namespace

GpuDecode::GpuDecode(const CacheTraits& traits, SequenceStore& store, KeyBasisChange& key_basis,
                     VisualRemap& remap)
    : traits_(traits),
      store_(store),
      key_basis_(key_basis),
      remap_(remap),
      counts_(traits),
      placed_(traits) {
  if (!can_serve(traits)) return;
  of_sequence_.resize(traits.layers());
  std::vector<std::array<RowWindow, 2>> windows;
  const bool split = traits.plan().split;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    windows.push_back(
        {window_of(traits, layer, KvSide::kKeys), window_of(traits, layer, KvSide::kValues)});
    int runs =
        traits_.host_flushes(layer, KvSide::kKeys) || traits_.host_flushes(layer, KvSide::kValues)
            ? 1
            : 0;
    if (traits.layer(layer).protects) runs = 2;
    host_windows_ |= runs > 0 || (split && !traits.layer(layer).windows.empty());
    fixed_runs_ = std::max(fixed_runs_, runs + (split ? 3 : 0));
  }
  const CacheShape& shape = traits.shape();
  table_ = std::make_unique<DecodeTable>(
      TableShape{shape.layers, shape.kv_heads, shape.q_per_kv(), shape.head_dim, traits.plan().rows,
                 fixed_runs_, static_cast<int>(remap.ranges()), weights_of(traits),
                 !traits.layouts().per_head(), traits.table().places, traits.table().scores,
                 turned_by(traits)},
      windows, traits.device());
  lanes_.resize(traits.kv_heads());
  runs_.resize(traits.kv_heads() * 2 * static_cast<size_t>(fixed_runs_ + 1));
}

void GpuDecode::reserve(const Workload& load) {
  if (!serves() || load.sequences == 0) return;
  rows_.reserve(load.slots);
  known_rows_.reserve(load.slots);
  flushed_.reserve(load.slots);
  const TableLoad most = table_load(traits_, store_.all(), load, {fixed_runs_, host_windows_});
  const float* queries = key_basis_.queries();
  if (!table_->holds(most) || queries != queries_) {
    for (Sequence& sequence : store_.all()) {
      if (sequence.open) take_back(sequence);
    }
  }
  queries_ = queries;
  table_->reserve(most);
}

void GpuDecode::begin(std::span<const StepRows> step, Stream& stream) {
  const bool placed = place(step, /*prompts=*/false, stream);
  rows_.clear();
  int row = 0;
  bool alone = true;  // key_basis_ is told of no other rows in this step
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt && sequence.prompted) take_back(sequence);
    if (!rows.prompt && sequence.on_gpu) {
      rows_.push_back({static_cast<int>(rows.sequence), row});
    } else {
      alone = alone && !sequence.prompted;
    }
    row += rows.rows;
  }
  basis_known_ = alone && !placed && same(rows_, known_rows_);
  if (!alone) {
    known_rows_.clear();
  } else if (!basis_known_) {
    known_rows_.assign(rows_.begin(), rows_.end());
  }
  if (!rows_.empty()) table_->start(rows_, stream);
}

void GpuDecode::place_prompts(std::span<const StepRows> step, Stream& stream) {
  if (place(step, /*prompts=*/true, stream)) known_rows_.clear();
}

/// Places the sequences of a step's prompts that have ended, or of its generated rows, that the
/// table does not know. Returns whether there are any.
bool GpuDecode::place(std::span<const StepRows> step, bool prompts, Stream& stream) {
  bool any = false;
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt != prompts || (prompts && !rows.ends_prompt)) continue;
    if (sequence.on_gpu || !fits_table(traits_, sequence)) continue;
    // A later prompt may have brought more than there is room for.
    if (will_be_placed(traits_, sequence) && !table_->holds(placed_load(traits_, sequence)))
      continue;
    place(sequence, rows.sequence, stream);
    any = true;
  }
  return any;
}

void GpuDecode::place(Sequence& sequence, SequenceId id, Stream& stream) {
  assert(sequence.uncounted == 0);
  ++laid_;
  sequence.placed = will_be_placed(traits_, sequence);
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    SlotRun* memory = runs_.data();
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      const HeadState& head = state.heads[h];
      TableLane& lane = lanes_[h] = {};
      RunList runs(memory);
      const size_t index = static_cast<size_t>(id) * traits_.kv_heads() + h;
      lane.remaps = remap_.describe(h, head.stores[kVisual], layer, sequence.placed);
      if (sequence.placed) {
        placed_.describe(head, h, runs, lane);
      } else {
        lane.keys = runs.from(0).first(describe_keys(head, layer, index, runs));
        describe_values(head, layer, runs);
        lane.values = runs.from(static_cast<int>(lane.keys.size()));
        lane.keys_gained = head.stores[kRest].keys.growing();
        lane.values_gained = head.stores[kRest].values.growing();
      }
      if (traits_.host_flushes(layer, KvSide::kKeys)) lane.keys_gained.packed = 0;
      if (traits_.host_flushes(layer, KvSide::kValues)) lane.values_gained.packed = 0;
      if (traits_.table().weighs || traits_.table().scores) {
        describe_weighed(sequence, layer, h, lane);
      }
      if (state.sink_rows > 0) {
        const size_t before = h * static_cast<size_t>(state.sink_rows) * traits_.dim();
        lane.turned = {state.sinks + before, state.sink_rows, state.rotated_by};
      }
      memory += runs.size();
    }
    table_->set(static_cast<int>(id), layer, lanes_, stream);
  }
  sequence.on_gpu = true;
  sequence.used_when_placed = sequence.memory->used();
  counts_.start(sequence);
}

/// Rows that go by weight, which have the numbers that they had when the prompt ended, or by score:
/// those of the prompt that are left.
void GpuDecode::describe_weighed(const Sequence& sequence, int layer, size_t head,
                                 TableLane& lane) const {
  const std::vector<HeadState>& heads = sequence.layers[static_cast<size_t>(layer)].heads;
  const std::optional<LeastWeight> least = least_weight(traits_, sequence, layer);
  if (least) lane.weighed.least = *least;  // else none goes by score any more
  if (traits_.table().scores) {
    lane.weighed.scores = heads[traits_.layouts().per_head() ? head : 0].scores;
    return;
  }
  lane.weighed.weights = heads[head].weights;
  if (sequence.came.empty() || sequence.placed) return;
  lane.weighed.came = sequence.came[static_cast<size_t>(layer) * traits_.kv_heads() + head];
}

/// The fixed runs of a KV head's keys, and where its queries will be in their basis. Returns how
/// many they are.
size_t GpuDecode::describe_keys(const HeadState& head, int layer, size_t index, RunList& runs) {
  for (size_t store = traits_.first_store(); store < kStores; ++store) {
    const Plane& keys = head.stores[store].keys;
    const int first = runs.size();
    if (store == kVisual || traits_.host_flushes(layer, KvSide::kKeys)) keys.add_packed(runs);
    const bool packed = runs.size() > first;
    if (packed) runs[first].q = key_basis_.queries_of(layer, store, index);
    if (store == kVisual) keys.add_full(runs);
  }
  return static_cast<size_t>(runs.size());
}

/// The same of its values.
void GpuDecode::describe_values(const HeadState& head, int layer, RunList& runs) {
  if (traits_.plan().split) {
    head.stores[kVisual].values.add_packed(runs);
    head.stores[kVisual].values.add_full(runs);
  }
  if (traits_.layer(layer).protects) {
    ProtectedValues::add_packed(head, runs);
  } else if (traits_.host_flushes(layer, KvSide::kValues)) {
    head.stores[kRest].values.add_packed(runs);
  }
}

void GpuDecode::attend(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                       TensorView out, float scale, Stream& stream) {
  table_->store(layer, k.as<float>(), v.as<float>(), stream);
  if (traits_.layer(layer).has_key_basis) change_queries(layer, q, stream);
  table_->attend(layer, q, out.as<float>(), scale, stream);
}

/// Changes the queries of a step to where the table looks for them.
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
  key_basis_.change_queries(layer, q, BasisStart::kBesideLast, stream);
}

std::span<Sequence* const> GpuDecode::end(std::span<const StepRows> step, Stream& stream) {
  flushed_.clear();
  const bool names_slots = traits_.evicts() && !traits_.table().weighs;
  if (names_slots) dropped_.assign(traits_.layers() * rows_.size(), kNoSlot);
  std::array<bool, 2> due{};
  bool drops = false;
  bool placed = false;  // some sequence is
  size_t number = 0;
  for (size_t i = 0; i < step.size(); ++i) {
    if (i + SequenceStore::kAhead < step.size()) {
      store_.prefetch_counts(step[i + SequenceStore::kAhead].sequence);
    }
    const StepRows& rows = step[i];
    Sequence& sequence = store_.at(rows.sequence);
    if (rows.prompt || !sequence.on_gpu) continue;
    placed |= sequence.placed;
    const Gain gain = counts_.gain(sequence, of_sequence_);
    sequence.memory->set_used(sequence.memory->used() + gain.bytes);
    for (const KvSide side : kSides) {
      due[static_cast<size_t>(side)] |= gain.due[static_cast<size_t>(side)];
    }
    if (gain.host) {
      flushed_.push_back(&sequence);
    } else if (names_slots) {
      for (size_t layer = 0; layer < traits_.layers(); ++layer) {
        const int said = of_sequence_[static_cast<size_t>(sequence.dropping_of[layer])];
        dropped_[number * traits_.layers() + layer] = said;
        drops |= sequence.placed || said != kNoSlot;
      }
    }
    ++number;
  }
  if (placed) due = {true, true};  // which windows are full the GPU knows
  for (const KvSide side : kSides) {
    if (due[static_cast<size_t>(side)]) table_->pack(side == KvSide::kKeys, stream);
  }
  if (drops) table_->evict(dropped_, stream);
  if (number > 0 && traits_.table().weighs) table_->drop_least(stream);
  bytes_known_ = bytes_known_ && !placed;
  for (Sequence* sequence : flushed_) {
    take_back(*sequence);
    counts_.count_due(*sequence);
  }
  return flushed_;
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
  catch_up(sequence);
  sequence.on_gpu = false;
}

void GpuDecode::catch_up(Sequence& sequence) const {
  if (sequence.drops_on_gpu()) return count_placed(sequence);
  if (traits_.table().weighs && sequence.uncounted > 0) {
    sequence.came = came_of(traits_, sequence, table_->came(slot_of(sequence)));
  }
  counts_.catch_up(sequence);
}

std::vector<HeadState> GpuDecode::heads_now(const Sequence& sequence, int layer,
                                            bool newest) const {
  std::vector<PlacedRows> placed = table_->placed(slot_of(sequence), layer);
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  std::vector<HeadState> heads = state.heads;
  for (size_t h = 0; h < heads.size(); ++h) {
    const int known = heads[h].slots() + sequence.uncounted + (newest ? 1 : 0);
    take_placed(heads[h], placed[h], known);
  }
  return heads;
}

/// Counts on the host, with the weights in their order again, what the GPU has made of a sequence.
void GpuDecode::count_placed(Sequence& sequence) const {
  sequence.on_gpu = false;  // numbers begin anew when it is placed again
  if (sequence.uncounted == 0) return;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    std::vector<PlacedRows> placed = table_->placed(slot_of(sequence), layer);
    auto rows = placed.begin();
    for (HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      const int known = head.slots() + sequence.uncounted;
      const std::vector<float> weights = take_placed(head, *rows++, known);
      if (head.weights != nullptr) table_->put_weights(weights, head.weights);
    }
  }
  sequence.uncounted = 0;
  SequenceStore::count_planes(sequence);
  store_.account(sequence);
}

std::vector<int> GpuDecode::visual_slots(const Sequence& sequence) const {
  std::vector<int> slots;
  if (!sequence.drops_on_gpu() || !traits_.plan().split) return slots;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const std::vector<PlacedRows> placed = table_->placed(slot_of(sequence), layer);
    const std::vector<int>& came = placed[0].sides[0].came;
    const Plane& visual = sequence.layers[static_cast<size_t>(layer)].heads[0].stores[kVisual].keys;
    slots.push_back(
        static_cast<int>(std::count_if(came.begin(), came.begin() + visual.places(),
                                       [](int number) { return number != WeighedRows::kNoRow; })));
  }
  return slots;
}

void GpuDecode::count_bytes() const {
  if (bytes_known_) return;
  const std::vector<int64_t> gained = table_->gained_bytes();
  for (const Sequence& sequence : store_.all()) {
    if (!sequence.open || !sequence.drops_on_gpu()) continue;
    const auto more = static_cast<size_t>(gained[static_cast<size_t>(slot_of(sequence))]);
    sequence.memory->set_used(sequence.used_when_placed + more);
  }
  bytes_known_ = true;
}

}  // namespace kvlm
