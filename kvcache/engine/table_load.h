#pragma once

#include <optional>
#include <span>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Capacity that a DecodeTable needs for the open sequences.
TableLoad table_load(const CacheTraits& traits, std::span<const Sequence> sequences,
                     const Workload& load);

/// Sequence.places of a sequence after its prompt, for placed_load() and table_counts().
int most_places(const Sequence& sequence) noexcept;

/// Capacity that a DecodeTable needs to evict from this sequence in place (TableHead.placed).
TableLoad placed_load(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// A DecodeTable can count the tokens of this sequence and evict what its rule evicts. Otherwise
/// the sequence is Sequence.told_anew.
bool table_counts(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// The KV heads will evict in place: a packed token was evicted, or may be by weight.
/// This never reverts, so that the order of summation in attention does not change.
bool will_be_placed(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Candidates for the next step's eviction by attention weight in a layer; null if there are none.
std::optional<LeastWeight> least_weight(const CacheTraits& traits, const Sequence& sequence,
                                        int layer) noexcept;

}  // namespace kvlm
