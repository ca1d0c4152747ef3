#pragma once

#include <optional>
#include <span>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Room that a DecodeTable needs for the sequences that are open.
TableLoad table_load(const CacheTraits& traits, std::span<const Sequence> sequences,
                     const Workload& load);

/// Sequence.places of a sequence as it is now, whose prompt has ended: what placed_load() and
/// table_counts() go by.
int most_places(const Sequence& sequence) noexcept;

/// What it needs to place a sequence as it is now (TableLane.placed).
TableLoad placed_load(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Whether a DecodeTable can count the rows of a sequence as it is now, and drop those that its
/// rule drops: else it is Sequence.told_anew.
bool table_counts(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Whether the lanes of a sequence that the table counts will be placed: some packed row has gone,
/// or may go by its weight. Once they are they stay so: what attention adds in which order does not
/// change.
bool will_be_placed(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Which rows of a layer the next step drops one of, by attention weights; null: none of them may
/// go.
std::optional<LeastWeight> least_weight(const CacheTraits& traits, const Sequence& sequence,
                                        int layer) noexcept;

}  // namespace kvlm
