#include "kvcache/extensions/key_basis.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"

namespace kvlm {

KeyBasisChange::KeyBasisChange(const CacheTraits& traits)
    : traits_(traits),
      keys_(traits.device()),
      queries_(traits.device()),
      query_jobs_(traits.layers()),
      ends_(2 * traits.kv_heads() * traits.dim()) {
  for (size_t layer = 0; layer < traits.layers(); ++layer) {
    if (traits.on_gpu()) {
      query_batches_.push_back({BasisBatch(traits.device()), BasisBatch(traits.device())});
    }
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const Quantizer* quantizer = traits.quantizer(store, static_cast<int>(layer));
      const KeyBasis* basis = quantizer == nullptr ? nullptr : quantizer->key_basis();
      if (basis != nullptr) prepare_basis(*basis, traits.device());
    }
  }
}

void KeyBasisChange::reserve(const Workload& load) {
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    if (!traits_.layer(static_cast<int>(layer)).has_key_basis) continue;
    for (std::vector<BasisJob>& jobs : query_jobs_[layer])
      jobs.reserve(load.slots * traits_.kv_heads());
    queries_.grow(load.slots * traits_.kv_heads() * kStores * traits_.q_per_kv() * traits_.dim());
  }
}

void KeyBasisChange::reserve_keys(size_t rows, size_t sequences) {
  const size_t heads = sequences * traits_.kv_heads();
  key_jobs_.reserve(heads);
  facts_.resize(traits_.kv_heads());
  ends_.resize(std::max(ends_.size(), 2 * heads * traits_.dim()));
  keys_.grow(rows * traits_.dim());
}

void KeyBasisChange::learn(const Quantizer& quantizer, std::span<LayerState* const> states,
                           size_t store, std::span<const float* const> keys, int rows,
                           Stream& stream) {
  facts_.resize(traits_.kv_heads());
  const size_t heads = traits_.kv_heads();
  const size_t channels = heads * traits_.dim();
  ends_.resize(std::max(ends_.size(), 2 * states.size() * channels));
  const std::span<float> low = std::span(ends_).first(states.size() * channels);
  const std::span<float> high = std::span(ends_).subspan(low.size(), low.size());
  if (!quantizer.learns_from_rows()) {
    channel_ends(keys, rows, traits_.shape().head_dim, low, high, stream);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const auto swap_facts = [&] {
      for (size_t h = 0; h < heads; ++h) std::swap(facts_[h], states[i]->heads[h].facts[store]);
    };
    swap_facts();
    if (quantizer.learns_from_rows()) {
      quantizer.learn_rows(on_host(keys.subspan(i * heads, heads), rows, stream), rows, facts_);
    } else {
      quantizer.learn(low.subspan(i * channels, channels), high.subspan(i * channels, channels),
                      facts_);
    }
    swap_facts();
    states[i]->mask_bytes[store] = quantizer.facts_bytes(traits_.shape().kv_heads);
  }
}

std::span<const float* const> KeyBasisChange::on_host(std::span<const float* const> keys, int rows,
                                                      Stream& stream) {
  if (!traits_.on_gpu()) return keys;
  const size_t floats = static_cast<size_t>(rows) * traits_.dim();
  on_host_.resize(std::max(on_host_.size(), keys.size() * floats));
  host_keys_.clear();
  for (size_t h = 0; h < keys.size(); ++h) {
    float* to = on_host_.data() + h * floats;
    const Shape shape{static_cast<int64_t>(floats)};
    copy(TensorView(to, DType::kF32, shape),
         ConstTensorView(keys[h], DType::kF32, shape, traits_.device()), stream);
    host_keys_.push_back(to);
  }
  return host_keys_;
}

void KeyBasisChange::start_keys(size_t rows) {
  key_jobs_.clear();
  changed_ = 0;
  keys_.grow(rows * traits_.dim());
}

const float* KeyBasisChange::add_keys(const float* keys, int rows, const HeadFacts& facts) {
  float* to = keys_.data() + changed_;
  key_jobs_.push_back({keys, to, rows, facts.key_channels.data()});
  changed_ += static_cast<size_t>(rows) * traits_.dim();
  return to;
}

void KeyBasisChange::change_keys(const KeyBasis& basis, Stream& stream) {
  change_basis(basis, BasisChange::kKey, key_jobs_, stream);
}

void KeyBasisChange::start_queries(int layer) noexcept {
  for (std::vector<BasisJob>& jobs : query_jobs_[static_cast<size_t>(layer)]) jobs.clear();
}

float* KeyBasisChange::queries_of(int layer, size_t store, size_t index) noexcept {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer == nullptr || quantizer->key_basis() == nullptr) return nullptr;
  return queries_.data() + (kStores * index + store) * traits_.q_per_kv() * traits_.dim();
}

const float* KeyBasisChange::add_queries(int layer, size_t store, size_t index, const float* q,
                                         const HeadFacts& facts) {
  float* to = queries_of(layer, store, index);
  if (to == nullptr) return nullptr;
  query_jobs_[static_cast<size_t>(layer)][store].push_back(
      {q, to, traits_.shape().q_per_kv(), facts.key_channels.data()});
  return to;
}

void KeyBasisChange::change_queries(int layer, const float* q, Stream& stream) {
  const auto at = static_cast<size_t>(layer);
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    const std::vector<BasisJob>& jobs = query_jobs_[at][store];
    if (jobs.empty()) continue;
    const KeyBasis& basis = *traits_.quantizer(store, layer)->key_basis();
    if (!traits_.on_gpu()) {
      change_basis(basis, BasisChange::kQuery, jobs, stream);
      continue;
    }
    BasisBatch& batch = query_batches_[at][store];
    batch.describe(basis, BasisChange::kQuery, jobs, q, stream);
    batch.run(q, stream);
  }
}

void KeyBasisChange::change_queries_again(int layer, const float* q, Stream& stream) {
  const auto at = static_cast<size_t>(layer);
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    if (query_jobs_[at][store].empty()) continue;
    query_batches_[at][store].run(q, stream);
  }
}

}  // namespace kvlm
