#pragma once

#include <span>

#include "kvcache/quantizer.h"

namespace kvlm {

/// Slots that one quantizer a layer packs (or none).
struct ScopeClaim {
  std::span<const Quantizer* const> packers;  ///< (layers,); null: full rows
  double slots = 0;                           ///< how many there are, in any unit
};

/// The papers' own figure: the width of codes alone, mean over layers and over keys and values;
/// codes of another layer cost nothing. Where some slots of a layer are packed and others are not,
/// it is that of the packed ones, as the papers count; of two scopes that are packed differently,
/// the mean by slots.
double nominal_bits(std::span<const ScopeClaim> scopes, DType rows, const ShareMap& share);

}  // namespace kvlm
