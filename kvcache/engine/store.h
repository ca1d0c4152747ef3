#pragma once

#include <cstddef>
#include <memory>
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

/// The sequences of a cache and their bytes in its arena, which other caches may share.
class SequenceStore {
 public:
  SequenceStore(const CacheTraits& traits, std::shared_ptr<Arena> arena, const Placement& placement,
                const DecodeWeights& weights, const SinkRotation& sinks);

  /// Whether open() finds memory for such a sequence.
  bool fits(const SequenceSize& size) const;
  /// Admits a sequence. Throws Error{kOutOfMemory} naming `who`; then nothing has changed.
  SequenceId open(const SequenceSize& size, const std::string& who);
  /// Allocates the host's state of a sequence for the next open(), unless a closed one left some.
  void prepare_next();
  /// Admits a copy of a prompted sequence, with at most `max_rows` tokens. The host must have
  /// counted the parent. Throws as open() does.
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream);
  void close(SequenceId id) noexcept;
  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }
  /// Prefetches what a decode step reads of a sequence into the processor's caches: here its first
  /// cache lines. prefetch_counts() follows their pointers, in a later pass over the batch.
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
  static constexpr size_t kAhead = 8;  ///< sequences between prefetch and use
  /// All sequences, open or not.
  std::span<Sequence> all() noexcept { return sequences_; }
  /// The largest step of the open sequences.
  Workload workload() const noexcept;

  /// Recomputes the bytes of a sequence's K and V buffers.
  static void count_buffers(Sequence& sequence) noexcept;
  /// Reports the sequence's bytes to the arena.
  void account(Sequence& sequence) const noexcept;

  /// Bytes in use, of all sequences.
  size_t bytes() const noexcept { return used_; }
  /// Memory of a sequence, without guarded_remaps.
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
  std::shared_ptr<Arena> arena_;
  size_t used_ = 0;  // bytes, by all extents of `sequences_`
  std::vector<Sequence> sequences_;
  std::vector<LayerState> next_layers_;  // prepare_next()
};

}  // namespace kvlm
