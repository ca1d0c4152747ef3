#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kvcache/arena.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/protected_values.h"
#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

/// The sequences of a cache, the arena that their memory comes from, and its account.
class SequenceStore {
 public:
  SequenceStore(const CacheTraits& traits, size_t arena_bytes, const DecodeWeights& weights,
                const ProtectedValues& protected_values, const SinkRotation& sinks);

  /// Admits a sequence. Throws Error{kOutOfMemory} naming `who`; then nothing has changed.
  SequenceId open(const SequenceSize& size, const std::string& who);
  void close(SequenceId id) noexcept;
  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }
  /// Those that are not open as well.
  std::span<Sequence> all() noexcept { return sequences_; }
  /// The largest step of the sequences that are open.
  Workload workload() const noexcept;

  /// Gives the planes of a layer their memory, when its prompt has ended.
  ///   counts  (kv_heads,) rows that go to each store
  ///   forget  LayerSelection.forget
  void place(Sequence& sequence, int layer, std::span<const std::array<int, kStores>> counts,
             double forget) const;
  /// Counts the bytes of a sequence's planes from the start.
  static void count_planes(Sequence& sequence) noexcept;
  /// Tells the arena what a sequence uses.
  void account(Sequence& sequence) const noexcept;

  /// Bytes in use, of all sequences.
  size_t bytes() const noexcept { return arena_.used(); }
  /// What a sequence occupies; guarded_remaps is left to others.
  CacheReport report(const Sequence& sequence) const noexcept;

 private:
  void reserve(Sequence& sequence, const SequenceSize& size, const std::string& who);
  void place_stores(Sequence& sequence, int layer, size_t head,
                    const std::array<int, kStores>& counts, int most) const;
  void place_plane(Sequence& sequence, Plane& plane, const Plane::Layout& layout,
                   const PlaneCapacity& capacity, const Plane* owner) const;
  const Plane* owner_of(const Sequence& sequence, int layer, size_t head, size_t store,
                        Part part) const noexcept;
  double nominal_bits_of(const Sequence& sequence) const;

  const CacheTraits& traits_;
  const DecodeWeights& weights_;
  const ProtectedValues& protected_values_;
  const SinkRotation& sinks_;
  Arena arena_;
  std::vector<Sequence> sequences_;
};

}  // namespace kvlm
