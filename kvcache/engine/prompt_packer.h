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

/// Prompt rows that the KV heads of a layer keep in a store, ascending: one list for all of them,
/// or one for each.
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

/// By KvSide, the rows of every KV head that are packed.
using KeptRows = std::array<std::vector<DenseRows>, 2>;

/// Packs the oldest of the rows that a prompt leaves into planes, which are empty
/// (docs/formulas.md, "Windows").
class PromptPacker {
 public:
  PromptPacker(const CacheTraits& traits, KeyBasisChange& key_basis,
               ProtectedValues& protected_values);

  /// How many of the rows that each KV head keeps in a store are packed, the oldest.
  std::vector<int> packed_rows(size_t store, KvSide side, int layer, const KeptSlots& slots) const;
  /// Whether the rows that are packed must be floats in every KV head: they are changed before, or
  /// all heads of a layer share a range.
  bool wants_floats(size_t store, KvSide side, int layer) const noexcept;
  /// Gives these rows of a layer their place, where run() packs them.
  void pack(const Sequence& sequence, LayerState& state, int layer, size_t store,
            const KeptSlots& slots, const KeptRows& rows, Stream& stream);
  void run(Stream& stream) { queue_.run(stream); }
  /// Forgets what a step that has failed has left.
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
