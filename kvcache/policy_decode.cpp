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
    for_sequences(generated_.size(), heads(), stream, describe);
  }
  // Rows that follow each other are stored together.
  for (size_t first = 0; first < generated_.size();) {
    size_t end = first + 1;
    while (end < generated_.size() && generated_[end].row == generated_[end - 1].row + 1) ++end;
    const auto count = static_cast<int64_t>(end - first);
    appender_.store(k.slice(generated_[first].row, count), v.slice(generated_[first].row, count),
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
    appender_.append(state, layer, kTextRow, i * heads());
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
  packed.remaps = remap_.describe(index, visual, layer);
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

void PolicyCache::run_packed(std::span<PackedLane> lanes, int layer, const float* q, float* out,
                             float scale, Stream& stream) {
  if (lanes.empty()) return;
  PackedBatch& batch = batches_[static_cast<size_t>(layer)];
  batch.describe(lanes, shape_.q_per_kv(), shape_.head_dim, q, out, keep_, stream);
  batch.attend(q, out, scale, stream);
  decode_weights_.add(lanes, packed_lanes_, stream);
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
  evictor_.evict(settling_, stream);
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
    rows.remaps = remap_.list(lane.stores[kVisual], layer);
  }
  return found;
}

}  // namespace kvlm
