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

/// VidKV packs the values of some visual tokens with more bits, in a buffer of their own
/// (docs/formulas.md, "Protected tokens"). This class chooses them, packs them, and keeps the
/// bitmap of their slots.
class ProtectedValues {
 public:
  explicit ProtectedValues(const CacheTraits& traits);

  /// Scores of a prompt's tokens by their input embeddings, (rows, hidden) on any device. Empty if
  /// no layer protects values.
  std::vector<float> scores(ConstTensorView embeddings, std::span<const int16_t> modality,
                            Stream& stream) const;
  /// Assigns `memory` of Layouts::protection_bytes() to a layer's bitmaps of `ever` slots.
  void place(LayerState& state, int layer, std::byte* memory, int64_t ever) const;
  /// Copies a layer's bits to a fork's layer, which already has memory for them.
  static void copy_bits(const LayerState& from, LayerState& to) noexcept;
  /// Clears the queue after a failed step.
  void clear() noexcept { queue_.clear(); }
  /// Bytes of a layer's bitmaps in use.
  static size_t bytes(const LayerState& state) noexcept;

  /// Marks the protected tokens of a KV head, whether packed now or later.
  ///   rows  prompt rows that it keeps in kRest
  void choose(const Sequence& sequence, int layer, HeadState& head,
              std::span<const int32_t> rows) const;

  /// Allocates for `rows` values of `heads` KV heads that decode packs together.
  void reserve(size_t rows, size_t heads);
  /// Begins a list of values to pack, `rows` over all KV heads.
  void start(size_t rows);
  /// Adds `rows` values of a KV head's kRest: first `old` ones that are not protected, then those
  /// of value slots from `first` on.
  void add(HeadState& head, const float* values, int old, int rows, int first);
  /// Packs the list: protected values by `apart`, others by `packing`.
  void pack(const Packing& packing, const Packing& apart, Stream& stream);

  /// Adds the segments of kRest's packed values.
  static void add_packed(const HeadState& head, SegmentList& segments);
  /// Merges unpacked values of both kinds in slot order.
  void interleave(const HeadState& head, const float* plain, const float* apart, float* out,
                  Stream& stream);

  /// Evicts value slot `slot` of kRest by calling evict_from(buffer, slot in it). Then call
  /// erase(), once per bitmap.
  template <class EvictFrom>
  static void evict(HeadState& head, int slot, const EvictFrom& evict_from) {
    StoreBuffers& buffers = head.stores[kRest];
    if (head.protected_bits == nullptr) return evict_from(buffers.values, slot);
    if (slot >= head.packed_values()) {
      return evict_from(buffers.values, slot - buffers.protected_values.packed());
    }
    const int before = protected_before(head, slot);
    if (is_protected(head, slot)) {
      evict_from(buffers.protected_values, before);
    } else {
      evict_from(buffers.values, slot - before);
    }
  }
  /// Removes the bit of an evicted value slot.
  static void erase(HeadState& head, int slot) noexcept;

 private:
  static bool is_protected(const HeadState& head, int slot) noexcept {
    return (head.protected_bits[slot / 64] >> (slot % 64) & 1) != 0;
  }
  static int protected_before(const HeadState& head, int slot) noexcept;

  /// Values of a KV head in sorted_: unprotected ones, then protected ones.
  struct Sorted {
    StoreBuffers* buffers;
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
