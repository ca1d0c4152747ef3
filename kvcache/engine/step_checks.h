#pragma once

#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Refuses rows that a sequence cannot take now. Throws Error{kInvalidArgument} for more rows than
/// were announced, Error{kUnsupported} for what the policies cannot do, with the cure.
void check_rows(const CacheTraits& traits, const Sequence& sequence, const StepRows& rows);

}  // namespace kvlm
