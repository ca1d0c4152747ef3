// Packs prompt tokens. Quantizers of visual tokens pack all of them once, in one block or one per
// image (pack_once). The others pack the oldest tokens, as their flush rule says (pack_oldest).
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

bool PromptPacker::wants_floats(size_t store, KvSide side, int layer) const noexcept {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer != nullptr && quantizer->packing(side, layer).range_of_layer) return true;
  if (side == KvSide::kValues) return store == kRest && traits_.layer(layer).protects;
  return quantizer != nullptr && !quantizer->visual_only() && quantizer->key_basis() != nullptr;
}

void PromptPacker::pack(const Sequence& sequence, LayerState& state, int layer, size_t store,
                        const KeptSlots& slots, const KeptRows& rows, Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer != nullptr && quantizer->visual_only()) {
    pack_once(sequence, state, layer, slots, rows);
  } else {
    pack_oldest(sequence, state, layer, store, slots, rows, stream);
  }
}

/// Packs all visual tokens of a prompt.
void PromptPacker::pack_once(const Sequence& sequence, LayerState& state, int layer,
                             const KeptSlots& slots, const KeptRows& rows) {
  const Quantizer* quantizer = traits_.quantizer(kVisual, layer);
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    if (!quantizer->packs(side)) continue;
    const Packing& packing = quantizer->packing(side, layer);
    bool joins = false;
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      const auto image = [&](size_t i) {
        return sequence.modality[static_cast<size_t>(slots[h][i])];
      };
      DenseRows x = rows[static_cast<size_t>(side)][h];
      for (size_t first = 0; first < slots[h].size();) {
        size_t end = slots[h].size();
        if (quantizer->per_image()) {
          end = first + 1;
          while (end < slots[h].size() && image(end) == image(first)) ++end;
        }
        queue_.add(packing, state.heads[h].buffer(kVisual, side), x, static_cast<int>(end - first),
                   joins);
        joins = packing.range_of_layer;
        x = x.from(end - first, traits_.dim());
        first = end;
      }
    }
  }
}

/// Packs the oldest tokens of a store by its flush rule.
void PromptPacker::pack_oldest(const Sequence& sequence, LayerState& state, int layer, size_t store,
                               const KeptSlots& slots, const KeptRows& rows, Stream& stream) {
  if (traits_.quantizer(store, layer) == nullptr) return;
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    const std::vector<DenseRows>& of_side = rows[static_cast<size_t>(side)];
    const std::vector<int> packed = packed_rows(store, side, layer, slots);
    if (!wants_floats(store, side, layer)) {
      pack_side(state, layer, store, side, of_side, packed);
    } else if (side == KvSide::kKeys) {
      pack_keys_in_basis(state, layer, store, of_side, packed, stream);
    } else {
      pack_protected(sequence, state, layer, slots, of_side, packed, stream);
    }
  }
}

std::vector<int> PromptPacker::packed_rows(size_t store, KvSide side, int layer,
                                           const KeptSlots& slots) const {
  std::vector<int> packed(traits_.kv_heads());
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  if (quantizer == nullptr || !quantizer->packs(side)) return packed;
  const FlushRule& rule = quantizer->packing(side, layer).flush;
  for (size_t h = 0; h < packed.size(); ++h) {
    const auto kept = static_cast<int>(slots[h].size());
    packed[h] = quantizer->visual_only() ? kept : rule.packed_after_prompt(kept);
  }
  return packed;
}

void PromptPacker::pack_side(LayerState& state, int layer, size_t store, KvSide side,
                             std::span<const DenseRows> rows, std::span<const int> packed) {
  const Packing& packing = traits_.quantizer(store, layer)->packing(side, layer);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    queue_.add(packing, state.heads[h].buffer(store, side), rows[h], packed[h]);
  }
}

/// Packs keys that first change to a learned basis. Runs at once, because the next layer reuses the
/// workspace.
void PromptPacker::pack_keys_in_basis(LayerState& state, int layer, size_t store,
                                      std::span<const DenseRows> keys, std::span<const int> packed,
                                      Stream& stream) {
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  const int rows = *std::min_element(packed.begin(), packed.end());
  std::vector<const float*> of_heads;
  for (const DenseRows& x : keys) of_heads.push_back(x.floats());
  LayerState* const self = &state;
  if (rows > 0) key_basis_.learn(*quantizer, {&self, 1}, store, of_heads, rows, stream);
  key_basis_.start_keys(static_cast<size_t>(sum(packed)));
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    if (packed[h] == 0) continue;
    HeadState& head = state.heads[h];
    const float* x = key_basis_.add_keys(of_heads[h], packed[h], head.facts[store]);
    queue_.add(quantizer->packing(KvSide::kKeys, layer), head.stores[store].keys, {x}, packed[h]);
  }
  key_basis_.change_keys(*quantizer->key_basis(), stream);
  queue_.run(stream);
}

/// Packs the values of kRest; protected ones go to their own buffer.
void PromptPacker::pack_protected(const Sequence& sequence, LayerState& state, int layer,
                                  const KeptSlots& slots, std::span<const DenseRows> values,
                                  std::span<const int> packed, Stream& stream) {
  protected_values_.start(static_cast<size_t>(sum(packed)));
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    HeadState& head = state.heads[h];
    protected_values_.choose(sequence, layer, head, slots[h]);
    protected_values_.add(head, values[h].floats(), 0, packed[h], 0);
  }
  const Quantizer* quantizer = traits_.quantizer(kRest, layer);
  protected_values_.pack(quantizer->packing(KvSide::kValues, layer), *quantizer->protected_values(),
                         stream);
}

}  // namespace kvlm
