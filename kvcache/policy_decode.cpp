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

namespace {

bool bit(const uint64_t* bits, int i) noexcept { return (bits[i / 64] >> (i % 64) & 1) != 0; }

/// Set bits before bit i.
int rank(const uint64_t* bits, int i) noexcept {
  int count = 0;
  for (int word = 0; word < i / 64; ++word) count += std::popcount(bits[word]);
  return count + std::popcount(bits[i / 64] & ((uint64_t{1} << (i % 64)) - 1));
}

/// Takes bit i of n out; those after it move down, and a 0 comes in at the end.
void erase_bit(uint64_t* bits, int i, int n) noexcept {
  const int last = (n - 1) / 64;
  int word = i / 64;
  const uint64_t low = (uint64_t{1} << (i % 64)) - 1;
  bits[word] = (bits[word] & low) | (bits[word] >> 1 & ~low);
  for (; word < last; ++word) {
    bits[word] |= bits[word + 1] << 63;
    bits[word + 1] >>= 1;
  }
}

}  // namespace

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
      const Plane& plane = plane_of(lane, window.store, window.part);
      if (plane.full() >= window.plan->flush.trigger) ++due(state, window);
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
  for (std::vector<BasisJob>& jobs : query_jobs_[static_cast<size_t>(layer)]) jobs.clear();
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
  turn_queries(layer, q, stream);
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
    add_value_runs(lane, runs);
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
  const Quantizer* packer = layouts_.quantizer(store, layer);
  if (packer == nullptr || packer->key_basis() == nullptr) return;
  const size_t elements = static_cast<size_t>(shape_.q_per_kv()) * dim();
  float* turned = queries_.data() + queries_copied_ + (kStores * index + store) * elements;
  query_jobs_[static_cast<size_t>(layer)][store].push_back(
      {packed_[index].q, turned, shape_.q_per_kv(), lane.facts[store].key_channels.data()});
  for (int i = first; i < runs.size(); ++i) {
    if (runs[i].format != nullptr) runs[i].q = turned;
  }
}

/// The values of kRest, of which protected ones lie apart.
void PolicyCache::add_value_runs(const HeadState& lane, RunList& runs) const {
  const StorePlanes& rest = lane.stores[kRest];
  const int first = runs.size();
  rest.values.add_runs(runs);
  if (rest.protected_values.packed() == 0) return;
  SlotRun apart;
  apart.slots = rest.protected_values.packed();
  apart.format = &rest.protected_values.layout().plan->format;
  apart.blocks = rest.protected_values.blocks();
  apart.selection = lane.protected_bits;
  apart.selected_bit = true;
  apart.selected_of = lane.packed_values();
  apart.selection_ends = true;
  if (rest.values.packed() == 0) return runs.insert(first, apart);
  SlotRun& others = runs[first];
  others.selection = lane.protected_bits;
  others.selected_of = apart.selected_of;
  runs.insert(first + 1, apart);
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
  for (int layer = 0; layer < shape_.layers; ++layer) flush_full(settling_, layer, stream);
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

/// Packs the oldest rows of a layer's planes whose windows are full, after a row was appended.
void PolicyCache::flush_full(std::span<Sequence* const> sequences, int layer, Stream& stream) {
  for (const Window& window : plan_of(layer).windows) {
    flushed_.clear();
    for (size_t i = 0; i < sequences.size(); ++i) {
      constexpr size_t kAhead = 8;
      if (i + kAhead < sequences.size()) {
        __builtin_prefetch(&sequences[i + kAhead]->layers[static_cast<size_t>(layer)]);
      }
      LayerState& state = sequences[i]->layers[static_cast<size_t>(layer)];
      if (due(state, window) > 0) flushed_.push_back({&state});
    }
    if (!window.anew) {
      flush(window, stream);
      continue;
    }
    for (const Flushed& flushed : flushed_) flush_anew(*flushed.state, layer, window, stream);
  }
}

int& PolicyCache::due(LayerState& state, const Window& window) noexcept {
  return state.due[window.store][window.part == Part::kKeys ? 0 : 1];
}

Plane& PolicyCache::plane_of(HeadState& lane, size_t store, Part part) noexcept {
  StorePlanes& planes = lane.stores[store];
  return part == Part::kKeys ? planes.keys : planes.values;
}

/// Packs the oldest rows of every plane of flushed_ whose window is full, as many at once as there
/// is room for.
void PolicyCache::flush(const Window& window, Stream& stream) {
  const auto added = static_cast<size_t>(window.plan->flush.rows);
  for (size_t first = 0; first < flushed_.size();) {
    size_t rows = 0;
    size_t end = first;
    for (; end < flushed_.size(); ++end) {
      const size_t more = static_cast<size_t>(due(*flushed_[end].state, window)) * added;
      if (rows + more > flush_jobs_.size()) break;
      flushed_[end].row = rows;
      rows += more;
    }
    assert(end > first);
    flush_some(std::span(flushed_).subspan(first, end - first), rows, window, stream);
    first = end;
  }
}

void PolicyCache::flush_some(std::span<Flushed> some, size_t rows, const Window& window,
                             Stream& stream) {
  row_sources_.resize(rows);
  for_sequences(some.size(), stream, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) take_rows(some.subspan(i, end - i), window);
  });
  size_t jobs = 0;
  for (const Flushed& flushed : some) {  // a job may be many rows
    if (jobs < flushed.row) {
      std::copy_n(flush_jobs_.data() + flushed.row, flushed.jobs, flush_jobs_.data() + jobs);
    }
    jobs += flushed.jobs;
  }
  widen_rows(row_sources_, parts_.rows, shape_.head_dim, floats_.data(), stream);
  pack(window.plan->format, window.plan->rules, std::span(flush_jobs_).first(jobs), stream);
}

/// Moves the oldest rows of full windows of the first of `next` to packed blocks: lists the rows
/// and the jobs that will do it.
void PolicyCache::take_rows(std::span<Flushed> next, const Window& window) {
  Flushed& flushed = next[0];
  const int added = window.plan->flush.rows;
  const std::byte** source = row_sources_.data() + flushed.row;
  const float* x = floats_.data() + flushed.row * dim();
  PackJob* job = flush_jobs_.data() + flushed.row;
  for (size_t head = 0; head < heads(); ++head) {
    const auto ahead = [&](size_t sequences) -> const Plane& {
      return plane_of(next[sequences].state->heads[head], window.store, window.part);
    };
    if (next.size() > 2) ahead(2).prefetch();
    if (next.size() > 1) ahead(1).prefetch_newest_block();
    Plane& plane = plane_of(flushed.state->heads[head], window.store, window.part);
    if (plane.full() < window.plan->flush.trigger) continue;
    flushed.state->plane_bytes -= plane.bytes();
    for (int row = 0; row < added; ++row) *source++ = plane.full_row(row);
    for_jobs(plane, x, added, [&](const PackJob& made) { *job++ = made; });
    plane.pop_rows(added);
    flushed.state->plane_bytes += plane.bytes();
    x += static_cast<size_t>(added) * dim();
  }
  flushed.jobs = static_cast<size_t>(job - flush_jobs_.data()) - flushed.row;
}

/// The same of one sequence, for a quantizer that packs old rows again or turns keys.
void PolicyCache::flush_anew(LayerState& state, int layer, const Window& window, Stream& stream) {
  const size_t store = window.store;
  const Part part = window.part;
  const PartPlan& plan = *window.plan;
  const Quantizer& quantizer = *layouts_.quantizer(store, layer);
  const auto due = [&](HeadState& lane) {
    return plane_of(lane, store, part).full() >= plan.flush.trigger;
  };
  const bool repacks = quantizer.repacks(part);
  const KeyBasis* basis = part == Part::kKeys ? quantizer.key_basis() : nullptr;
  const auto added = static_cast<size_t>(plan.flush.rows);
  // Rows of every lane as floats, in the model's basis: old ones first if they are packed again.
  float* x = floats_.data();
  size_t rows = added;
  row_sources_.clear();
  for (size_t head = 0; head < heads(); ++head) {
    Plane& plane = plane_of(state.heads[head], store, part);
    pointers_[head] = x;
    if (!due(state.heads[head])) continue;
    state.plane_bytes -= plane.bytes();
    if (repacks) {
      unpack_packed(plane, state.heads[head].facts[store], basis, x, stream);
      rows = static_cast<size_t>(plane.packed()) + added;
      x += static_cast<size_t>(plane.packed()) * dim();
      plane.clear_packed();
    }
    for (int row = 0; row < plan.flush.rows; ++row) row_sources_.push_back(plane.full_row(row));
    if (repacks) {
      widen_rows(row_sources_, parts_.rows, shape_.head_dim, x, stream);
      row_sources_.clear();
    }
    x += added * dim();
  }
  widen_rows(row_sources_, parts_.rows, shape_.head_dim, floats_.data(), stream);
  if (basis != nullptr && (repacks || state.heads[0].facts[store].key_channels.empty())) {
    learn(quantizer, state, store, pointers_, static_cast<int>(rows), stream);
  }
  key_jobs_.clear();
  float* turned = basis_.data();
  for (size_t head = 0; head < heads(); ++head) {
    HeadState& lane = state.heads[head];
    if (!due(lane)) continue;
    const float* from = pointers_[head];
    if (basis != nullptr) {
      key_jobs_.push_back(
          {from, turned, static_cast<int>(rows), lane.facts[store].key_channels.data()});
      from = turned;
      turned += rows * dim();
    }
    add_jobs(plane_of(lane, store, part), from, static_cast<int>(rows));
  }
  if (basis != nullptr) change_basis(*basis, BasisChange::kKey, key_jobs_, stream);
  run_jobs(plan, stream);
  for (HeadState& lane : state.heads) {
    if (!due(lane)) continue;
    Plane& plane = plane_of(lane, store, part);
    plane.pop_rows(plan.flush.rows);
    state.plane_bytes += plane.bytes();
  }
}

void PolicyCache::learn(const Quantizer& quantizer, LayerState& state, size_t store,
                        std::span<const float* const> keys, int rows, Stream& stream) {
  const std::span<float> low = std::span(ends_).first(ends_.size() / 2);
  const std::span<float> high = std::span(ends_).last(ends_.size() / 2);
  channel_ends(keys, rows, shape_.head_dim, low, high, stream);
  facts_.resize(heads());
  for (size_t head = 0; head < heads(); ++head) {
    std::swap(facts_[head], state.heads[head].facts[store]);
  }
  quantizer.learn(low, high, facts_);
  for (size_t head = 0; head < heads(); ++head) {
    std::swap(facts_[head], state.heads[head].facts[store]);
  }
  state.mask_bytes[store] = quantizer.facts_bytes(shape_.kv_heads);
}

template <class Body>
void PolicyCache::for_jobs(Plane& plane, const float* x, int rows, const Body& body) {
  const int block = plane.layout().once ? rows : plane.layout().block_rows();
  while (rows > 0) {
    PackJob job = plane.push_packed(std::min(rows, block));
    job.x = x;
    body(job);
    x += static_cast<size_t>(job.rows) * dim();
    rows -= job.rows;
  }
}

void PolicyCache::add_jobs(Plane& plane, const float* x, int rows) {
  for_jobs(plane, x, rows, [&](const PackJob& job) { jobs_.push_back(job); });
}

void PolicyCache::run_jobs(const PartPlan& plan, Stream& stream) {
  if (!jobs_.empty()) pack(plan.format, plan.rules, jobs_, stream);
  jobs_.clear();
}

void PolicyCache::unpack_packed(const Plane& plane, const HeadFacts& facts, const KeyBasis* basis,
                                float* out, Stream& stream) {
  if (plane.packed() == 0) return;
  if (basis == nullptr) {
    unpack_blocks(plane.layout().plan->format, plane.blocks(), out, stream);
    return;
  }
  const auto elements = static_cast<size_t>(plane.packed()) * dim();
  basis_.grow(elements);
  unpack_blocks(plane.layout().plan->format, plane.blocks(), basis_.data(), stream);
  const BasisJob job{basis_.data(), out, plane.packed(), facts.key_channels.data()};
  change_basis(*basis, BasisChange::kBack, {&job, 1}, stream);
}

void PolicyCache::widen_full(const Plane& plane, float* out, Stream& stream) {
  row_sources_.clear();
  for (int row = 0; row < plane.full(); ++row) row_sources_.push_back(plane.full_row(row));
  widen_rows(row_sources_, parts_.rows, shape_.head_dim, out, stream);
}

void PolicyCache::unpack_keys(const HeadState& lane, size_t store, int layer, float* out,
                              Stream& stream) {
  const Plane& plane = lane.stores[store].keys;
  const Quantizer* quantizer = layouts_.quantizer(store, layer);
  const KeyBasis* basis = quantizer == nullptr ? nullptr : quantizer->key_basis();
  unpack_packed(plane, lane.facts[store], basis, out, stream);
  widen_full(plane, out + static_cast<size_t>(plane.packed()) * dim(), stream);
}

void PolicyCache::unpack_values(const HeadState& lane, size_t store, float* out, Stream& stream) {
  const StorePlanes& planes = lane.stores[store];
  const auto plain = static_cast<size_t>(planes.values.packed());
  const auto apart = static_cast<size_t>(planes.protected_values.packed());
  if (apart == 0) {
    unpack_packed(planes.values, {}, nullptr, out, stream);
  } else {
    apart_.grow((plain + apart) * dim());
    const float* from[2] = {apart_.data(), apart_.data() + plain * dim()};
    unpack_packed(planes.values, {}, nullptr, apart_.data(), stream);
    unpack_packed(planes.protected_values, {}, nullptr, apart_.data() + plain * dim(), stream);
    row_sources_.clear();
    for (int slot = 0; slot < lane.packed_values(); ++slot) {
      const float*& row = from[bit(lane.protected_bits, slot) ? 1 : 0];
      row_sources_.push_back(reinterpret_cast<const std::byte*>(row));
      row += dim();
    }
    widen_rows(row_sources_, DType::kF32, shape_.head_dim, out, stream);
  }
  widen_full(planes.values, out + (plain + apart) * dim(), stream);
}

void PolicyCache::unpack_lane(const HeadState& lane, int layer, float* keys, float* values,
                              Stream& stream) {
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    unpack_keys(lane, store, layer, keys, stream);
    unpack_values(lane, store, values, stream);
    const size_t elements = static_cast<size_t>(lane.stores[store].keys.slots()) * dim();
    keys += elements;
    values += elements;
  }
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
    unpack_lane(lane, layer, to, to + rows, stream);
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
      erase_bit(lane.protected_bits, packed_value, lane.packed_values() + 1);
    }
  }
  if (packed_value >= 0 && !layouts_.per_head()) {
    const HeadState& lane = state.heads[0];
    erase_bit(lane.protected_bits, packed_value, lane.packed_values() + 1);
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
  if (store != kRest || lane.protected_bits == nullptr) {
    evict_from(planes.values, at);
    return -1;
  }
  if (at >= lane.packed_values()) {
    evict_from(planes.values, at - planes.protected_values.packed());
    return -1;
  }
  const int before = rank(lane.protected_bits, at);
  if (bit(lane.protected_bits, at)) {
    evict_from(planes.protected_values, before);
  } else {
    evict_from(planes.values, at - before);
  }
  return at;
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
