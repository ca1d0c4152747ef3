// A first prompt. attend() computes attention layer by layer and stages keys and values unpacked.
// finish() ends the prompt for some layers: evicted tokens are merged into those that
// PromptSelector keeps, which are packed and written to their final address.
#include "kvcache/engine/prompt_stage.h"

#include <algorithm>
#include <utility>

#include "kernels/attention.h"
#include "kernels/merge_rows.h"
#include "kernels/row_moves.h"

namespace kvlm {

namespace {

/// The tokens that a KV head keeps.
const std::vector<int32_t>& slots_of(const LayerSelection& selection, size_t head) {
  return selection.slots[selection.slots.size() > 1 ? head : 0];
}

}  // namespace

PromptStage::PromptStage(const CacheTraits& traits, const Placement& placement,
                         PromptPacker& packer, DecodeWeights& weights, SinkRotation& sinks)
    : traits_(traits),
      placement_(placement),
      packer_(packer),
      selector_(traits),
      weights_(weights),
      sinks_(sinks),
      destinations_(traits.kv_heads()),
      floats_(traits.device()) {}

void PromptStage::attend(Sequence& sequence, const StepRows& rows, int layer, const QkvRows& x,
                         const QkvRows& stored, TensorView out, float scale, Stream& stream) {
  if (!traits_.layouts().stages()) placement_.place_rows(sequence, layer);
  past_.clear();
  for (size_t h = 0; h < traits_.kv_heads() && sequence.prompt.staged > 0; ++h) {
    past_.push_back({staged_rows(sequence, layer, KvSide::kKeys, h),
                     staged_rows(sequence, layer, KvSide::kValues, h), traits_.plan().rows,
                     sequence.prompt.staged});
  }
  stage(sequence, layer, KvSide::kKeys, stored.k, stream);
  stage(sequence, layer, KvSide::kValues, stored.v, stream);
  // Before attention, whose output may overwrite the queries.
  if (selector_.scores()) {
    selector_.score(sequence, rows, layer, stored_sides(sequence, rows, layer), x.q, scale, stream);
  }
  if (selector_.measures()) {
    selector_.attend(sequence, layer, x, past_, out, scale, stream);
  } else if (!x.q.empty()) {
    attention(out, x.q, x.k, x.v, past_, /*causal=*/true, scale, traits_.shape().multiply, stream);
  }
}

bool PromptStage::ends_group(const StepRows& rows, int layer) const noexcept {
  const Layouts& layouts = traits_.layouts();
  if (!rows.ends_prompt || !layouts.stages() || layouts.joint()) return false;
  return (layer + 1) % selector_.group_layers() == 0 || layer + 1 == traits_.shape().layers;
}

void PromptStage::finish_group(Sequence& sequence, const StepRows& rows, int layer,
                               Stream& stream) {
  sequence.prompt_rows = sequence.prompt.staged + rows.rows;
  const int group = selector_.group_layers();
  const int begin = layer - layer % group;
  const int end = layer + 1;
  const bool behind = selector_.selects_behind();
  selector_.read_back(sequence, begin, end, stream);
  if (behind && begin > 0) finish(sequence, begin - group, begin, stream);
  if (!behind || end == traits_.shape().layers) finish(sequence, begin, end, stream);
}

bool PromptStage::end(Sequence& sequence, const StepRows& rows, Stream& stream) {
  sequence.prompt.staged += rows.rows;
  if (!traits_.layouts().stages()) count_rows(sequence, rows.rows);
  if (!rows.ends_prompt) return false;
  sequence.prompt_rows = sequence.prompt.staged;
  if (traits_.layouts().joint()) {
    selector_.read_back(sequence, 0, traits_.shape().layers, stream);
    finish(sequence, 0, traits_.shape().layers, stream);
  }
  sequence.prompted = true;
  selector_.keep_memory(sequence.prompt);
  sequence.prompt = {};
  if (traits_.retention() != nullptr) sequence.modality = {};
  return true;
}

/// Counts tokens that were stored at their final address, complete in every layer.
void PromptStage::count_rows(Sequence& sequence, int rows) {
  for (LayerState& state : sequence.layers) {
    state.kept = sequence.prompt.staged;
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      state.counts[h][kRest] = sequence.prompt.staged;
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        state.heads[h].buffer(kRest, side).ring.push(rows);
      }
    }
  }
}

/// Address of a KV head's first staged token.
std::byte* PromptStage::staged_rows(const Sequence& sequence, int layer, KvSide side,
                                    size_t head) const {
  if (!traits_.layouts().stages()) {
    return sequence.layers[static_cast<size_t>(layer)].heads[head].buffer(kRest, side).ring.begin();
  }
  const size_t heads = traits_.kv_heads();
  const size_t index =
      (2 * traits_.layouts().staged_index(layer) + static_cast<size_t>(side)) * heads + head;
  return sequence.prompt.staging.data() +
         index * static_cast<size_t>(sequence.size.prompt_rows) * traits_.row_bytes();
}

void PromptStage::stage(Sequence& sequence, int layer, KvSide side, ConstTensorView x,
                        Stream& stream) {
  const size_t before = static_cast<size_t>(sequence.prompt.staged) * traits_.row_bytes();
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    destinations_[h].data = staged_rows(sequence, layer, side, h) + before;
  }
  store_rows(destinations_, traits_.plan().rows, x, stream);
}

/// The stored prompt tokens of a layer, including this pass.
StoredSides PromptStage::stored_sides(const Sequence& sequence, const StepRows& rows,
                                      int layer) const {
  StoredSides stored;
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      stored[static_cast<size_t>(side)].push_back({staged_rows(sequence, layer, side, h),
                                                   traits_.plan().rows,
                                                   sequence.prompt.staged + rows.rows});
    }
  }
  return stored;
}

/// Ends the prompt for layers begin..end, packing a few layers at a time.
void PromptStage::finish(Sequence& sequence, int begin, int end, Stream& stream) {
  const std::vector<LayerSelection> selections = selector_.select(sequence, begin, end, stream);
  std::vector<KeptLayer> kept(selections.size());
  stream.pool().parallel_for(kept.size(), [&](size_t i, int) {
    kept[i] = keep(sequence, begin + static_cast<int>(i), selections[i]);
  });
  const std::span<const KeptLayer> layers(kept);
  for (size_t first = 0; first < layers.size(); first += Layouts::kPackedTogether) {
    const size_t count = std::min<size_t>(Layouts::kPackedTogether, layers.size() - first);
    finish_layers(sequence, layers.subspan(first, count), stream);
  }
}

void PromptStage::finish_layers(Sequence& sequence, std::span<const KeptLayer> layers,
                                Stream& stream) {
  for (const KeptLayer& kept : layers) {
    place(sequence, kept);
    merge_dropped(sequence, kept.layer, *kept.selection, stream);
    simulate(sequence, kept.layer, *kept.selection, stream);
  }
  pack_layers(sequence, layers, stream);
  listed_.clear();
  for (const KeptLayer& kept : layers) queue_full(sequence, kept);
  gather_listed(listed_, traits_.plan().rows, traits_.shape().head_dim, traits_.plan().rows,
                stream);
  for (const KeptLayer& kept : layers) {
    begin_weights(sequence, kept.layer, kept.slots, stream);
    rotate_sinks(sequence, sequence.layers[static_cast<size_t>(kept.layer)], *kept.selection,
                 stream);
  }
}

/// Sorts the kept tokens of a layer by store, and updates the layer's state.
PromptStage::KeptLayer PromptStage::keep(Sequence& sequence, int layer,
                                         const LayerSelection& selection) const {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  state.kept = selection.kept();
  state.forget = selection.forget;
  state.tail = selection.tail;
  if (sequence.size.records) state.selected = selection.slots;
  for (size_t list = 0; list < selection.scores.size(); ++list) {
    state.heads[list].scores = selection.scores[list];
  }
  KeptLayer kept;
  kept.layer = layer;
  kept.selection = &selection;
  kept.slots = sort_by_store(sequence, state, selection);
  for (size_t store = 0; store < kStores; ++store) {
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      kept.packed[store][static_cast<size_t>(side)] =
          packer_.packed_rows(store, side, layer, kept.slots[store]);
    }
  }
  return kept;
}

/// Assigns memory for the kept tokens of a layer.
void PromptStage::place(Sequence& sequence, const KeptLayer& kept) const {
  std::vector<std::array<int, kStores>> counts(traits_.kv_heads());
  for (size_t store = 0; store < kStores; ++store) {
    for (size_t h = 0; h < counts.size(); ++h) {
      counts[h][store] = static_cast<int>(kept.slots[store][h].size());
    }
  }
  placement_.place(sequence, kept.layer, counts);
}

/// The kept tokens of each KV head, by store. Also sets the KV heads' tags, if a rule needs them.
std::array<KeptSlots, kStores> PromptStage::sort_by_store(const Sequence& sequence,
                                                          LayerState& state,
                                                          const LayerSelection& selection) const {
  const size_t lists = selection.slots.size();
  std::array<KeptSlots, kStores> slots;
  slots.fill(KeptSlots(lists));
  const bool tagged = traits_.retention() != nullptr;
  const auto tag_of = [&](int32_t slot) { return sequence.modality[static_cast<size_t>(slot)]; };
  for (size_t list = 0; list < lists; ++list) {
    const std::vector<int32_t>& kept = selection.slots[list];
    std::vector<int16_t>& tags = state.heads[list].tags;
    if (tagged) tags.resize(kept.size());
    if (tagged) std::transform(kept.begin(), kept.end(), tags.begin(), tag_of);
    if (!traits_.plan().split) {
      slots[kRest].list(list) = kept;
      continue;
    }
    for (const int32_t slot : kept) {
      slots[traits_.store_of(tag_of(slot))].list(list).push_back(slot);
    }
  }
  for (size_t h = lists; tagged && h < traits_.kv_heads(); ++h) {
    state.heads[h].tags = state.heads[0].tags;
  }
  return slots;
}

/// Replaces each kept token by the mean of it and the tokens merged into it, in the storage type.
void PromptStage::merge_dropped(const Sequence& sequence, int layer,
                                const LayerSelection& selection, Stream& stream) {
  const size_t n = sequence.modality.size();
  const auto kept = static_cast<size_t>(selection.kept());
  const Retention* rule = traits_.retention();
  if (rule == nullptr || kept == n || rule->merge() == MergeRule::kNone) return;
  floats_.grow(2 * (n + kept) * traits_.dim());
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    merge_head(sequence, layer, h, selection, stream);
  }
}

void PromptStage::merge_head(const Sequence& sequence, int layer, size_t head,
                             const LayerSelection& selection, Stream& stream) {
  const std::vector<int32_t>& kept = slots_of(selection, head);
  const size_t n = sequence.modality.size();
  const int dim = traits_.shape().head_dim;
  RowMerge merge;
  float* merged = floats_.data() + 2 * n * traits_.dim();
  merge.keys = floats_.data();
  merge.values = merge.keys + n * traits_.dim();
  merge.rows = static_cast<int>(n);
  merge.dim = dim;
  merge.kept = kept;
  merge.lone_first = selection.lone_first;
  merge.lone_last = selection.lone_last;
  merge.merged_keys = merged;
  merge.merged_values = merged + kept.size() * traits_.dim();
  sources_.clear();
  targets_.clear();
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    std::byte* staged = staged_rows(sequence, layer, side, head);
    for (size_t row = 0; row < n; ++row) sources_.push_back(staged + row * traits_.row_bytes());
    for (const int32_t row : kept) {
      targets_.push_back(staged + static_cast<size_t>(row) * traits_.row_bytes());
    }
  }
  widen_rows(sources_, traits_.plan().rows, dim, floats_.data(), stream);
  merge_rows(traits_.retention()->merge(), merge, stream);
  narrow_rows(targets_, traits_.plan().rows, dim, merged, stream);
}

/// Replaces the kept tokens of a layer by what a simulated quantizer makes of them.
void PromptStage::simulate(const Sequence& sequence, int layer, const LayerSelection& selection,
                           Stream& stream) {
  const Simulation* simulation = traits_.plan().simulation.get();
  const int n = simulation == nullptr ? 0 : selection.kept() - simulation->hold();
  if (n <= 0) return;
  std::vector<float> rows(traits_.kv_heads() * static_cast<size_t>(n) * traits_.dim());
  floats_.grow(rows.size());
  const Shape shape{static_cast<int64_t>(rows.size())};
  const TensorView on_host(rows.data(), DType::kF32, shape);
  const TensorView on_device(floats_.data(), DType::kF32, shape, traits_.device());
  for (const KvSide side : kSides) {
    sources_.clear();
    targets_.clear();
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      std::byte* staged = staged_rows(sequence, layer, side, h);
      for (const int32_t row : std::span(slots_of(selection, h)).first(static_cast<size_t>(n))) {
        targets_.push_back(staged + static_cast<size_t>(row) * traits_.row_bytes());
        sources_.push_back(targets_.back());
      }
    }
    widen_rows(sources_, traits_.plan().rows, traits_.shape().head_dim, floats_.data(), stream);
    copy(on_host, on_device, stream);
    stream.synchronize();
    simulation->round_trip(side, layer, rows, n);
    copy(on_device, on_host, stream);
    narrow_rows(targets_, traits_.plan().rows, traits_.shape().head_dim, floats_.data(), stream);
    stream.synchronize();
  }
}

/// Packs the tokens of some layers that are to be packed.
void PromptStage::pack_layers(Sequence& sequence, std::span<const KeptLayer> layers,
                              Stream& stream) {
  const std::vector<std::array<KeptRows, kStores>> rows = packed_rows(sequence, layers, stream);
  for (size_t i = 0; i < layers.size(); ++i) {
    LayerState& state = sequence.layers[static_cast<size_t>(layers[i].layer)];
    for (size_t store = 0; store < kStores; ++store) {
      packer_.pack(sequence, state, layers[i].layer, store, layers[i].slots[store], rows[i][store],
                   stream);
    }
  }
  packer_.run(stream);
}

/// The tokens that a KV head packs can be read where they are staged.
bool PromptStage::lies_packable(const KeptLayer& kept, size_t store, KvSide side,
                                size_t head) const {
  const auto count = static_cast<size_t>(kept.packed[store][static_cast<size_t>(side)][head]);
  if (count == 0) return true;
  if (packer_.wants_floats(store, side, kept.layer)) return false;
  const std::vector<int32_t>& slots = kept.slots[store][head];
  return slots[count - 1] - slots[0] + 1 == static_cast<int>(count);
}

/// The tokens that layers pack: where they are staged, or gathered in a workspace until the next
/// call.
std::vector<std::array<KeptRows, kStores>> PromptStage::packed_rows(
    const Sequence& sequence, std::span<const KeptLayer> layers, Stream& stream) {
  std::vector<std::array<KeptRows, kStores>> rows(layers.size());
  const auto for_all = [&](const auto& body) {
    for (size_t i = 0; i < layers.size(); ++i) {
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        for (size_t store = 0; store < kStores; ++store) {
          for (size_t h = 0; h < traits_.kv_heads(); ++h) body(i, store, side, h);
        }
      }
    }
  };
  size_t apart = 0;
  for_all([&](size_t i, size_t store, KvSide side, size_t h) {
    if (lies_packable(layers[i], store, side, h)) return;
    apart += static_cast<size_t>(layers[i].packed[store][static_cast<size_t>(side)][h]);
  });
  floats_.grow(apart * traits_.dim());
  listed_.clear();
  widened_.clear();
  auto* to = reinterpret_cast<std::byte*>(floats_.data());
  for_all([&](size_t i, size_t store, KvSide side, size_t h) {
    rows[i][store][static_cast<size_t>(side)].push_back(
        gather(sequence, layers[i], store, side, h, to));
  });
  const DType dtype = traits_.plan().rows;
  gather_listed(listed_, dtype, traits_.shape().head_dim, dtype, stream);
  gather_listed(widened_, dtype, traits_.shape().head_dim, DType::kF32, stream);
  return rows;
}

/// The tokens that a KV head packs. If gathered, they go to `to`, which then advances.
DenseRows PromptStage::gather(const Sequence& sequence, const KeptLayer& kept, size_t store,
                              KvSide side, size_t head, std::byte*& to) {
  const auto count = static_cast<size_t>(kept.packed[store][static_cast<size_t>(side)][head]);
  if (count == 0) return {};
  const std::vector<int32_t>& slots = kept.slots[store][head];
  const std::byte* staged = staged_rows(sequence, kept.layer, side, head);
  const DType rows = traits_.plan().rows;
  if (lies_packable(kept, store, side, head)) {
    return {staged + static_cast<size_t>(slots[0]) * traits_.row_bytes(), rows};
  }
  const bool widens = packer_.wants_floats(store, side, kept.layer);
  const DType dtype = widens ? DType::kF32 : rows;
  (widens ? widened_ : listed_).push_back({staged, to, std::span(slots).first(count)});
  return {std::exchange(to, to + count * traits_.dim() * dtype_bytes(dtype)), dtype};
}

/// Lists the kept unpacked tokens of a layer, to be copied to their rings.
void PromptStage::queue_full(Sequence& sequence, const KeptLayer& kept) {
  LayerState& state = sequence.layers[static_cast<size_t>(kept.layer)];
  for (size_t store = 0; store < kStores; ++store) {
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const auto count = static_cast<size_t>(kept.packed[store][static_cast<size_t>(side)][h]);
        const auto full = std::span(kept.slots[store][h]).subspan(count);
        if (full.empty()) continue;
        std::byte* ring =
            state.heads[h].buffer(store, side).ring.push(static_cast<int>(full.size()));
        listed_.push_back({staged_rows(sequence, kept.layer, side, h), ring, full});
      }
    }
  }
}

/// Passes the prompt's sums to a rule that continues them in decode.
void PromptStage::begin_weights(Sequence& sequence, int layer, std::span<const KeptSlots> slots,
                                Stream& stream) {
  if (!weights_.wanted()) return;
  weights_.begin(sequence.layers[static_cast<size_t>(layer)],
                 selector_.sums_of_heads(sequence, layer),
                 static_cast<size_t>(sequence.size.prompt_rows), slots, stream);
}

/// Rotates the sinks forward by the number of evicted tokens.
void PromptStage::rotate_sinks(const Sequence& sequence, LayerState& state,
                               const LayerSelection& selection, Stream& stream) {
  const auto n = static_cast<int>(sequence.modality.size());
  if (traits_.retention() == nullptr || !traits_.retention()->rerotates() || state.kept == n) {
    return;
  }
  const std::vector<int32_t>& kept = selection.slots[0];
  int sinks = 0;
  while (sinks < state.kept && kept[static_cast<size_t>(sinks)] == sinks) ++sinks;
  sinks_.rotate(state, sinks, n - state.kept, stream);
}

}  // namespace kvlm
