#pragma once

#include <optional>
#include <span>

#include "kernels/decode_table.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// The runs of a KV head's side that a DecodeTable is told of once.
struct FixedRuns {
  int most = 0;
  bool host_windows = false;  ///< some are of windows that the host flushes
};

/// Room that a DecodeTable needs for the sequences that are open.
TableLoad table_load(const CacheTraits& traits, std::span<const Sequence> sequences,
                     const Workload& load, const FixedRuns& runs);

/// Whether a DecodeTable can find the rows of a sequence that are packed without asking where each
/// lies: none was evicted.
bool lies_evenly(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Whether a DecodeTable can serve a sequence as it is now.
bool fits_table(const CacheTraits& traits, const Sequence& sequence) noexcept;

/// Which rows of a layer the next step drops one of, by attention weights; null: none of them may
/// go.
std::optional<LeastWeight> least_weight(const CacheTraits& traits, const Sequence& sequence,
                                        int layer) noexcept;

}  // namespace kvlm
