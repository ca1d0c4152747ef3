// What a cache of policies does with prompts: exact attention, importance, and, when the prompt has
// ended, selecting, merging and packing (specs 1.9, 10.1).
#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/column_sums.h"
#include "kernels/row_moves.h"
#include "kvcache/policy_cache.h"
#include "kvcache/retention/merge.h"

namespace kvlm {

namespace {

// Query rows that VL-Cache sums where a prompt has no text after its pictures (specs 9.7).
constexpr int kRowsWithoutVision = 32;

/// x as a row of `dtype` gives it back.
float rounded(float x, DType dtype) noexcept {
  if (dtype == DType::kF16) return to_float(to_f16(x));
  if (dtype == DType::kBF16) return to_float(to_bf16(x));
  return x;
}

std::vector<int32_t> all_rows(int n) {
  std::vector<int32_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace

std::byte* PolicyCache::staged_rows(const Sequence& sequence, int layer, Part part,
                                    size_t head) const noexcept {
  const auto plane = static_cast<size_t>(layouts_.joint() ? layer : 0) * 2 * heads() +
                     (part == Part::kKeys ? 0 : heads()) + head;
  return sequence.staging.data() +
         plane * static_cast<size_t>(sequence.size.prompt_rows) * row_bytes();
}

void PolicyCache::attend_first_prompt(Sequence& sequence, const StepRows& rows, int layer,
                                      ConstTensorView q, ConstTensorView k, ConstTensorView v,
                                      TensorView out, float scale, Stream& stream) {
  past_.clear();
  if (sequence.staged > 0) {
    for (size_t head = 0; head < heads(); ++head) {
      past_.push_back({staged_rows(sequence, layer, Part::kKeys, head),
                       staged_rows(sequence, layer, Part::kValues, head), parts_.rows,
                       sequence.staged});
    }
  }
  // Before attention: its output may take the place of the queries.
  if (parts_.retention != nullptr) measure(sequence, layer, q, k, scale, stream);
  if (!q.empty()) {
    attention(out, q, k, v, past_, /*causal=*/true, scale, shape_.multiply, stream);
  }
  for (const Part part : {Part::kKeys, Part::kValues}) {
    for (size_t head = 0; head < heads(); ++head) {
      destinations_[head].data = staged_rows(sequence, layer, part, head) +
                                 static_cast<size_t>(sequence.staged) * row_bytes();
    }
    store_rows(destinations_, parts_.rows, part == Part::kKeys ? k : v, stream);
  }
  if (rows.ends_prompt && !layouts_.joint()) {
    sequence.prompt_rows = sequence.staged + rows.rows;
    finish_layer(sequence, layer, select(sequence, layer)[0], stream);
  }
}

/// Sums the attention that the retention rule asks for over the rows of this pass.
void PolicyCache::measure(Sequence& sequence, int layer, ConstTensorView q, ConstTensorView k,
                          float scale, Stream& stream) {
  const ImportanceNeeds needs = parts_.retention->needs();
  if (needs.rows == ImportanceNeeds::Rows::kNone) return;
  const auto n = static_cast<int>(k.shape()[0]);
  const int seen = sequence.staged + n;
  int first = 0;
  if (needs.rows == ImportanceNeeds::Rows::kLast) first = std::max(0, seen - needs.last_rows);
  if (needs.rows == ImportanceNeeds::Rows::kPostVision) {
    const auto& modality = sequence.modality;
    const auto last = std::find_if(modality.rbegin(), modality.rend(),
                                   [](int16_t tag) { return tag != kTextRow; });
    first = static_cast<int>(modality.rend() - last);
    if (last == modality.rend() || first == seen) first = std::max(0, seen - kRowsWithoutVision);
  }
  if (needs.rows != ImportanceNeeds::Rows::kAll &&
      (first < sequence.staged || seen < sequence.size.prompt_rows)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} watches the last rows of a prompt, which must come in one "
                            "pass; {} of {} rows came",
                            parts_.spec, n, sequence.size.prompt_rows));
  }
  const auto prompt = static_cast<size_t>(sequence.size.prompt_rows);
  const auto layers = static_cast<size_t>(layouts_.joint() ? shape_.layers : 1);
  const auto at = static_cast<size_t>(layouts_.joint() ? layer : 0);
  sequence.importance.resize(layers * heads() * prompt);
  double* importance = sequence.importance.data() + at * heads() * prompt;
  if (!layouts_.joint()) std::fill_n(importance, heads() * prompt, 0.0);

  const auto columns = static_cast<size_t>(seen);
  std::vector<double> sums(heads() * columns);
  std::vector<double> small(needs.sparsity ? static_cast<size_t>(shape_.q_heads) : 0);
  const int64_t first_row = std::max(0, first - sequence.staged);
  column_sums({sums, small}, q, k, past_, first_row, scale, stream);
  for (size_t head = 0; head < heads(); ++head) {
    for (size_t j = 0; j < columns; ++j) {
      importance[head * prompt + j] += sums[head * columns + j];
    }
  }
  if (needs.sparsity) {
    double entries = 0;
    for (int row = first; row < seen; ++row) entries += row + 1;
    sequence.sparsity.resize(layers);
    sequence.sparsity[at] = std::accumulate(small.begin(), small.end(), 0.0) /
                            (entries * static_cast<double>(shape_.q_heads));
  }
  if (sequence.staged == 0) sequence.summed_rows[0] = first;
  sequence.summed_rows[1] = seen;
}

/// The selection of every layer (layer -1), or of one.
std::vector<LayerSelection> PolicyCache::select(const Sequence& sequence, int layer) const {
  const auto n = static_cast<int>(sequence.modality.size());
  if (parts_.retention == nullptr) {
    LayerSelection all;
    all.slots.push_back(all_rows(n));
    return {all};
  }
  PromptView view;
  view.shape = &shape_;
  view.rows = n;
  view.layer = layer;
  view.modality = sequence.modality;
  view.importance = sequence.importance;
  view.sparsity = sequence.sparsity;
  view.summed_rows = sequence.summed_rows;
  return parts_.retention->select(view, parts_.pairs);
}

void PolicyCache::finish_layer(Sequence& sequence, int layer, const LayerSelection& selection,
                               Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  state.kept = selection.kept();
  state.forget = selection.forget;
  std::array<std::vector<std::vector<int32_t>>, kStores> slots;
  for (auto& of_heads : slots) of_heads.resize(heads());
  std::vector<std::array<int, kStores>> counts(heads());
  for (size_t head = 0; head < heads(); ++head) {
    for (const int32_t slot : selection.slots[selection.slots.size() > 1 ? head : 0]) {
      const int16_t tag = sequence.modality[static_cast<size_t>(slot)];
      slots[store_of(tag)][head].push_back(slot);
      if (parts_.retention != nullptr) state.lanes[head].tags.push_back(tag);
    }
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      counts[head][store] = static_cast<int>(slots[store][head].size());
    }
  }
  place_layer(sequence, layer, counts, selection.forget);
  const auto [keys, values] = kept_rows(sequence, layer, selection, slots, stream);
  const auto n = static_cast<int>(sequence.modality.size());
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    if (layouts_.quantizer(store, layer) != nullptr &&
        layouts_.quantizer(store, layer)->visual_only()) {
      pack_once(sequence, state, layer, slots[store], keys[store], values[store], stream);
    } else {
      pack_stream(sequence, state, layer, store, slots[store], keys[store], values[store], stream);
    }
  }

  if (layouts_.keeps_weights()) {
    const auto prompt = static_cast<size_t>(sequence.size.prompt_rows);
    const auto at = static_cast<size_t>(layouts_.joint() ? layer : 0);
    for (size_t head = 0; head < heads(); ++head) {
      const double* sums = sequence.importance.data() + (at * heads() + head) * prompt;
      float* weights = state.lanes[head].weights;
      for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
        for (const int32_t slot : slots[store][head]) {
          *weights++ = static_cast<float>(sums[static_cast<size_t>(slot)]);
        }
      }
    }
  }
  if (parts_.retention != nullptr && parts_.retention->rerotates() && selection.kept() < n) {
    const std::vector<int32_t>& kept = selection.slots[0];
    int sinks = 0;
    while (sinks < state.kept && kept[static_cast<size_t>(sinks)] == sinks) ++sinks;
    turn_sinks(state, sinks, n - state.kept);
  }
}

/// The rows that a layer keeps as floats: [keys, values][store][kv_head], for the time of this
/// call's caller.
///   slots  [store][kv_head] prompt rows
std::array<std::array<PolicyCache::HeadRows, kStores>, 2> PolicyCache::kept_rows(
    const Sequence& sequence, int layer, const LayerSelection& selection,
    std::span<const std::vector<std::vector<int32_t>>> slots, Stream& stream) {
  size_t rows = 0;
  for (const auto& of_heads : slots) {
    for (const std::vector<int32_t>& of_head : of_heads) rows += 2 * of_head.size();
  }
  prompt_floats_.grow(rows * dim());
  float* to = prompt_floats_.data();
  std::array<std::array<HeadRows, kStores>, 2> kept;
  row_sources_.clear();
  for (const Part part : {Part::kKeys, Part::kValues}) {
    for (size_t store = 0; store < kStores; ++store) {
      for (size_t head = 0; head < heads(); ++head) {
        const std::byte* staged = staged_rows(sequence, layer, part, head);
        for (const int32_t slot : slots[store][head]) {
          row_sources_.push_back(staged + static_cast<size_t>(slot) * row_bytes());
        }
        const size_t elements = slots[store][head].size() * dim();
        kept[static_cast<size_t>(part)][store].emplace_back(to, elements);
        to += elements;
      }
    }
  }
  const auto n = static_cast<int>(sequence.modality.size());
  const bool merges = parts_.retention != nullptr &&
                      parts_.retention->merge() != MergeRule::kNone && selection.kept() < n;
  if (!merges) {
    widen_rows(row_sources_, parts_.rows, shape_.head_dim, prompt_floats_.data(), stream);
    return kept;
  }
  for (size_t head = 0; head < heads(); ++head) {
    std::array<std::vector<float>, 2> merged;
    for (const Part part : {Part::kKeys, Part::kValues}) {
      row_sources_.clear();
      for (int row = 0; row < n; ++row) {
        row_sources_.push_back(staged_rows(sequence, layer, part, head) +
                               static_cast<size_t>(row) * row_bytes());
      }
      std::vector<float>& all = merged[static_cast<size_t>(part)];
      all.resize(static_cast<size_t>(n) * dim());
      widen_rows(row_sources_, parts_.rows, shape_.head_dim, all.data(), stream);
    }
    const std::vector<int32_t>& chosen = selection.slots[selection.slots.size() > 1 ? head : 0];
    merge_rows(parts_.retention->merge(), chosen, n, dim(), merged[0], merged[1]);
    for (size_t part = 0; part < 2; ++part) {
      std::array<float*, kStores> next{kept[part][kVisual][head].data(),
                                       kept[part][kRest][head].data()};
      for (size_t i = 0; i < chosen.size(); ++i) {
        float*& row = next[store_of(sequence.modality[static_cast<size_t>(chosen[i])])];
        // What is packed is a row as it would be stored.
        for (size_t d = 0; d < dim(); ++d) {
          *row++ = rounded(merged[part][i * dim() + d], parts_.rows);
        }
      }
    }
  }
  return kept;
}

/// Gives every plane of a layer its memory.
void PolicyCache::place_layer(Sequence& sequence, int layer,
                              std::span<const std::array<int, kStores>> counts, double forget) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int future = sequence.size.max_rows - sequence.prompt_rows;
  const int most = parts_.retention == nullptr
                       ? sequence.size.max_rows
                       : parts_.retention->peak_rows(state.kept, forget, sequence.prompt_rows,
                                                     sequence.size.max_rows);
  int ever = 0;
  for (size_t head = 0; head < heads(); ++head) {
    Lane& lane = state.lanes[head];
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const int count = counts[head][store];
      StorePlanes& planes = lane.stores[store];
      const auto place = [&](Plane& plane, Part part, const Plane::Layout& layout, int64_t rows,
                             int64_t peak, int64_t spans) {
        const PlaneCapacity capacity = layouts_.capacity(layout, 1, rows, peak, spans);
        const Plane* owner = nullptr;
        if (layout.shared) {
          const auto from = static_cast<size_t>(layouts_.owner(part, layer));
          const StorePlanes& other = sequence.layers[from].lanes[head].stores[store];
          owner = part == Part::kKeys ? &other.keys : &other.values;
        }
        plane.place(layout, capacity, sequence.memory.data() + sequence.placed, owner);
        sequence.placed += Layouts::aligned(capacity.bytes());
      };
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const Plane::Layout layout = layouts_.plane(store, part, layer);
        const int more = store == kRest || (parts_.split && !layout.once) ? future : 0;
        if (count + more == 0) continue;
        const Quantizer* quantizer = layouts_.quantizer(store, layer);
        const int spans = quantizer != nullptr && quantizer->per_image() ? std::max(count, 1) : 1;
        place(part == Part::kKeys ? planes.keys : planes.values, part, layout, count + more,
              std::min(count + more, most), std::min<int64_t>(spans, Layouts::kMaxImages));
      }
      const Plane::Layout apart = layouts_.protected_values(layer);
      if (store == kRest && apart.plan != nullptr) {
        place(planes.protected_values, Part::kValues, apart, count, 0, 1);
      }
      if (store == kRest) ever = std::max(ever, count + future);
      const Quantizer* quantizer = layouts_.quantizer(store, layer);
      if (quantizer != nullptr && quantizer->changes_basis()) {
        lane.facts[store].key_channels.reserve(dim());  // a short prompt is learned from in decode
      }
    }
    lane.tags.reserve(static_cast<size_t>(most) + 1);
  }
  std::byte* extras = sequence.memory.data() + sequence.placed;
  sequence.placed += layouts_.extra_bytes(layer, most, ever);
  assert(sequence.placed <= sequence.memory.reserved());
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    if (const Quantizer* quantizer = layouts_.quantizer(store, layer)) {
      state.masks[store] = extras;
      extras += Layouts::aligned(quantizer->facts_bytes(shape_.kv_heads));
    }
  }
  if (layouts_.protected_values(layer).plan != nullptr) {
    state.protection_bitmaps = layouts_.per_head() ? shape_.kv_heads : 1;
    const size_t bytes = Layouts::aligned(static_cast<size_t>(ever) / 8 + 8);
    for (size_t head = 0; head < heads(); ++head) {
      const size_t bitmap = layouts_.per_head() ? head : 0;
      state.lanes[head].protected_bits = reinterpret_cast<uint64_t*>(extras + bitmap * bytes);
    }
    std::fill_n(extras, static_cast<size_t>(state.protection_bitmaps) * bytes, std::byte{0});
    extras += static_cast<size_t>(state.protection_bitmaps) * bytes;
  }
  if (layouts_.keeps_weights()) {
    for (Lane& lane : state.lanes) {
      lane.weights = reinterpret_cast<float*>(extras);
      extras += Layouts::aligned(4 * static_cast<size_t>(most));
    }
  }
}

/// Packs the visual rows of a prompt, all of them.
void PolicyCache::pack_once(Sequence& sequence, LayerState& state, int layer,
                            const std::vector<std::vector<int32_t>>& slots, const HeadRows& keys,
                            const HeadRows& values, Stream& stream) {
  const Quantizer* quantizer = layouts_.quantizer(kVisual, layer);
  for (const Part part : {Part::kKeys, Part::kValues}) {
    for (size_t head = 0; head < heads(); ++head) {
      if (slots[head].empty()) continue;
      StorePlanes& planes = state.lanes[head].stores[kVisual];
      Plane& plane = part == Part::kKeys ? planes.keys : planes.values;
      const float* x = (part == Part::kKeys ? keys : values)[head].data();
      // One block for all pictures, or one for each.
      for (size_t first = 0; first < slots[head].size();) {
        size_t end = slots[head].size();
        if (quantizer->per_image()) {
          const auto image = [&](size_t i) {
            return sequence.modality[static_cast<size_t>(slots[head][i])];
          };
          end = first + 1;
          while (end < slots[head].size() && image(end) == image(first)) ++end;
        }
        add_jobs(plane, x + first * dim(), static_cast<int>(end - first));
        first = end;
      }
    }
    run_jobs(quantizer->plan(part, layer), stream);
  }
}

/// Packs the oldest rows of a store as its quantizer's flush rule says; the others stay full rows.
void PolicyCache::pack_stream(Sequence& sequence, LayerState& state, int layer, size_t store,
                              const std::vector<std::vector<int32_t>>& slots, const HeadRows& keys,
                              const HeadRows& values, Stream& stream) {
  const Quantizer* quantizer = layouts_.quantizer(store, layer);
  std::vector<int> packed_keys(heads());
  std::vector<int> packed_values(heads());
  if (quantizer != nullptr) {
    for (size_t head = 0; head < heads(); ++head) {
      const auto n = static_cast<int>(slots[head].size());
      packed_keys[head] = quantizer->plan(Part::kKeys, layer).flush.packed_after_prompt(n);
      packed_values[head] = quantizer->plan(Part::kValues, layer).flush.packed_after_prompt(n);
    }
    if (quantizer->changes_basis()) {
      const int rows = *std::min_element(packed_keys.begin(), packed_keys.end());
      for (size_t head = 0; head < heads(); ++head) pointers_[head] = keys[head].data();
      if (rows > 0) learn(*quantizer, state, store, pointers_, rows);
    }
    if (quantizer->changes_basis()) {
      basis_.grow(dim() * static_cast<size_t>(
                              std::accumulate(packed_keys.begin(), packed_keys.end(), int64_t{0})));
    }
    float* turned = basis_.data();
    for (size_t head = 0; head < heads(); ++head) {
      const float* x = keys[head].data();
      if (quantizer->changes_basis() && packed_keys[head] > 0) {
        quantizer->key_to_basis(state.lanes[head].facts[store], x, packed_keys[head], turned);
        x = turned;
        turned += static_cast<size_t>(packed_keys[head]) * dim();
      }
      add_jobs(state.lanes[head].stores[store].keys, x, packed_keys[head]);
    }
    run_jobs(quantizer->plan(Part::kKeys, layer), stream);
    pack_values(sequence, state, layer, store, slots, values, packed_values, stream);
  }
  for (size_t head = 0; head < heads(); ++head) {
    StorePlanes& planes = state.lanes[head].stores[store];
    store_full(planes.keys, keys[head], packed_keys[head], stream);
    store_full(planes.values, values[head], packed_values[head], stream);
  }
}

void PolicyCache::pack_values(Sequence& sequence, LayerState& state, int layer, size_t store,
                              const std::vector<std::vector<int32_t>>& slots,
                              const HeadRows& values, std::span<const int> packed, Stream& stream) {
  const Quantizer* quantizer = layouts_.quantizer(store, layer);
  const PartPlan* apart = store == kRest ? quantizer->protected_values() : nullptr;
  std::vector<std::vector<float>> plain(heads());
  std::vector<std::vector<float>> special(heads());
  for (size_t head = 0; head < heads(); ++head) {
    Lane& lane = state.lanes[head];
    if (apart == nullptr) {
      add_jobs(lane.stores[store].values, values[head].data(), packed[head]);
      continue;
    }
    std::vector<float> scores;
    std::vector<int16_t> modality;
    for (const int32_t slot : slots[head]) {
      scores.push_back(sequence.protection[static_cast<size_t>(slot)]);
      modality.push_back(sequence.modality[static_cast<size_t>(slot)]);
    }
    std::vector<bool> chosen(slots[head].size());
    for (const int32_t slot : quantizer->protect(scores, modality)) {
      chosen[static_cast<size_t>(slot)] = true;
    }
    for (int i = 0; i < packed[head]; ++i) {
      const auto row = static_cast<size_t>(i);
      if (chosen[row]) lane.protected_bits[row / 64] |= uint64_t{1} << (row % 64);
      std::vector<float>& rows = chosen[row] ? special[head] : plain[head];
      const auto at = static_cast<std::ptrdiff_t>(row * dim());
      rows.insert(rows.end(), values[head].begin() + at,
                  values[head].begin() + at + static_cast<std::ptrdiff_t>(dim()));
    }
    add_jobs(lane.stores[store].values, plain[head].data(),
             static_cast<int>(plain[head].size() / dim()));
  }
  run_jobs(quantizer->plan(Part::kValues, layer), stream);
  if (apart == nullptr) return;
  for (size_t head = 0; head < heads(); ++head) {
    add_jobs(state.lanes[head].stores[store].protected_values, special[head].data(),
             static_cast<int>(special[head].size() / dim()));
  }
  run_jobs(*apart, stream);
}

/// Appends rows from number `from` on as full rows.
void PolicyCache::store_full(Plane& plane, std::span<const float> rows, int from, Stream& stream) {
  row_targets_.clear();
  for (size_t row = static_cast<size_t>(from); row < rows.size() / dim(); ++row) {
    row_targets_.push_back(plane.push_row());
  }
  narrow_rows(row_targets_, parts_.rows, shape_.head_dim,
              rows.data() + static_cast<size_t>(from) * dim(), stream);
}

void PolicyCache::attend_later_prompt(Sequence& sequence, const StepRows& rows, int layer,
                                      ConstTensorView q, ConstTensorView k, ConstTensorView v,
                                      TensorView out, float scale, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  // What is stored, as floats: one layer of one sequence, for the time of this call.
  std::vector<std::vector<float>> past_keys(heads());
  std::vector<std::vector<float>> past_values(heads());
  past_.clear();
  for (size_t head = 0; head < heads(); ++head) {
    inspect(rows.sequence, layer, head, past_keys[head], past_values[head], stream);
    const auto n = static_cast<int64_t>(state.lanes[head].slots());
    past_.push_back({reinterpret_cast<const std::byte*>(past_keys[head].data()),
                     reinterpret_cast<const std::byte*>(past_values[head].data()), DType::kF32, n});
  }
  attention(out, q, k, v, past_, /*causal=*/true, scale, shape_.multiply, stream);
  std::vector<double> sums;  // (kv_heads, columns) of the new rows' attention
  size_t columns = 0;
  if (layouts_.keeps_weights()) {
    const auto past = static_cast<size_t>(state.lanes[0].slots());
    columns = past + static_cast<size_t>(rows.rows);
    sums.resize(heads() * columns);
    column_sums({sums, {}}, q, k, past_, 0, scale, stream);
    for (size_t head = 0; head < heads(); ++head) {
      for (size_t j = 0; j < past; ++j) {
        state.lanes[head].weights[j] += static_cast<float>(sums[head * columns + j]);
      }
    }
  }
  for (int row = 0; row < rows.rows; ++row) {
    const int16_t tag = rows.modality.empty() ? kTextRow : rows.modality[static_cast<size_t>(row)];
    append_row(state, tag, 0);
    store_new(k.slice(row, 1), v.slice(row, 1), 0, stream);
    for (size_t head = 0; head < heads() && columns > 0; ++head) {
      const size_t first = columns - static_cast<size_t>(rows.rows);
      newest_weight(state.lanes[head], store_of(tag)) =
          static_cast<float>(sums[head * columns + first + static_cast<size_t>(row)]);
    }
    Sequence* const self = &sequence;
    flush_full({&self, 1}, layer, stream);
    if (parts_.retention != nullptr) {
      evict(sequence, layer, sequence.rows + row + 1 - sequence.prompt_rows);
    }
  }
}

}  // namespace kvlm
