// Prompt rows on their way into storage. Two kinds of quantizers pack them: one packs all rows of
// its scope, once, in one block or one for each picture (pack_once); the others pack the oldest
// rows, as their flush rule says (pack_oldest).
#include "kvcache/engine/prompt_packer.h"

#include <algorithm>
#include <numeric>

namespace kvlm {

namespace {

int64_t sum(std::span<const int> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace

PromptPacker::PromptPacker(const CacheTraits& traits, KeyBasisChange& key_basis,
                           ProtectedValues& protected_values)
    : traits_(traits), key_basis_(key_basis), protected_values_(protected_values) {}

void PromptPacker::pack(const Sequence& sequence, LayerState& state, int layer, size_t store,
                        const KeptSlots& slots, const KeptRows& rows, Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer != nullptr && quantizer->visual_only()) {
    pack_once(sequence, state, layer, slots, rows, stream);
  } else {
    pack_oldest(sequence, state, layer, store, slots, rows, stream);
  }
}

/// Packs the visual rows of a prompt, all of them.
void PromptPacker::pack_once(const Sequence& sequence, LayerState& state, int layer,
                             const KeptSlots& slots, const KeptRows& rows, Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(kVisual, layer);
  for (const Part part : {Part::kKeys, Part::kValues}) {
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      Plane& plane = state.heads[h].plane(kVisual, part);
      const float* x = rows[static_cast<size_t>(part)][h].data();
      const auto picture = [&](size_t i) {
        return sequence.modality[static_cast<size_t>(slots[h][i])];
      };
      for (size_t first = 0; first < slots[h].size();) {
        size_t end = slots[h].size();
        if (quantizer->per_image()) {
          end = first + 1;
          while (end < slots[h].size() && picture(end) == picture(first)) ++end;
        }
        queue_.add(plane, x + first * traits_.dim(), static_cast<int>(end - first));
        first = end;
      }
    }
    queue_.run(quantizer->plan(part, layer), stream);
  }
}

/// Packs the oldest rows of a store as its quantizer's flush rule says.
void PromptPacker::pack_oldest(const Sequence& sequence, LayerState& state, int layer, size_t store,
                               const KeptSlots& slots, const KeptRows& rows, Stream& stream) {
  if (traits_.quantizer(store, layer) == nullptr) return;
  const auto& [keys, values] = rows;
  pack_keys(state, layer, store, keys, packed_rows(store, Part::kKeys, layer, slots), stream);
  pack_values(sequence, state, layer, store, slots, values,
              packed_rows(store, Part::kValues, layer, slots), stream);
}

std::vector<int> PromptPacker::packed_rows(size_t store, Part part, int layer,
                                           const KeptSlots& slots) const {
  std::vector<int> packed(traits_.kv_heads());
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer == nullptr) return packed;
  const FlushRule& rule = quantizer->plan(part, layer).flush;
  for (size_t h = 0; h < packed.size(); ++h) {
    const auto kept = static_cast<int>(slots[h].size());
    packed[h] = quantizer->visual_only() ? kept : rule.packed_after_prompt(kept);
  }
  return packed;
}

void PromptPacker::pack_keys(LayerState& state, int layer, size_t store, const FloatRows& keys,
                             std::span<const int> packed, Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer->key_basis() != nullptr) {
    pack_keys_in_basis(state, layer, store, keys, packed, stream);
  } else {
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      queue_.add(state.heads[h].stores[store].keys, keys[h].data(), packed[h]);
    }
  }
  queue_.run(quantizer->plan(Part::kKeys, layer), stream);
}

/// Queues keys whose basis is learned and changed first.
void PromptPacker::pack_keys_in_basis(LayerState& state, int layer, size_t store,
                                      const FloatRows& keys, std::span<const int> packed,
                                      Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  const int rows = *std::min_element(packed.begin(), packed.end());
  std::vector<const float*> of_heads;
  for (const std::span<float>& x : keys) of_heads.push_back(x.data());
  if (rows > 0) key_basis_.learn(*quantizer, state, store, of_heads, rows, stream);
  key_basis_.start_keys(static_cast<size_t>(sum(packed)));
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    if (packed[h] == 0) continue;
    HeadState& head = state.heads[h];
    const float* x = key_basis_.add_keys(of_heads[h], packed[h], head.facts[store]);
    queue_.add(head.stores[store].keys, x, packed[h]);
  }
  key_basis_.change_keys(*quantizer->key_basis(), stream);
}

void PromptPacker::pack_values(const Sequence& sequence, LayerState& state, int layer, size_t store,
                               const KeptSlots& slots, const FloatRows& values,
                               std::span<const int> packed, Stream& stream) {
  if (store == kRest && traits_.layer(layer).protects) {
    return pack_protected(sequence, state, layer, slots, values, packed, stream);
  }
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    queue_.add(state.heads[h].stores[store].values, values[h].data(), packed[h]);
  }
  queue_.run(traits_.quantizer(store, layer)->plan(Part::kValues, layer), stream);
}

/// Packs the values of kRest, of which protected ones lie apart.
void PromptPacker::pack_protected(const Sequence& sequence, LayerState& state, int layer,
                                  const KeptSlots& slots, const FloatRows& values,
                                  std::span<const int> packed, Stream& stream) {
  protected_values_.start(static_cast<size_t>(sum(packed)));
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    HeadState& head = state.heads[h];
    protected_values_.choose(sequence, layer, head, slots[h]);
    protected_values_.add(head, values[h].data(), 0, packed[h], 0);
  }
  const Quantizer* quantizer = traits_.quantizer(kRest, layer);
  protected_values_.pack(quantizer->plan(Part::kValues, layer), *quantizer->protected_values(),
                         stream);
}

}  // namespace kvlm
