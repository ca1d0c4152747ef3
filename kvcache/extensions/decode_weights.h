#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/slot_weights.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/prompt_packer.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Attention weights of every slot, summed over prompt and decode steps (or of the newest step),
/// for rules that evict by them (docs/formulas.md, "H2O"). For other rules all functions do
/// nothing.
class DecodeWeights {
 public:
  explicit DecodeWeights(const CacheTraits& traits);

  /// The rule evicts by attention weight.
  bool wanted() const noexcept { return wanted_; }
  void reserve(const Workload& load);
  /// Assigns `memory` of Layouts::weight_bytes() to the KV heads of a layer, for `peak` slots each.
  void place(LayerState& state, std::byte* memory, int64_t peak) const;
  /// Bytes of a layer's weights in use.
  size_t bytes(const LayerState& state) const noexcept;

  /// Initialises the weights of a layer's slots with the prompt's sums, one store after the other.
  ///   sums  (kv_heads, prompt rows)
  void begin(const LayerState& state, const double* sums, size_t rows,
             std::span<const KeptSlots> stores, Stream& stream);
  /// Makes space for the weight of the newest slot of `store`. On the host, except at the end.
  static void insert(HeadState& head, size_t store);
  /// The weight of the newest slot of `store`.
  static float& newest(HeadState& head, size_t store) noexcept;
  /// Adds this step's weights of `packed`, which belong to `heads`.
  void add(std::span<const PackedHead> packed, std::span<HeadState* const> heads, Stream& stream);

  /// Copies the weights of layers [first, last) that the rule will see to the host, ordered by
  /// sequence, layer and KV head. They are means over the KV heads of a layer, or of all layers
  /// with the same slots, if the rule chooses for all heads.
  void collect(std::span<Sequence* const> sequences, int first, int last, Stream& stream);
  /// The next KV head's weights from collect(), in token order.
  std::span<const float> next(const HeadState& head) noexcept;

 private:
  void add_mean(const Sequence& sequence, int layer, size_t head, size_t& floats);

  const CacheTraits& traits_;
  bool wanted_;
  std::vector<SlotWeights> step_sums_;
  std::vector<const float*> lists_;
  std::vector<MeanJob> means_;
  FloatSpace collected_;
  FloatSpace on_host_;          // copy of collected_
  size_t read_ = 0;             // floats of on_host_ that next() has returned
  std::vector<float> ordered_;  // of one KV head
};

}  // namespace kvlm
