#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/engine/pack_queue.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

/// Prompt tokens that a layer keeps in one store, ascending: one list for all KV heads, or one per
/// KV head.
class KeptSlots {
 public:
  explicit KeptSlots(size_t lists = 1) : lists_(lists) {}

  std::vector<int32_t>& list(size_t index) { return lists_[index]; }
  const std::vector<int32_t>& operator[](size_t head) const {
    return lists_[lists_.size() > 1 ? head : 0];
  }

 private:
  std::vector<std::vector<int32_t>> lists_;
};

/// By KvSide: the tokens to pack, of every KV head.
using KeptRows = std::array<std::vector<DenseRows>, 2>;

/// Packs the oldest kept tokens of a prompt into empty K and V buffers (docs/formulas.md,
/// "Windows").
class PromptPacker {
 public:
  PromptPacker(const CacheTraits& traits, KeyBasisChange& key_basis,
               ProtectedValues& protected_values);

  /// How many of the kept tokens of each KV head are packed, oldest first.
  std::vector<int> packed_rows(size_t store, KvSide side, int layer, const KeptSlots& slots) const;
  /// The tokens to pack must be gathered as floats: they are transformed first, or all KV heads of
  /// the layer share a range.
  bool wants_floats(size_t store, KvSide side, int layer) const noexcept;
  /// Queues the tokens of a layer; run() packs them.
  void pack(const Sequence& sequence, LayerState& state, int layer, size_t store,
            const KeptSlots& slots, const KeptRows& rows, Stream& stream);
  void run(Stream& stream) { queue_.run(stream); }
  /// Clears the queue after a failed step.
  void clear() noexcept { queue_.clear(); }

 private:
  void pack_once(const Sequence& sequence, LayerState& state, int layer, const KeptSlots& slots,
                 const KeptRows& rows);
  void pack_oldest(const Sequence& sequence, LayerState& state, int layer, size_t store,
                   const KeptSlots& slots, const KeptRows& rows, Stream& stream);
  void pack_side(LayerState& state, int layer, size_t store, KvSide side,
                 std::span<const DenseRows> rows, std::span<const int> packed);
  void pack_keys_in_basis(LayerState& state, int layer, size_t store,
                          std::span<const DenseRows> keys, std::span<const int> packed,
                          Stream& stream);
  void pack_protected(const Sequence& sequence, LayerState& state, int layer,
                      const KeptSlots& slots, std::span<const DenseRows> values,
                      std::span<const int> packed, Stream& stream);

  const CacheTraits& traits_;
  KeyBasisChange& key_basis_;
  ProtectedValues& protected_values_;
  PackQueue queue_;
};

}  // namespace kvlm
