// What a cache of policies does in decode: append, attend from packed blocks, flush, evict (specs
// 1.9, 10.3). Allocates nothing.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/row_moves.h"
#include "kvcache/policy_cache.h"

namespace kvlm {

/// Makes room for one row in every lane of a layer: store_new() fills it.
void PolicyCache::append_row(LayerState& state, int layer, int16_t tag, size_t first_lane) {
  const size_t store = store_of(tag);
  state.due = {};
  state.plane_bytes += 2 * heads() * row_bytes();
  for (size_t head = 0; head < heads(); ++head) {
    HeadState& lane = state.heads[head];
    new_keys_[first_lane + head] = lane.stores[store].keys.push_row();
    new_values_[first_lane + head] = lane.stores[store].values.push_row();
    for (const Window& window : plan_of(layer).windows) {
      const Plane& plane = lane.plane(window.store, window.part);
      if (plane.full() >= window.plan->flush.trigger)
        ++state.due[window.store][static_cast<size_t>(window.part)];
    }
    if (parts_.retention == nullptr) continue;
    lane.tags.push_back(tag);
    if (lane.weights == nullptr || store == kRest) continue;
    // A picture of a later prompt: its weight comes between others, on the host (needs()).
    float* newest = &newest_weight(lane, store);
    const float* end = lane.weights + lane.slots();
    std::memmove(newest + 1, newest, static_cast<size_t>(end - newest - 1) * sizeof(float));
  }
}

/// Stores rows that append_row() made room for, (rows, kv_heads, head_dim) of each.
void PolicyCache::store_new(ConstTensorView k, ConstTensorView v, size_t first_lane,
                            Stream& stream) {
  const size_t lanes = static_cast<size_t>(k.shape()[0]) * heads();
  narrow_rows(std::span(new_keys_).subspan(first_lane, lanes), parts_.rows, shape_.head_dim,
              k.as<float>(), stream);
  narrow_rows(std::span(new_values_).subspan(first_lane, lanes), parts_.rows, shape_.head_dim,
              v.as<float>(), stream);
}

/// HeadState slots are those of kVisual, then those of kRest.
float& PolicyCache::newest_weight(HeadState& lane, size_t store) noexcept {
  return lane.weights[(store == kRest ? lane.slots() : lane.stores[kVisual].keys.slots()) - 1];
}

/// Appends and attends the generated rows of a step.
///   q  (rows, q_heads, head_dim), which `out` may not overlap
void PolicyCache::decode(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                         TensorView out, float scale, Stream& stream) {
  const size_t lanes = generated_.size() * heads();
  assert(lanes <= packed_.size());
  const auto queries = static_cast<size_t>(shape_.q_per_kv());
  float* weights = weights_.data();
  for (Generated& generated : generated_) {
    generated.weights = weights;
    weights += heads() * queries * static_cast<size_t>(generated.sequence->size.max_rows);
  }
  key_basis_.start_queries(layer);
  std::atomic<size_t> plain{0};
  const auto describe = [&](size_t begin, size_t end) {
    plain += describe_lanes(begin, end, layer, q, out.as<float>());
  };
  if (plan_of(layer).has_key_basis) {
    describe(0, generated_.size());  // the queries that are turned are listed
  } else {
    for_sequences(generated_.size(), stream, describe);
  }
  // Rows that follow each other are stored together.
  for (size_t first = 0; first < generated_.size();) {
    size_t end = first + 1;
    while (end < generated_.size() && generated_[end].row == generated_[end - 1].row + 1) ++end;
    const auto count = static_cast<int64_t>(end - first);
    store_new(k.slice(generated_[first].row, count), v.slice(generated_[first].row, count),
              first * heads(), stream);
    first = end;
  }
  // Lanes that hold nothing packed are attended like plain rows.
  size_t kept = lanes;
  all_plain_[static_cast<size_t>(layer)] = plain == lanes ? 1 : 0;
  if (plain > 0) {
    if (plain < lanes) keep_ = false;
    RowBatch& batch = plain_[static_cast<size_t>(layer)];
    batch.start(shape_.q_per_kv(), shape_.head_dim);
    kept = 0;
    for (size_t i = 0; i < lanes; ++i) {
      const PackedLane& packed = packed_[i];
      if (packed.slots > 0) {
        packed_lanes_[kept] = packed_lanes_[i];
        packed_[kept++] = packed;
        continue;
      }
      add_plain(packed, *packed_lanes_[i], batch);
    }
    batch.describe(q, out.as<float>(), keep_, stream);
    batch.attend(q, out.as<float>(), scale, stream);
  }
  key_basis_.change_queries(layer, q, stream);
  run_packed(std::span(packed_).first(kept), layer, q, out.as<float>(), scale, stream);
  if (keep_) describe_rings(layer, stream);
}

/// Appends a row to the lanes of generated rows [first, last) and describes them. Returns how many
/// hold plain rows only.
size_t PolicyCache::describe_lanes(size_t first, size_t last, int layer, const float* q,
                                   float* out) {
  const auto queries = static_cast<size_t>(shape_.q_per_kv());
  const size_t row_elements = static_cast<size_t>(shape_.q_heads) * dim();
  SlotRun* runs = runs_.data() + first * heads() * kRunsPerLane;
  size_t plain = 0;
  for (size_t i = first; i < last; ++i) {
    const Generated& generated = generated_[i];
    LayerState& state = generated.sequence->layers[static_cast<size_t>(layer)];
    append_row(state, layer, kTextRow, i * heads());
    const size_t room = queries * static_cast<size_t>(generated.sequence->size.max_rows);
    for (size_t head = 0; head < heads(); ++head) {
      prefetch_generated(i, last, layer, head);
      const size_t index = i * heads() + head;
      PackedLane& packed = packed_[index];
      const size_t at = static_cast<size_t>(generated.row) * row_elements + head * queries * dim();
      packed.q = q + at;
      packed.out = out + at;
      packed.weights = generated.weights + head * room;
      runs += describe_lane(state.heads[head], layer, index, runs);
      if (packed.slots == 0) ++plain;
    }
  }
  return plain;
}

/// A lane of full rows only: a ring's may lie in two runs.
void PolicyCache::add_plain(const PackedLane& packed, const HeadState& lane,
                            RowBatch& batch) const {
  std::array<KeyValueRows, 2 * kStores> rows;
  size_t count = 0;
  for (const StorePlanes& planes : lane.stores) {
    const int full = planes.keys.full();
    const int first = planes.keys.full_before_wrap();
    for (const auto& [begin, size] : {std::pair(0, first), std::pair(first, full - first)}) {
      if (size == 0) continue;
      rows[count++] = {planes.keys.full_row(begin), planes.values.full_row(begin), parts_.rows,
                       size};
    }
  }
  batch.add(packed.q, std::span(rows).first(count), packed.out);
}

/// Fetches what a kv_head of the next few generated rows before `last` will need, each step of the
/// way one row earlier.
void PolicyCache::prefetch_generated(size_t i, size_t last, int layer, size_t head) const noexcept {
  const auto state = [&](size_t ahead) -> const LayerState* {
    if (i + ahead >= last) return nullptr;
    return &generated_[i + ahead].sequence->layers[static_cast<size_t>(layer)];
  };
  const auto for_planes = [&](const LayerState& of, const auto& body) {
    for (size_t store = first_store(); store < kStores; ++store) {
      body(of.heads[head].stores[store].keys);
      body(of.heads[head].stores[store].values);
    }
  };
  if (const LayerState* far = state(3)) __builtin_prefetch(far);
  if (const LayerState* next = state(2)) {
    for_planes(*next, [](const Plane& plane) { plane.prefetch(); });
  }
  if (const LayerState* near = state(1)) {
    for_planes(*near, [](const Plane& plane) { plane.prefetch_blocks(); });
  }
}

/// Nothing is packed, and nobody asks for weights. Planes that are empty whatever happens are not
/// looked at: each costs a miss.
bool PolicyCache::is_plain(const HeadState& lane, int layer) const noexcept {
  return lane.weights == nullptr &&
         (!parts_.split || lane.stores[kVisual].full_alike(/*protects=*/false)) &&
         lane.stores[kRest].full_alike(plan_of(layer).protects);
}

/// What packed attention has to know of lane number `index`; 0 slots if it holds plain rows only.
/// Returns how many runs it has put to `memory`.
size_t PolicyCache::describe_lane(HeadState& lane, int layer, size_t index, SlotRun* memory) {
  PackedLane& packed = packed_[index];
  packed_lanes_[index] = &lane;
  const StorePlanes& visual = lane.stores[kVisual];
  const StorePlanes& rest = lane.stores[kRest];
  const bool protects = plan_of(layer).protects;
  const bool plain = is_plain(lane, layer);
  packed.slots = 0;
  packed.guarded_remaps = 0;
  packed.weights_wanted = lane.weights != nullptr;
  if (plain) return 0;
  RunList runs(memory);
  for (size_t store = first_store(); store < kStores; ++store) {
    packed.slots += lane.stores[store].keys.slots();
    add_key_runs(lane, store, layer, index, runs);
  }
  packed.keys = runs.from(0);
  if (parts_.split) visual.values.add_runs(runs);
  if (protects) {
    ProtectedValues::add_runs(lane, runs);
  } else {
    rest.values.add_runs(runs, will_slide(rest.values, Part::kValues, layer));
  }
  assert(static_cast<size_t>(runs.size()) <= kRunsPerLane);
  packed.values = runs.from(static_cast<int>(packed.keys.size()));
  ScoreRemap* remaps = remaps_.data() + index * remaps_per_lane_;
  packed.remaps = {remaps, make_remaps(visual, layer, remaps)};
  return static_cast<size_t>(runs.size());
}

/// The keys of a store, with the queries in their basis.
void PolicyCache::add_key_runs(const HeadState& lane, size_t store, int layer, size_t index,
                               RunList& runs) {
  const Plane& keys = lane.stores[store].keys;
  const int first = runs.size();
  keys.add_runs(runs, store == kRest && will_slide(keys, Part::kKeys, layer));
  if (!plan_of(layer).has_key_basis || keys.packed() == 0) return;
  const float* queries =
      key_basis_.add_queries(layer, store, index, packed_[index].q, lane.facts[store]);
  if (queries == nullptr) return;
  for (int i = first; i < runs.size(); ++i) {
    if (runs[i].format != nullptr) runs[i].q = queries;
  }
}

/// CalibQuant's remap of visual scores: over all of them, or picture by picture. Returns how many
/// it has put to `remaps`, remaps_per_lane_ at most.
size_t PolicyCache::make_remaps(const StorePlanes& visual, int layer, ScoreRemap* remaps) const {
  const Quantizer* quantizer = layouts_.quantizer(kVisual, layer);
  if (quantizer == nullptr || visual.keys.packed() == 0) return 0;
  const RemapRule* rule = quantizer->remap(layer);
  if (rule == nullptr) return 0;
  ScoreRemap remap;
  remap.tau_low = rule->tau_low;
  remap.tau_high = rule->tau_high;
  remap.guarded = rule->guarded;
  if (!quantizer->per_image()) {
    remap.slots = visual.keys.packed();
    *remaps = remap;
    return 1;
  }
  size_t count = 0;
  for (const PackedBlock& block : visual.keys.blocks()) {
    remap.slots = block.live_rows;
    remaps[count++] = remap;
    remap.first += block.live_rows;
  }
  assert(count <= remaps_per_lane_);
  return count;
}

void PolicyCache::run_packed(std::span<PackedLane> lanes, int layer, const float* q, float* out,
                             float scale, Stream& stream) {
  if (lanes.empty()) return;
  PackedBatch& batch = batches_[static_cast<size_t>(layer)];
  batch.describe(lanes, shape_.q_per_kv(), shape_.head_dim, q, out, keep_, stream);
  batch.attend(q, out, scale, stream);
  if (!layouts_.keeps_weights()) return;
  slot_sums_.clear();
  for (size_t i = 0; i < lanes.size(); ++i) {
    const HeadState& lane = *packed_lanes_[i];
    if (lane.weights == nullptr) continue;
    slot_sums_.push_back({lanes[i].weights, lane.weights, lanes[i].slots, lanes[i].slots - 1});
  }
  add_slot_weights(slot_sums_, shape_.q_per_kv(), stream);
}

/// What follows the attention of generated rows in every layer: windows that are full are flushed,
/// then slots are dropped. Layers that share codes find them by the blocks of the other layer,
/// which therefore come in all layers before any goes.
void PolicyCache::settle(Stream& stream) {
  settling_.clear();
  for (const StepRows& rows : step_) {
    if (!rows.prompt) settling_.push_back(&at(rows.sequence));
  }
  for (int layer = 0; layer < shape_.layers; ++layer)
    window_packer_.flush(settling_, layer, stream);
  if (parts_.retention == nullptr || settling_.empty()) return;
  if (layouts_.keeps_weights()) collect_weights(settling_, 0, shape_.layers, stream);
  for (Sequence* sequence : settling_) {
    const int step = sequence->rows + 1 - sequence->prompt_rows;
    for (int layer = 0; layer < shape_.layers; ++layer) evict(*sequence, layer, step, stream);
    if (gaps_.size() < kGapsTogether && sequence != settling_.back()) continue;
    close_gaps(gaps_, stream);
    gaps_.clear();
  }
}

/// The same of one layer, after row number `newer` of a later prompt.
void PolicyCache::evict_layer(Sequence& sequence, int layer, int newer, Stream& stream) {
  Sequence* const self = &sequence;
  if (layouts_.keeps_weights()) collect_weights({&self, 1}, layer, layer + 1, stream);
  evict(sequence, layer, sequence.rows + newer - sequence.prompt_rows, stream);
  close_gaps(gaps_, stream);
  gaps_.clear();
}

std::vector<HeadRows> PolicyCache::inspect(SequenceId id, int layer, Stream& stream) {
  Sequence& sequence = at(id);
  catch_up(sequence);
  std::vector<HeadState> lanes = sequence.layers[static_cast<size_t>(layer)].heads;
  size_t elements = 0;
  for (HeadState& lane : lanes) {
    if (holds_uncounted_row(id, layer)) show_newest(lane);
    elements += 2 * static_cast<size_t>(lane.slots()) * dim();
  }
  inspected_.grow(elements);
  float* to = inspected_.data();
  for (const HeadState& lane : lanes) {
    const size_t rows = static_cast<size_t>(lane.slots()) * dim();
    unpacker_.unpack_head(lane, layer, to, to + rows, stream);
    to += 2 * rows;
  }
  if (inspected_rows_.size() < elements) inspected_rows_.resize(elements);
  const Shape shape{static_cast<int64_t>(elements)};
  copy(TensorView(inspected_rows_.data(), DType::kF32, shape),
       ConstTensorView(inspected_.data(), DType::kF32, shape, arena_.device()), stream);
  std::vector<HeadRows> found;
  auto from = inspected_rows_.cbegin();
  for (const HeadState& lane : lanes) {
    const auto slots = static_cast<size_t>(lane.slots());
    const auto count = static_cast<std::ptrdiff_t>(slots * dim());
    HeadRows& rows = found.emplace_back();
    rows.keys.assign(from, from + count);
    rows.values.assign(from + count, from + 2 * count);
    from += 2 * count;
    rows.tags = parts_.retention != nullptr ? lane.tags : sequence.modality;
    rows.tags.resize(slots, kTextRow);
    std::stable_partition(rows.tags.begin(), rows.tags.end(),
                          [&](int16_t tag) { return store_of(tag) == kVisual; });
    rows.remaps.resize(remaps_per_lane_);
    rows.remaps.resize(make_remaps(lane.stores[kVisual], layer, rows.remaps.data()));
  }
  return found;
}

/// Whether the rule is asked for a slot of this lane: the others follow.
bool PolicyCache::chooses(int layer, size_t head) const noexcept {
  if (head > 0) return layouts_.per_head();
  return parts_.pairs.empty() || parts_.pairs[static_cast<size_t>(layer)] == layer;
}

/// Fetches the summed weights of layers [first, last) that evict() will ask for, in its order: of a
/// kv_head, or their mean over the kv_heads of a layer, or of all layers of a pair.
void PolicyCache::collect_weights(std::span<Sequence* const> sequences, int first, int last,
                                  Stream& stream) {
  weight_lists_.clear();
  weight_means_.clear();
  size_t floats = 0;
  const auto add = [&](const LayerState& state, size_t head) {
    weight_lists_.push_back(state.heads[head].weights);
    ++weight_means_.back().arrays;
  };
  for (const Sequence* sequence : sequences) {
    for (int layer = first; layer < last; ++layer) {
      const LayerState& state = sequence->layers[static_cast<size_t>(layer)];
      for (size_t head = 0; head < heads(); ++head) {
        if (!chooses(layer, head)) continue;
        const int slots = state.heads[head].slots();
        weight_means_.push_back(
            {static_cast<int>(weight_lists_.size()), 0, slots, mean_weights_.data() + floats});
        floats += static_cast<size_t>(slots);
        if (layouts_.per_head()) {
          add(state, head);
          continue;
        }
        for (size_t other = 0; other < sequence->layers.size(); ++other) {
          const int pair = parts_.pairs.empty() ? static_cast<int>(other) : parts_.pairs[other];
          for (size_t h = 0; h < heads() && pair == layer; ++h) add(sequence->layers[other], h);
        }
      }
    }
  }
  mean_arrays(weight_lists_, weight_means_, stream);
  const Shape shape{static_cast<int64_t>(floats)};
  assert(floats <= host_weights_.size());
  copy(TensorView(host_weights_.data(), DType::kF32, shape),
       ConstTensorView(mean_weights_.data(), DType::kF32, shape, arena_.device()), stream);
  weights_read_ = 0;
}

/// The next of the collected weights, in the order of the tokens.
std::span<const float> PolicyCache::next_weights(const HeadState& lane) noexcept {
  const auto n = static_cast<size_t>(lane.slots());
  const std::span<const float> weights = std::span(host_weights_).subspan(weights_read_, n);
  weights_read_ += n;
  if (!parts_.split) return weights;
  std::array<size_t, kStores> next{0, static_cast<size_t>(lane.stores[kVisual].keys.slots())};
  for (size_t i = 0; i < n; ++i) slot_weights_[i] = weights[next[store_of(lane.tags[i])]++];
  return std::span(slot_weights_).first(n);
}

void PolicyCache::copy_to_arena(std::byte* to, const void* from, size_t bytes, Stream& stream) {
  static_assert(sizeof(uint64_t) % sizeof(float) == 0);
  const Shape shape{static_cast<int64_t>(bytes / sizeof(float))};
  copy(TensorView(to, DType::kF32, shape, arena_.device()),
       ConstTensorView(from, DType::kF32, shape), stream);
}

/// Drops the slot that the rule names, if any. Layers of one pair drop the slot of their first.
void PolicyCache::evict(Sequence& sequence, int layer, int step, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const bool paired = !parts_.pairs.empty();
  const int pair = paired ? parts_.pairs[static_cast<size_t>(layer)] : layer;
  DecodeView view;
  view.layer = layer;
  view.prompt_rows = sequence.prompt_rows;
  view.step = step;
  view.kept = state.kept;
  view.forget = state.forget;
  int slot = -1;
  int packed_value = -1;
  for (size_t head = 0; head < heads(); ++head) {
    HeadState& lane = state.heads[head];
    view.rows = lane.slots();
    if (head == 0 && pair != layer) {
      slot = dropped_[static_cast<size_t>(pair)];
    } else if (chooses(layer, head)) {
      if (lane.weights != nullptr) view.weights = next_weights(lane);
      view.scores = lane.scores;
      slot = parts_.retention->evict(view);
      if (head == 0 && paired) dropped_[static_cast<size_t>(layer)] = slot;
      if (slot < 0) continue;
      if (head == 0 && parts_.retention->rerotates()) {
        turn_sinks(state, state.sink_rows == 0 ? slot : state.sink_rows, 1, stream);
      }
    }
    if (slot < 0) return;
    packed_value = evict_slot(state, lane, slot);
    if (packed_value >= 0 && layouts_.per_head()) {
      ProtectedValues::erase(lane, packed_value);
    }
  }
  if (packed_value >= 0 && !layouts_.per_head()) {
    HeadState& lane = state.heads[0];
    ProtectedValues::erase(lane, packed_value);
  }
}

/// Drops a slot, counted in the order of the tokens. Returns which packed value of kRest it was, if
/// values lie on two planes, else -1.
int PolicyCache::evict_slot(LayerState& state, HeadState& lane, int slot) noexcept {
  const size_t store = store_of(lane.tags[static_cast<size_t>(slot)]);
  int at = slot;
  if (parts_.split) {
    at = static_cast<int>(std::count_if(lane.tags.begin(), lane.tags.begin() + slot,
                                        [&](int16_t tag) { return store_of(tag) == store; }));
  }
  lane.tags.erase(lane.tags.begin() + slot);
  if (static_cast<size_t>(slot) < lane.scores.size()) {
    lane.scores.erase(lane.scores.begin() + slot);
  }
  StorePlanes& planes = lane.stores[store];
  if (lane.weights != nullptr) {
    const int before = store == kRest ? lane.stores[kVisual].keys.slots() : 0;
    gaps_.push_back({reinterpret_cast<std::byte*>(lane.weights), sizeof(float), lane.slots(), 0,
                     lane.slots(), before + at, /*from_front=*/false});
  }
  const auto evict_from = [&](Plane& plane, int row) {
    state.plane_bytes -= plane.bytes();
    const RowGap gap = plane.evict(row);
    state.plane_bytes += plane.bytes();
    if (gap.ring != nullptr) gaps_.push_back(gap);
  };
  evict_from(planes.keys, at);
  if (store == kRest) return ProtectedValues::evict(lane, at, evict_from);
  evict_from(planes.values, at);
  return -1;
}

/// Turns the keys of the first `sinks` slots by further `by` positions, so that they stay next to
/// rows that keep their rotation while rows between are dropped (specs 9.2, rerotate).
void PolicyCache::turn_sinks(LayerState& state, int sinks, int by, Stream& stream) {
  const auto for_rows = [&](const auto& body) {
    size_t at = 0;
    for (HeadState& lane : state.heads) {
      for (int row = 0; row < state.sink_rows; ++row) {
        body(lane.stores[kRest].keys.full_row(row), at++ * dim());
      }
    }
  };
  if (state.sink_rows == 0) {
    state.sink_rows = sinks;
    state.sinks =
        Buffer(arena_.device(), heads() * static_cast<size_t>(sinks) * dim() * sizeof(float));
    row_sources_.clear();
    for_rows([&](std::byte* key, size_t) { row_sources_.push_back(key); });
    widen_rows(row_sources_, parts_.rows, shape_.head_dim,
               reinterpret_cast<float*>(state.sinks.data()), stream);
  }
  state.turned += by;
  turned_.clear();
  for_rows([&](std::byte* key, size_t at) {
    turned_.push_back({reinterpret_cast<const float*>(state.sinks.data()) + at, key});
  });
  turn_rows(turned_, parts_.rows, shape_.rope_frequencies, state.turned, stream);
}

}  // namespace kvlm
