// What a cache of policies does with prompts: exact attention, importance, and, when the prompt has
// ended, selecting, merging and packing (specs 1.9, 10.1).
#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/column_sums.h"
#include "kernels/merge_rows.h"
#include "kernels/row_moves.h"
#include "kvcache/policy_cache.h"

namespace kvlm {

namespace {

// Query rows that VL-Cache sums where a prompt has no text after its pictures (specs 9.7).
constexpr int kRowsWithoutVision = 32;

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
  return sequence.prompt.staging.data() +
         plane * static_cast<size_t>(sequence.size.prompt_rows) * row_bytes();
}

void PolicyCache::attend_first_prompt(Sequence& sequence, const StepRows& rows, int layer,
                                      ConstTensorView q, ConstTensorView k, ConstTensorView v,
                                      TensorView out, float scale, Stream& stream) {
  past_.clear();
  if (sequence.prompt.staged > 0) {
    for (size_t head = 0; head < heads(); ++head) {
      past_.push_back({staged_rows(sequence, layer, Part::kKeys, head),
                       staged_rows(sequence, layer, Part::kValues, head), parts_.rows,
                       sequence.prompt.staged});
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
                                 static_cast<size_t>(sequence.prompt.staged) * row_bytes();
    }
    store_rows(destinations_, parts_.rows, part == Part::kKeys ? k : v, stream);
  }
  if (rows.ends_prompt && !layouts_.joint()) {
    sequence.prompt_rows = sequence.prompt.staged + rows.rows;
    finish_layer(sequence, layer, select(sequence, layer)[0], stream);
  }
}

/// Sums the attention that the retention rule asks for over the rows of this pass.
void PolicyCache::measure(Sequence& sequence, int layer, ConstTensorView q, ConstTensorView k,
                          float scale, Stream& stream) {
  const ImportanceNeeds needs = parts_.retention->needs();
  if (needs.rows == ImportanceNeeds::Rows::kNone) return;
  const auto n = static_cast<int>(k.shape()[0]);
  const int seen = sequence.prompt.staged + n;
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
      (first < sequence.prompt.staged || seen < sequence.size.prompt_rows)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} watches the last rows of a prompt, which must come in one "
                            "pass; {} of {} rows came",
                            parts_.spec, n, sequence.size.prompt_rows));
  }
  const auto prompt = static_cast<size_t>(sequence.size.prompt_rows);
  const auto layers = static_cast<size_t>(layouts_.joint() ? shape_.layers : 1);
  const auto at = static_cast<size_t>(layouts_.joint() ? layer : 0);
  sequence.prompt.importance.resize(layers * heads() * prompt);
  double* importance = sequence.prompt.importance.data() + at * heads() * prompt;
  if (!layouts_.joint()) std::fill_n(importance, heads() * prompt, 0.0);

  const auto columns = static_cast<size_t>(seen);
  std::vector<double> sums(heads() * columns);
  std::vector<double> small(needs.sparsity ? static_cast<size_t>(shape_.q_heads) : 0);
  const int64_t first_row = std::max(0, first - sequence.prompt.staged);
  column_sums({sums, small}, q, k, past_, first_row, scale, shape_.multiply, stream);
  for (size_t head = 0; head < heads(); ++head) {
    for (size_t j = 0; j < columns; ++j) {
      importance[head * prompt + j] += sums[head * columns + j];
    }
  }
  if (needs.sparsity) {
    double entries = 0;
    for (int row = first; row < seen; ++row) entries += row + 1;
    sequence.prompt.sparsity.resize(layers);
    sequence.prompt.sparsity[at] = std::accumulate(small.begin(), small.end(), 0.0) /
                                   (entries * static_cast<double>(shape_.q_heads));
  }
  if (sequence.prompt.staged == 0) sequence.prompt.summed_rows[0] = first;
  sequence.prompt.summed_rows[1] = seen;
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
  view.importance = sequence.prompt.importance;
  view.sparsity = sequence.prompt.sparsity;
  view.summed_rows = sequence.prompt.summed_rows;
  return parts_.retention->select(view, parts_.pairs);
}

void PolicyCache::finish_layer(Sequence& sequence, int layer, const LayerSelection& selection,
                               Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  state.kept = selection.kept();
  state.forget = selection.forget;
  std::array<KeptSlots, kStores> slots;
  for (auto& of_heads : slots) of_heads.resize(heads());
  std::vector<std::array<int, kStores>> counts(heads());
  for (size_t head = 0; head < heads(); ++head) {
    for (const int32_t slot : selection.slots[selection.slots.size() > 1 ? head : 0]) {
      const int16_t tag = sequence.modality[static_cast<size_t>(slot)];
      slots[store_of(tag)][head].push_back(slot);
      if (parts_.retention != nullptr) state.heads[head].tags.push_back(tag);
    }
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      counts[head][store] = static_cast<int>(slots[store][head].size());
    }
  }
  for (size_t list = 0; list < selection.scores.size(); ++list) {
    state.heads[list].scores = selection.scores[list];
  }
  place_layer(sequence, layer, counts, selection.forget);
  const auto n = static_cast<int>(sequence.modality.size());
  if (parts_.retention != nullptr && selection.kept() < n) {
    merge_dropped(sequence, layer, selection, stream);
  }
  const std::array<KeptRows, kStores> rows = kept_rows(sequence, layer, slots, stream);
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    prompt_packer_.pack(sequence, state, layer, store, slots[store], rows[store], stream);
  }
  if (decode_weights_.wanted()) {
    const auto at = static_cast<size_t>(layouts_.joint() ? layer : 0);
    const auto prompt = static_cast<size_t>(sequence.size.prompt_rows);
    for (size_t head = 0; head < heads(); ++head) {
      const double* sums = sequence.prompt.importance.data() + (at * heads() + head) * prompt;
      decode_weights_.begin(state.heads[head], sums, slots[kVisual][head], slots[kRest][head],
                            stream);
    }
  }
  if (parts_.retention != nullptr && parts_.retention->rerotates() && selection.kept() < n) {
    const std::vector<int32_t>& kept = selection.slots[0];
    int sinks = 0;
    while (sinks < state.kept && kept[static_cast<size_t>(sinks)] == sinks) ++sinks;
    sinks_.rotate(state, sinks, n - state.kept, stream);
  }
}

/// Puts the mean of each kept row and those that joined it in the place of the kept row, as it
/// would be stored.
void PolicyCache::merge_dropped(const Sequence& sequence, int layer,
                                const LayerSelection& selection, Stream& stream) {
  const MergeRule rule = parts_.retention->merge();
  if (rule == MergeRule::kNone) return;
  const size_t n = sequence.modality.size();
  const auto kept = static_cast<size_t>(selection.kept());
  prompt_floats_.grow(2 * (n + kept) * dim());
  for (size_t head = 0; head < heads(); ++head) {
    const std::vector<int32_t>& chosen = selection.slots[selection.slots.size() > 1 ? head : 0];
    RowMerge merge;
    float* merged = prompt_floats_.data() + 2 * n * dim();
    merge.keys = prompt_floats_.data();
    merge.values = merge.keys + n * dim();
    merge.rows = static_cast<int>(n);
    merge.dim = shape_.head_dim;
    merge.kept = chosen;
    merge.merged_keys = merged;
    merge.merged_values = merged + kept * dim();
    row_sources_.clear();
    row_targets_.clear();
    for (const Part part : {Part::kKeys, Part::kValues}) {
      std::byte* staged = staged_rows(sequence, layer, part, head);
      for (size_t row = 0; row < n; ++row) row_sources_.push_back(staged + row * row_bytes());
      for (const int32_t row : chosen) {
        row_targets_.push_back(staged + static_cast<size_t>(row) * row_bytes());
      }
    }
    widen_rows(row_sources_, parts_.rows, shape_.head_dim, prompt_floats_.data(), stream);
    merge_rows(rule, merge, stream);
    narrow_rows(row_targets_, parts_.rows, shape_.head_dim, merged, stream);
  }
}

/// The rows that a layer keeps in each store, as floats, for the time of this call's caller.
std::array<KeptRows, kStores> PolicyCache::kept_rows(const Sequence& sequence, int layer,
                                                     std::span<const KeptSlots> slots,
                                                     Stream& stream) {
  size_t rows = 0;
  for (const auto& of_heads : slots) {
    for (const std::vector<int32_t>& of_head : of_heads) rows += 2 * of_head.size();
  }
  prompt_floats_.grow(rows * dim());
  float* to = prompt_floats_.data();
  std::array<KeptRows, kStores> kept;
  row_sources_.clear();
  for (const Part part : {Part::kKeys, Part::kValues}) {
    for (size_t store = 0; store < kStores; ++store) {
      for (size_t head = 0; head < heads(); ++head) {
        const std::byte* staged = staged_rows(sequence, layer, part, head);
        for (const int32_t slot : slots[store][head]) {
          row_sources_.push_back(staged + static_cast<size_t>(slot) * row_bytes());
        }
        const size_t elements = slots[store][head].size() * dim();
        kept[store][static_cast<size_t>(part)].emplace_back(to, elements);
        to += elements;
      }
    }
  }
  widen_rows(row_sources_, parts_.rows, shape_.head_dim, prompt_floats_.data(), stream);
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
    HeadState& lane = state.heads[head];
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const int count = counts[head][store];
      StorePlanes& planes = lane.stores[store];
      const auto place = [&](Plane& plane, Part part, const Plane::Layout& layout, int64_t rows,
                             int64_t peak, int64_t spans) {
        const PlaneCapacity capacity = layouts_.capacity(layout, 1, rows, peak, spans);
        const Plane* owner = nullptr;
        if (layout.shared) {
          const auto from = static_cast<size_t>(layouts_.owner(part, layer));
          const StorePlanes& other = sequence.layers[from].heads[head].stores[store];
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
      if (quantizer != nullptr && quantizer->key_basis() != nullptr) {
        lane.facts[store].key_channels.reserve(dim());  // a short prompt is learned from in decode
      }
    }
    lane.tags.reserve(static_cast<size_t>(most) + 1);
  }
  std::byte* extras = sequence.memory.data() + sequence.placed;
  sequence.placed += layouts_.extra_bytes(layer, most, ever);
  assert(sequence.placed <= sequence.memory.reserved());
  if (plan_of(layer).protects) {
    protected_values_.place(state, layer, extras, ever);
    extras += layouts_.protection_bytes(ever);
  }
  decode_weights_.place(state, extras, most);
}

void PolicyCache::attend_later_prompt(Sequence& sequence, const StepRows& rows, int layer,
                                      ConstTensorView q, ConstTensorView k, ConstTensorView v,
                                      TensorView out, float scale, Stream& stream) {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  // What is stored, as floats: one layer of one sequence, for the time of this call.
  size_t stored = 0;
  for (const HeadState& lane : state.heads) stored += static_cast<size_t>(lane.slots());
  inspected_.grow(2 * stored * dim());
  float* floats = inspected_.data();
  past_.clear();
  for (const HeadState& lane : state.heads) {
    const auto n = static_cast<int64_t>(lane.slots());
    float* past_values = floats + static_cast<size_t>(n) * dim();
    unpacker_.unpack_head(lane, layer, floats, past_values, stream);
    past_.push_back({reinterpret_cast<const std::byte*>(floats),
                     reinterpret_cast<const std::byte*>(past_values), DType::kF32, n});
    floats = past_values + static_cast<size_t>(n) * dim();
  }
  attention(out, q, k, v, past_, /*causal=*/true, scale, shape_.multiply, stream);
  std::vector<double> sums;  // (kv_heads, columns) of the new rows' attention
  size_t columns = 0;
  if (layouts_.keeps_weights()) {
    const auto past = static_cast<size_t>(state.heads[0].slots());
    columns = past + static_cast<size_t>(rows.rows);
    sums.resize(heads() * columns);
    column_sums({sums, {}}, q, k, past_, 0, scale, shape_.multiply, stream);
    for (size_t head = 0; head < heads(); ++head) {
      for (size_t j = 0; j < past; ++j) {
        state.heads[head].weights[j] += static_cast<float>(sums[head * columns + j]);
      }
    }
  }
  for (int row = 0; row < rows.rows; ++row) {
    const int16_t tag = rows.modality.empty() ? kTextRow : rows.modality[static_cast<size_t>(row)];
    appender_.append(state, layer, tag, 0);
    appender_.store(k.slice(row, 1), v.slice(row, 1), 0, stream);
    for (size_t head = 0; head < heads() && columns > 0; ++head) {
      const size_t first = columns - static_cast<size_t>(rows.rows);
      DecodeWeights::newest(state.heads[head], store_of(tag)) =
          static_cast<float>(sums[head * columns + first + static_cast<size_t>(row)]);
    }
    Sequence* const self = &sequence;
    window_packer_.flush({&self, 1}, layer, stream);
    evictor_.evict_layer(sequence, layer, row + 1, stream);
  }
}

}  // namespace kvlm
