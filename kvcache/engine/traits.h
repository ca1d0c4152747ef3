#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/base/device.h"
#include "kvcache/plan/cache_plan.h"
#include "kvcache/plan/layouts.h"

namespace kvlm {

/// The residual window of one store and side: tokens packed in decode as soon as enough are
/// unpacked.
struct Window {
  size_t store;
  KvSide side;
  const Packing* packing;
  bool anew;  ///< repacks old tokens, or packs keys in another basis
};

/// Constants of a layer.
struct LayerTraits {
  std::vector<Window> windows;  ///< in flush order
  /// By KvSide: flush rule of kRest; null: no window.
  std::array<const FlushRule*, 2> flush{};
  bool protects = false;       ///< protected values have a buffer of their own (VidKV)
  bool has_key_basis = false;  ///< keys are packed in another basis (VidKV)
  /// By KvSide: the host flushes the window of kRest, even on a GPU.
  std::array<bool, 2> host_flushes{};
  bool remaps = false;  ///< scores of packed visual slots are remapped (CalibQuant)
};

/// Which tokens a DecodeTable evicts without the host.
struct TableDrops {
  /// The GPU counts the remaining tokens and the host repeats it when it needs them: evictions
  /// follow from token counts, or from weights or scores stored in the table.
  bool counts = false;
  bool weighs = false;  ///< evicts by attention weight
  bool scores = false;  ///< evicts by score (kLeastScore)
  bool places = false;  ///< may evict packed tokens, in place (TableHead.placed)
};

/// Constants that follow from a plan and a device, for all parts of the engine.
class CacheTraits {
 public:
  CacheTraits(std::shared_ptr<const CachePlan> plan, Device device);

  const CachePlan& plan() const noexcept { return *plan_; }
  const CacheShape& shape() const noexcept { return plan_->shape; }
  const Layouts& layouts() const noexcept { return layouts_; }
  const LayerTraits& layer(int layer) const noexcept { return layers_[static_cast<size_t>(layer)]; }
  const CacheNeeds& needs() const noexcept { return needs_; }
  Device device() const noexcept { return device_; }
  bool on_gpu() const noexcept { return device_.kind != DeviceKind::kCpu; }

  size_t layers() const noexcept { return layers_.size(); }
  size_t kv_heads() const noexcept { return kv_heads_; }
  size_t q_per_kv() const noexcept { return static_cast<size_t>(shape().q_per_kv()); }
  size_t dim() const noexcept { return dim_; }
  /// Bytes of one unpacked key or value.
  size_t row_bytes() const noexcept { return dim_ * dtype_bytes(plan_->rows); }
  /// Null: every token is kept.
  const Retention* retention() const noexcept { return plan_->retention.get(); }
  const Quantizer* quantizer(size_t store, int layer) const noexcept {
    return layouts_.quantizer(store, layer);
  }
  const FlushRule* flush_rule(KvSide side, int layer) const noexcept {
    return layers_[static_cast<size_t>(layer)].flush[static_cast<size_t>(side)];
  }
  /// Nothing in a layer is packed, and no rule needs its attention weights.
  bool holds_rows_alone(int layer) const noexcept {
    return !layouts_.keeps_weights() && quantizer(kVisual, layer) == nullptr &&
           quantizer(kRest, layer) == nullptr;
  }
  /// The host flushes this window because a DecodeTable cannot pack it.
  bool host_flushes(int layer, KvSide side) const noexcept {
    return layers_[static_cast<size_t>(layer)].host_flushes[static_cast<size_t>(side)];
  }
  /// The rule evicts in decode.
  bool evicts() const noexcept { return retention() != nullptr && retention()->evicts(); }
  const TableDrops& table() const noexcept { return table_; }
  /// The first layer that keeps the same slots as `layer` (shared codes).
  int pair_of(int layer) const noexcept {
    return plan_->pairs.empty() ? layer : plan_->pairs[static_cast<size_t>(layer)];
  }
  /// The rule chooses a slot for this KV head; other heads or layers evict the same one.
  bool chooses(int layer, size_t head) const noexcept {
    return head > 0 ? layouts_.per_head() : pair_of(layer) == layer;
  }
  /// The store for tokens of a modality.
  StoreIndex store_of(int16_t tag) const noexcept {
    return plan_->split && tag != kTextRow ? kVisual : kRest;
  }
  /// The first store in use.
  size_t first_store() const noexcept { return plan_->split ? kVisual : kRest; }

 private:
  std::shared_ptr<const CachePlan> plan_;
  Layouts layouts_;
  Device device_;
  size_t kv_heads_;
  size_t dim_;
  std::vector<LayerTraits> layers_;
  CacheNeeds needs_;
  TableDrops table_;
};

}  // namespace kvlm
