#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcache/buffer/kv_buffer.h"
#include "kvcache/plan/cache_plan.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// cache_plan, conflicts, planner, spec; and of the plan: [layouts], sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// Sizes that follow from a plan, which must outlive this: of K and V buffers, and of extension
/// data.
class Layouts {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t aligned(size_t bytes) noexcept {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  /// Bytes of a ring. With its blocks it takes at most 15 bytes more than aligned() of their sum.
  static constexpr size_t aligned_ring(size_t bytes) noexcept { return (bytes + 15) / 16 * 16; }
  /// Most images of a prompt with scales of their own.
  static constexpr int64_t kMaxImages = 64;
  explicit Layouts(const CachePlan& plan) : plan_(&plan), shape_(&plan.shape) {}

  const Quantizer* quantizer(size_t store, int layer) const noexcept {
    return plan_->quantizers[store][static_cast<size_t>(layer)];
  }
  BufferLayout buffer(size_t store, KvSide side, int layer) const noexcept;
  BufferLayout protected_values(int layer) const noexcept;
  /// The layer that stores the codes of `layer`.
  int owner(KvSide side, int layer) const noexcept;
  /// The layer from whose tokens these codes are made.
  int writer(KvSide side, int layer) const noexcept;
  /// Capacity of `buffers` buffers that each store `ever` tokens in total, `peak` at a time.
  BufferCapacity capacity(const BufferLayout& layout, int64_t buffers, int64_t ever, int64_t peak,
                          int64_t spans) const noexcept;

  /// Capacity of buffers of protected values that each store `ever` tokens.
  BufferCapacity protected_capacity(int layer, int64_t buffers, int64_t ever) const noexcept;

  /// Retention selects for all layers at once.
  bool joint() const noexcept;
  /// Layers that are staged, and packed by one call: a GPU packs several in little more time than
  /// one.
  static constexpr int kPackedTogether = 4;
  /// Tokens of a first prompt are staged until its end, when the kept ones are known. Otherwise
  /// they are stored at their final address.
  bool stages() const noexcept { return !plan_->plain(); }
  /// Layers staged at a time: all if joint(), else kPackedTogether; 0 unless stages().
  int staged_layers() const noexcept;
  /// Index of a layer among those staged.
  size_t staged_index(int layer) const noexcept {
    return static_cast<size_t>(layer % staged_layers());
  }
  /// kv_heads keep their own slots.
  bool per_head() const noexcept {
    return plan_->retention != nullptr && plan_->retention->per_head();
  }
  /// Images have scales of their own.
  bool per_image() const noexcept;
  /// Eviction is by attention weights, which are stored for every slot.
  bool keeps_weights() const noexcept {
    return decode_weights() != ImportanceNeeds::DecodeWeights::kNone;
  }
  /// Weights are summed over steps; else each step replaces them.
  bool sums_weights() const noexcept {
    return decode_weights() == ImportanceNeeds::DecodeWeights::kSummed;
  }

  /// Bytes of a layer's bitmaps of `ever` value slots; a multiple of 8 per KV head.
  size_t protection_bytes(int64_t ever) const noexcept;
  /// Bytes of a layer's attention weights, for `peak` slots in each KV head.
  size_t weight_bytes(int64_t peak) const noexcept;
  /// Bytes of the sinks' original keys in a layer (StreamingLLM).
  size_t sink_bytes() const noexcept;
  /// Bytes reserved for masks, bitmaps, weights and sinks of a layer. Its KV heads have at most
  /// `peak` slots at a time and `ever` tokens in total.
  size_t extra_bytes(int layer, int64_t peak, int64_t ever) const noexcept;

 private:
  ImportanceNeeds::DecodeWeights decode_weights() const noexcept {
    return plan_->retention == nullptr ? ImportanceNeeds::DecodeWeights::kNone
                                       : plan_->retention->needs().decode_weights;
  }
  BufferLayout rows_layout() const noexcept;

  const CachePlan* plan_;
  const CacheShape* shape_;
};

}  // namespace kvlm
