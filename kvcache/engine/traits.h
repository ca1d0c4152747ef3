#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/base/device.h"
#include "kvcache/plan/cache_plan.h"
#include "kvcache/plan/layouts.h"

namespace kvlm {

/// Rows of one scope and side that are packed in decode when enough of them are full.
struct Window {
  size_t store;
  KvSide side;
  const Packing* packing;
  bool anew;  ///< old rows are packed again, or keys are packed in another basis
};

/// What never changes about a layer.
struct LayerTraits {
  std::vector<Window> windows;  ///< in the order in which they are flushed
  /// By KvSide: when the window of kRest is flushed; null: it has none.
  std::array<const FlushRule*, 2> flush{};
  bool protects = false;       ///< some packed values lie apart (VidKV)
  bool has_key_basis = false;  ///< keys are packed in a basis of their own (VidKV)
  /// By KvSide: the window of kRest is flushed by the host, also on a GPU.
  std::array<bool, 2> host_flushes{};
  bool remaps = false;  ///< scores of packed visual slots are remapped (CalibQuant)
};

/// Which rows a DecodeTable drops without the host.
struct TableDrops {
  bool counts = false;  ///< it counts the rows that are left: those that go follow from numbers of
                        ///< rows, or from weights or scores that it keeps
  bool weighs = false;  ///< those that go by attention weights
  bool scores = false;  ///< it chooses those that go by score (kLeastScore)
  bool places = false;  ///< they may be packed (TableLane.placed)
};

/// What follows from a plan and a device, for all parts of the engine.
class CacheTraits {
 public:
  CacheTraits(std::shared_ptr<const CachePlan> plan, Device device);

  const CachePlan& plan() const noexcept { return *plan_; }
  const CacheShape& shape() const noexcept { return plan_->shape; }
  const Layouts& layouts() const noexcept { return layouts_; }
  const LayerTraits& layer(int layer) const noexcept { return layers_[static_cast<size_t>(layer)]; }
  /// What the cache wants to be given, and what it refuses.
  const CacheNeeds& needs() const noexcept { return needs_; }
  Device device() const noexcept { return device_; }
  bool on_gpu() const noexcept { return device_.kind != DeviceKind::kCpu; }

  size_t layers() const noexcept { return layers_.size(); }
  size_t kv_heads() const noexcept { return kv_heads_; }
  size_t q_per_kv() const noexcept { return static_cast<size_t>(shape().q_per_kv()); }
  size_t dim() const noexcept { return dim_; }
  /// Bytes of a full row.
  size_t row_bytes() const noexcept { return dim_ * dtype_bytes(plan_->rows); }
  /// null: every row is kept.
  const Retention* retention() const noexcept { return plan_->retention.get(); }
  const Quantizer* quantizer(size_t store, int layer) const noexcept {
    return layouts_.quantizer(store, layer);
  }
  const FlushRule* flush_rule(KvSide side, int layer) const noexcept {
    return layers_[static_cast<size_t>(layer)].flush[static_cast<size_t>(side)];
  }
  /// Nothing in a layer is packed, and nobody asks for its attention weights.
  bool holds_rows_alone(int layer) const noexcept {
    return !layouts_.keeps_weights() && quantizer(kVisual, layer) == nullptr &&
           quantizer(kRest, layer) == nullptr;
  }
  /// A DecodeTable cannot pack the window of a side.
  bool host_flushes(int layer, KvSide side) const noexcept {
    return layers_[static_cast<size_t>(layer)].host_flushes[static_cast<size_t>(side)];
  }
  /// The rule drops slots in decode.
  bool evicts() const noexcept { return retention() != nullptr && retention()->evicts(); }
  /// What a DecodeTable drops.
  const TableDrops& table() const noexcept { return table_; }
  /// The first of the layers that keep the same slots as `layer`.
  int pair_of(int layer) const noexcept {
    return plan_->pairs.empty() ? layer : plan_->pairs[static_cast<size_t>(layer)];
  }
  /// The rule is asked for a slot of this KV head to drop: the others follow.
  bool chooses(int layer, size_t head) const noexcept {
    return head > 0 ? layouts_.per_head() : pair_of(layer) == layer;
  }
  /// Where rows of a modality are stored.
  StoreIndex store_of(int16_t tag) const noexcept {
    return plan_->split && tag != kTextRow ? kVisual : kRest;
  }
  /// The first store that can hold rows.
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
