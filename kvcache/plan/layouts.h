#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcache/plan/cache_plan.h"
#include "kvcache/plane/plane.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, cache_plan, conflicts, planner, spec; and of the plan: [layouts], sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// The sizes that follow from a plan, which must outlive it: of planes, of a sequence's memory.
class Layouts {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t aligned(size_t bytes) noexcept {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  /// What a ring of `bytes` takes: with its blocks, no more than aligned() of both together and 15.
  static constexpr size_t aligned_ring(size_t bytes) noexcept { return (bytes + 15) / 16 * 16; }
  /// Pictures of one prompt that may have scales of their own each.
  static constexpr int64_t kMaxImages = 64;
  explicit Layouts(const CachePlan& plan) : plan_(&plan), shape_(&plan.shape) {}

  const Quantizer* quantizer(size_t store, int layer) const noexcept {
    return plan_->quantizers[store][static_cast<size_t>(layer)];
  }
  PlaneLayout plane(size_t store, KvSide side, int layer) const noexcept;
  PlaneLayout protected_values(int layer) const noexcept;
  /// The layer in whose memory the codes of `layer` lie.
  int owner(KvSide side, int layer) const noexcept;
  /// The layer whose rows they are made from.
  int writer(KvSide side, int layer) const noexcept;
  /// What `planes` planes need that hold `ever` rows ever and `peak` at a time, each.
  PlaneCapacity capacity(const PlaneLayout& layout, int64_t planes, int64_t ever, int64_t peak,
                         int64_t spans) const noexcept;

  /// What planes of protected values need that hold `ever` rows each.
  PlaneCapacity protected_capacity(int layer, int64_t planes, int64_t ever) const noexcept;

  /// Retention chooses for all layers at once.
  bool joint() const noexcept;
  /// Layers whose prompt rows are staged, and may be packed by one call: a GPU packs those of
  /// several in little more time than those of one.
  static constexpr int kPackedTogether = 4;
  /// Rows of a first prompt wait until it has ended, since only then it is known what is kept of
  /// them and packed. Else they are stored where they stay.
  bool stages() const noexcept { return !plan_->plain(); }
  /// Layers whose prompt rows are staged at a time: all if joint(), else kPackedTogether; 0 unless
  /// the cache stages().
  int staged_layers() const noexcept;
  /// Where a layer is among those staged.
  size_t staged_index(int layer) const noexcept {
    return static_cast<size_t>(layer % staged_layers());
  }
  /// kv_heads keep slots of their own.
  bool per_head() const noexcept {
    return plan_->retention != nullptr && plan_->retention->per_head();
  }
  /// Pictures have scales of their own.
  bool per_image() const noexcept;
  /// Eviction goes by attention weights, which take memory of every slot.
  bool keeps_weights() const noexcept {
    return decode_weights() != ImportanceNeeds::DecodeWeights::kNone;
  }
  /// They are summed over steps; else each step's take the place of the last one's.
  bool sums_weights() const noexcept {
    return decode_weights() == ImportanceNeeds::DecodeWeights::kSummed;
  }

  /// Bytes of a layer's bitmaps of `ever` value slots; 8 divides what one KV head has of them.
  size_t protection_bytes(int64_t ever) const noexcept;
  /// Bytes of a layer's sums of attention, of `peak` slots in each KV head.
  size_t weight_bytes(int64_t peak) const noexcept;
  /// Bytes of a layer's sinks as they came (StreamingLLM).
  size_t sink_bytes() const noexcept;
  /// Bytes set aside for masks, bitmaps, sums and sinks of a layer whose KV heads have at most
  /// `peak` slots and ever get `ever` rows.
  size_t extra_bytes(int layer, int64_t peak, int64_t ever) const noexcept;

 private:
  ImportanceNeeds::DecodeWeights decode_weights() const noexcept {
    return plan_->retention == nullptr ? ImportanceNeeds::DecodeWeights::kNone
                                       : plan_->retention->needs().decode_weights;
  }
  PlaneLayout rows_layout() const noexcept;

  const CachePlan* plan_;
  const CacheShape* shape_;
};

}  // namespace kvlm
