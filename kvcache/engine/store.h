#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kvcache/arena.h"
#include "kvcache/engine/placement.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/protected_values.h"
#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

/// The sequences of a cache, the arena that their memory comes from, and its account.
class SequenceStore {
 public:
  SequenceStore(const CacheTraits& traits, size_t arena_bytes, const Placement& placement,
                const DecodeWeights& weights, const SinkRotation& sinks);

  /// Admits a sequence. Throws Error{kOutOfMemory} naming `who`; then nothing has changed.
  SequenceId open(const SequenceSize& size, const std::string& who);
  /// Makes the host's part of a sequence for the next open(), if that would have to.
  void prepare_next();
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
    __builtin_prefetch(at + 128);
  }
  void prefetch_counts(SequenceId id) const noexcept {
    const Sequence& sequence = at(id);
    __builtin_prefetch(sequence.memory.get());
    for (const GainedRows& rows : sequence.gained) __builtin_prefetch(&rows);
    for (const DroppingLayers& layers : sequence.dropping) __builtin_prefetch(&layers);
    __builtin_prefetch(sequence.dropping_of.data());
  }
  static constexpr size_t kAhead = 8;  ///< sequences between asking and reading
  /// Those that are not open as well.
  std::span<Sequence> all() noexcept { return sequences_; }
  /// The largest step of the sequences that are open.
  Workload workload() const noexcept;

  /// Counts the bytes of a sequence's planes from the start.
  static void count_planes(Sequence& sequence) noexcept;
  /// Tells the arena what a sequence uses.
  void account(Sequence& sequence) const noexcept;

  /// Bytes in use, of all sequences.
  size_t bytes() const noexcept { return arena_.used(); }
  /// What a sequence occupies; guarded_remaps is left to others.
  ///   visual_slots  GpuDecode::visual_slots()
  CacheReport report(const Sequence& sequence, std::span<const int> visual_slots) const noexcept;

 private:
  void reserve(Sequence& sequence, const SequenceSize& size, const std::string& who);
  size_t free_slot() const noexcept;
  SequenceId admit(Sequence sequence);
  Sequence fork_counts(const Sequence& parent, int max_rows) const;
  double nominal_bits_of(const Sequence& sequence, std::span<const int> visual_slots) const;

  const CacheTraits& traits_;
  const Placement& placement_;
  const DecodeWeights& weights_;
  const SinkRotation& sinks_;
  Arena arena_;
  std::vector<Sequence> sequences_;
  std::vector<LayerState> next_layers_;  // prepare_next()
};

}  // namespace kvlm
