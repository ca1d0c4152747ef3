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
  /// Admits a sequence of at most `max_rows` rows that holds what a prompted one holds, counted on
  /// the host. Throws as open() does.
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream);
  void close(SequenceId id) noexcept;
  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }
  /// Asks the processor's caches for what a step of decode reads of a sequence: the first of it
  /// here, what that points to by prefetch_counts(), in a later pass over the batch.
  void prefetch(SequenceId id) const noexcept {
    const auto* at = reinterpret_cast<const std::byte*>(&this->at(id));
    __builtin_prefetch(at);
    __builtin_prefetch(at + 64);
  }
  void prefetch_counts(SequenceId id) const noexcept {
    const Sequence& sequence = at(id);
    __builtin_prefetch(sequence.memory.get());
    for (const GainedRows& rows : sequence.gained) __builtin_prefetch(&rows);
  }
  static constexpr size_t kAhead = 8;  ///< sequences between asking and reading
  /// Those that are not open as well.
  std::span<Sequence> all() noexcept { return sequences_; }
  /// The largest step of the sequences that are open.
  Workload workload() const noexcept;

  /// Gives the planes of a layer their memory, when its prompt has ended.
  ///   counts  (kv_heads,) rows that go to each store
  void place(Sequence& sequence, int layer, std::span<const std::array<int, kStores>> counts) const;
  /// Gives a layer that keeps every row as it comes room for all of them, when its first rows come.
  /// Does nothing if it has that room.
  void place_rows(Sequence& sequence, int layer) const;
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
  /// A plane of a KV head, as place() makes it.
  struct Site {
    int layer;
    size_t head;
    size_t store;
    Plane StorePlanes::*side;
    Plane::Layout layout;
    PlaneCapacity capacity;

    Plane& in(Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
    const Plane& in(const Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
  };

  size_t free_slot() const noexcept;
  SequenceId admit(Sequence sequence);
  template <class Body>
  void for_planes(const Sequence& sequence, int layer, const Body& body) const;
  int most_slots(const Sequence& sequence, int layer) const noexcept;
  int most_rows(const Sequence& sequence, int layer) const noexcept;
  void prepare_heads(Sequence& sequence, int layer) const;
  void place_extras(Sequence& sequence, int layer) const;
  void place_plane(Sequence& sequence, const Site& site, const PlaneCapacity& capacity) const;
  std::byte* take_rest(Sequence& sequence, size_t bytes) const noexcept;
  const Plane* owner_of(const Sequence& sequence, const Site& site) const noexcept;
  Sequence fork_counts(const Sequence& parent, int max_rows) const;
  PlaneCapacity forked_capacity(const Sequence& parent, const Sequence& made,
                                const Site& site) const noexcept;
  bool blocks_stay(const Site& site) const noexcept;
  size_t forked_bytes(const Sequence& parent, const Sequence& made) const;
  void fork_layer(Sequence& parent, Sequence& made, int layer,
                  std::vector<ByteRange>& copies) const;
  void fork_extras(const Sequence& parent, Sequence& made, int layer,
                   std::vector<ByteRange>& copies) const;
  double nominal_bits_of(const Sequence& sequence) const;

  const CacheTraits& traits_;
  const DecodeWeights& weights_;
  const ProtectedValues& protected_values_;
  const SinkRotation& sinks_;
  Arena arena_;
  std::vector<Sequence> sequences_;
};

}  // namespace kvlm
