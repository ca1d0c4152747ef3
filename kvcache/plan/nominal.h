#pragma once

#include <span>

#include "kvcache/quantizer.h"

namespace kvlm {

/// Tokens of one scope, packed by at most one quantizer per layer.
struct ScopeClaim {
  std::span<const Quantizer* const> packers;  ///< (layers,); null: unpacked
  double slots = 0;                           ///< number of slots, in any unit
};

/// Bits per number as the papers count: codes alone, mean over layers and over keys and values.
/// Codes of another layer cost nothing. If a layer packs only one scope, that scope counts; of two
/// scopes that are packed differently, the mean by slots.
double nominal_bits(std::span<const ScopeClaim> scopes, DType rows, const ShareMap& share);

}  // namespace kvlm
