#include "kvcache/engine/traits.h"

#include <span>
#include <utility>

#include "kernels/decode_table.h"
#include "kvcache/engine/step_checks.h"

namespace kvlm {

namespace {

/// A DecodeTable can pack this window.
bool fits_table(const Packing& packing) {
  const PackedFormat& format = packing.format;
  const bool whole_blocks = format.axis == ScaleAxis::kToken ||
                            packing.flush.prompt_unit % std::max(format.block_rows, 1) == 0;
  return whole_blocks && can_pack_windows(format, packing.rules, packing.flush.rows);
}

LayerTraits traits_of(const Layouts& layouts, int layer) {
  LayerTraits traits;
  traits.protects = layouts.protected_values(layer).packing != nullptr;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    const Quantizer* quantizer = layouts.quantizer(store, layer);
    if (quantizer == nullptr) continue;
    const bool has_basis = quantizer->key_basis() != nullptr;
    traits.has_key_basis |= has_basis;
    traits.remaps |= store == kVisual && quantizer->remap(layer) != nullptr;
    if (quantizer->visual_only()) continue;
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const Packing& packing = quantizer->packing(side, layer);
      const bool anew = quantizer->repacks(side) || has_basis;
      traits.windows.push_back({store, side, &packing, anew});
      if (store != kRest) continue;
      traits.flush[static_cast<size_t>(side)] = &packing.flush;
      traits.host_flushes[static_cast<size_t>(side)] =
          anew || traits.protects || !fits_table(packing);
    }
  }
  return traits;
}

/// A DecodeTable may evict packed tokens of a layer. Condition: packed visual tokens are complete,
/// and windows are packed by the table, or by the host if no codes are shared.
///   shared  some layers share codes
bool table_may_drop(const Layouts& layouts, const LayerTraits& traits, bool split, bool shared,
                    int layer) {
  const Quantizer* visual = layouts.quantizer(kVisual, layer);
  if (traits.protects) return false;
  if (split &&
      (visual == nullptr || !visual->packs(KvSide::kKeys) || !visual->packs(KvSide::kValues))) {
    return false;
  }
  return std::all_of(traits.windows.begin(), traits.windows.end(), [&](const Window& window) {
    if (window.store != kRest) return false;
    if (traits.host_flushes[static_cast<size_t>(window.side)]) return !shared;
    const int block = layouts.buffer(window.store, window.side, layer).block_rows();
    return window.packing->flush.rows / block + 2 <= kMostFlushedBlocks;
  });
}

CacheNeeds needs_of(const CachePlan& plan, const Layouts& layouts,
                    std::span<const LayerTraits> layers, Device device) {
  CacheNeeds needs;
  for (int layer = 0; layer < plan.shape.layers; ++layer) {
    const Quantizer* visual = layouts.quantizer(kVisual, layer);
    needs.prompt_embeddings |= layers[static_cast<size_t>(layer)].protects;
    needs.images_first |= visual != nullptr && visual->visual_only();
  }
  const Retention* rule = plan.retention.get();
  needs.prompt_queries = rule != nullptr && rule->needs().sees_queries();
  needs.one_prompt = !why_one_prompt(plan, device).empty();
  return needs;
}

}  // namespace

CacheTraits::CacheTraits(std::shared_ptr<const CachePlan> plan, Device device)
    : plan_(std::move(plan)),
      layouts_(*plan_),
      device_(device),
      kv_heads_(static_cast<size_t>(plan_->shape.kv_heads)),
      dim_(static_cast<size_t>(plan_->shape.head_dim)) {
  for (int layer = 0; layer < plan_->shape.layers; ++layer) {
    layers_.push_back(traits_of(layouts_, layer));
  }
  needs_ = needs_of(*plan_, layouts_, layers_, device);
  table_.places = on_gpu() && evicts() && !retention()->rerotates();
  int packing = 0;  // layers with a window
  for (int layer = 0; layer < plan_->shape.layers; ++layer) {
    packing += this->layer(layer).windows.empty() ? 0 : 1;
    table_.places = table_.places && table_may_drop(layouts_, this->layer(layer), plan_->split,
                                                    plan_->share.any(), layer);
  }
  if (layouts_.keeps_weights()) {
    table_.weighs = table_.places;
    table_.places = table_.places && (plan_->split || packing > 0);
  } else {
    // Layers without packed tokens have kernels of their own.
    table_.places = table_.places && (plan_->split || packing == plan_->shape.layers);
    const bool full_rows = !plan_->split && packing == 0;
    table_.scores =
        on_gpu() && evicts() && retention()->evicts_by_score() && (table_.places || full_rows);
  }
  // The host would have to choose by score for every KV head.
  const bool apart = evicts() && layouts_.per_head() && retention()->evicts_by_score();
  table_.counts = table_.weighs || table_.scores ||
                  (!layouts_.keeps_weights() && !apart && !needs_.prompt_embeddings);
}

}  // namespace kvlm
