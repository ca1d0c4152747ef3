#include "kvcache/extensions/decode_weights.h"

#include <array>
#include <cassert>
#include <cstring>

#include "kernels/base/tensor.h"
#include "kernels/elementwise.h"

namespace kvlm {

DecodeWeights::DecodeWeights(const CacheTraits& traits)
    : traits_(traits),
      wanted_(traits.layouts().keeps_weights()),
      collected_(traits.device()),
      on_host_(Device{}) {}

void DecodeWeights::reserve(const Workload& load) {
  if (!wanted_) return;
  const auto layers = traits_.layers();
  const size_t floats =
      load.rows * layers / (traits_.layouts().per_head() ? 1 : traits_.kv_heads());
  if (ordered_.size() < load.longest) ordered_.resize(load.longest);
  collected_.grow(floats);
  on_host_.grow(floats);
  step_sums_.reserve(load.heads);
  lists_.reserve(load.heads * layers);
  means_.reserve(load.heads * layers);
}

void DecodeWeights::place(LayerState& state, std::byte* memory, int64_t peak) const {
  const size_t each = traits_.layouts().weight_bytes(peak) / traits_.kv_heads();
  for (HeadState& head : state.heads) {
    head.weights = reinterpret_cast<float*>(memory);
    memory += each;
  }
}

size_t DecodeWeights::bytes(const LayerState& state) const noexcept {
  if (!wanted_) return 0;
  size_t bytes = 0;
  for (const HeadState& head : state.heads) {
    if (head.weights != nullptr) bytes += sizeof(float) * static_cast<size_t>(head.slots());
  }
  return bytes;
}

void DecodeWeights::begin(const LayerState& state, const double* sums, size_t rows,
                          std::span<const KeptSlots> stores, Stream& stream) {
  // One copy per layer: place() put the weights of its KV heads next to each other.
  float* const first = state.heads.front().weights;
  std::vector<float> weights;
  for (size_t h = 0; h < state.heads.size(); ++h) {
    const auto at = static_cast<size_t>(state.heads[h].weights - first);
    assert(weights.size() <= at);
    weights.resize(at);
    for (const KeptSlots& kept : stores) {
      for (const int32_t row : kept[h]) {
        weights.push_back(static_cast<float>(sums[h * rows + static_cast<size_t>(row)]));
      }
    }
  }
  const Shape shape{static_cast<int64_t>(weights.size())};
  copy(TensorView(first, DType::kF32, shape, traits_.device()),
       ConstTensorView(weights.data(), DType::kF32, shape), stream);
}

void DecodeWeights::insert(HeadState& head, size_t store) {
  if (head.weights == nullptr || store == kRest) return;
  // An image of a later prompt is inserted before other slots.
  float* added = &newest(head, store);
  const float* end = head.weights + head.slots();
  std::memmove(added + 1, added, static_cast<size_t>(end - added - 1) * sizeof(float));
}

float& DecodeWeights::newest(HeadState& head, size_t store) noexcept {
  const int slots = store == kRest ? head.slots() : head.stores[kVisual].keys.slots();
  return head.weights[slots - 1];
}

void DecodeWeights::add(std::span<const PackedHead> packed, std::span<HeadState* const> heads,
                        Stream& stream) {
  if (!wanted_) return;
  step_sums_.clear();
  for (size_t i = 0; i < packed.size(); ++i) {
    if (heads[i]->weights == nullptr) continue;
    const int known = traits_.layouts().sums_weights() ? packed[i].slots - 1 : 0;
    step_sums_.push_back({packed[i].weights, heads[i]->weights, packed[i].slots, known});
  }
  add_slot_weights(step_sums_, traits_.shape().q_per_kv(), stream);
}

void DecodeWeights::collect(std::span<Sequence* const> sequences, int first, int last,
                            Stream& stream) {
  if (!wanted_) return;
  lists_.clear();
  means_.clear();
  size_t floats = 0;
  for (const Sequence* sequence : sequences) {
    for (int layer = first; layer < last; ++layer) {
      for (size_t h = 0; h < traits_.kv_heads(); ++h) {
        if (traits_.chooses(layer, h)) add_mean(*sequence, layer, h, floats);
      }
    }
  }
  mean_arrays(lists_, means_, stream);
  const Shape shape{static_cast<int64_t>(floats)};
  assert(floats <= on_host_.size());
  copy(TensorView(on_host_.data(), DType::kF32, shape),
       ConstTensorView(collected_.data(), DType::kF32, shape, traits_.device()), stream);
  read_ = 0;
}

/// Lists the arrays whose mean the rule sees for KV head `head` of a layer.
void DecodeWeights::add_mean(const Sequence& sequence, int layer, size_t head, size_t& floats) {
  const int slots = sequence.layers[static_cast<size_t>(layer)].heads[head].slots();
  means_.push_back({static_cast<int>(lists_.size()), 0, slots, collected_.data() + floats});
  floats += static_cast<size_t>(slots);
  const auto add = [&](const HeadState& of) {
    lists_.push_back(of.weights);
    ++means_.back().arrays;
  };
  if (traits_.layouts().per_head()) {
    return add(sequence.layers[static_cast<size_t>(layer)].heads[head]);
  }
  for (size_t other = 0; other < sequence.layers.size(); ++other) {
    if (traits_.pair_of(static_cast<int>(other)) != layer) continue;
    for (const HeadState& of : sequence.layers[other].heads) add(of);
  }
}

std::span<const float> DecodeWeights::next(const HeadState& head) noexcept {
  const auto n = static_cast<size_t>(head.slots());
  const std::span<const float> weights = std::span(on_host_.data() + read_, n);
  read_ += n;
  if (!traits_.plan().split) return weights;
  std::array<size_t, kStores> at{0, static_cast<size_t>(head.stores[kVisual].keys.slots())};
  for (size_t i = 0; i < n; ++i) ordered_[i] = weights[at[traits_.store_of(head.tags[i])]++];
  return std::span(ordered_).first(n);
}

}  // namespace kvlm
