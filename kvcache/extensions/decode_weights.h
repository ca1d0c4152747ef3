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

/// Attention weights of every slot, summed over the prompt and the steps of decode, for rules that
/// evict by them (docs/formulas.md, "H2O"). Everything does nothing for other rules.
class DecodeWeights {
 public:
  explicit DecodeWeights(const CacheTraits& traits);

  /// The cache's rule goes by them.
  bool wanted() const noexcept { return wanted_; }
  void reserve(const Workload& load);
  /// Gives the KV heads of a layer their sums, of at most `peak` slots each, in `memory` of
  /// Layouts::weight_bytes().
  void place(LayerState& state, std::byte* memory, int64_t peak) const;
  /// Bytes of a layer's sums that are in use.
  size_t bytes(const LayerState& state) const noexcept;

  /// The slots of a layer's KV heads begin with the sums of a prompt: those of the rows that are
  /// kept in each store, one store after the other.
  ///   sums  (kv_heads, prompt rows)
  void begin(const LayerState& state, const double* sums, size_t rows,
             std::span<const KeptSlots> stores, Stream& stream);
  /// Makes room for the sum of the slot that `store` has got last; on the host, unless it is the
  /// last slot of all.
  static void insert(HeadState& head, size_t store);
  /// The sum of the slot that `store` has got last.
  static float& newest(HeadState& head, size_t store) noexcept;
  /// Adds what attention to `packed`, which are of `heads`, has weighed in this step.
  void add(std::span<const PackedLane> packed, std::span<HeadState* const> heads, Stream& stream);

  /// Fetches the sums of layers [first, last) that the rule will be asked with, in the order of
  /// sequences, layers and KV heads: of a KV head, or their mean over the KV heads of a layer, or
  /// of all layers that keep the same slots.
  void collect(std::span<Sequence* const> sequences, int first, int last, Stream& stream);
  /// The next of them, of a KV head, in the order of the tokens.
  std::span<const float> next(const HeadState& head) noexcept;

 private:
  void add_mean(const Sequence& sequence, int layer, size_t head, size_t& floats);

  const CacheTraits& traits_;
  bool wanted_;
  std::vector<SlotWeights> step_sums_;
  std::vector<const float*> lists_;
  std::vector<MeanJob> means_;
  FloatSpace collected_;
  FloatSpace on_host_;          // the same
  size_t read_ = 0;             // of on_host_
  std::vector<float> ordered_;  // of one KV head
};

}  // namespace kvlm
