#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/engine/float_space.h"
#include "kvcache/engine/pack_queue.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Values of some visual rows are packed with more bits and lie apart (docs/formulas.md,
/// "Protected tokens"): chooses the rows, packs them, and keeps the bitmap that says which slots
/// they are.
class ProtectedValues {
 public:
  explicit ProtectedValues(const CacheTraits& traits);

  /// Scores of a prompt's rows by their input embeddings, (rows, hidden) on any device; nothing
  /// where no layer protects values.
  std::vector<float> scores(ConstTensorView embeddings, std::span<const int16_t> modality,
                            Stream& stream) const;
  /// Gives a layer its bitmaps of `ever` slots, in `memory` of Layouts::protection_bytes().
  void place(LayerState& state, int layer, std::byte* memory, int64_t ever) const;
  /// Copies the bits of a layer to another one, which has been given its own.
  static void copy_bits(const LayerState& from, LayerState& to) noexcept;
  /// Forgets what a step that has failed has left.
  void clear() noexcept { queue_.clear(); }
  /// Bytes of a layer's bitmaps that are in use.
  static size_t bytes(const LayerState& state) noexcept;

  /// Marks the prompt rows of a KV head that are protected, whenever they are packed.
  ///   rows  the prompt rows that it keeps in kRest
  void choose(const Sequence& sequence, int layer, HeadState& head,
              std::span<const int32_t> rows) const;

  /// Room for `rows` values of `heads` KV heads of a layer that decode packs together.
  void reserve(size_t rows, size_t heads);
  /// Begins a list of values to be packed, `rows` over all KV heads.
  void start(size_t rows);
  /// Adds `rows` values of a KV head's kRest: `old` that are not protected, then those of value
  /// slots from `first` on.
  void add(HeadState& head, const float* values, int old, int rows, int first);
  /// Packs what was added: `packing` says how rows that are not protected are packed.
  void pack(const Packing& packing, const Packing& apart, Stream& stream);

  /// Describes the packed values of kRest to attention, in front of what `runs` has from `first`
  /// on.
  static void add_packed(const HeadState& head, RunList& runs);
  /// Puts unpacked values of both kinds in the order of their slots.
  void interleave(const HeadState& head, const float* plain, const float* apart, float* out,
                  Stream& stream);

  /// Evicts value slot `slot` of kRest; `evict_from` takes a plane and the row in it. erase() is to
  /// follow, once for each bitmap.
  template <class EvictFrom>
  static void evict(HeadState& head, int slot, const EvictFrom& evict_from) {
    StorePlanes& planes = head.stores[kRest];
    if (head.protected_bits == nullptr) return evict_from(planes.values, slot);
    if (slot >= head.packed_values()) {
      return evict_from(planes.values, slot - planes.protected_values.packed());
    }
    const int before = protected_before(head, slot);
    if (is_protected(head, slot)) {
      evict_from(planes.protected_values, before);
    } else {
      evict_from(planes.values, slot - before);
    }
  }
  /// Forgets the bit of a value slot that was evicted.
  static void erase(HeadState& head, int slot) noexcept;

 private:
  static bool is_protected(const HeadState& head, int slot) noexcept {
    return (head.protected_bits[slot / 64] >> (slot % 64) & 1) != 0;
  }
  static int protected_before(const HeadState& head, int slot) noexcept;

  /// Values of a KV head that wait in sorted_: those that are not protected, then the others.
  struct Sorted {
    StorePlanes* planes;
    const float* x;
    int plain;
    int apart;
  };

  const CacheTraits& traits_;
  FloatSpace sorted_;
  size_t sorted_rows_ = 0;
  std::vector<Sorted> heads_;
  std::vector<const std::byte*> rows_;
  PackQueue queue_;
};

}  // namespace kvlm
