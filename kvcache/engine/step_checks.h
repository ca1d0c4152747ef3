#pragma once

#include <string_view>

#include "kernels/base/device.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/plan/cache_plan.h"

namespace kvlm {

class CacheTraits;

/// Why no prompt can follow the first in a cache of `plan` on `device`; empty if one can.
std::string_view why_one_prompt(const CachePlan& plan, Device device) noexcept;

/// Checks that a sequence can take these tokens. Throws Error{kInvalidArgument} if they exceed
/// max_rows, Error{kUnsupported} with the cure if the policies cannot store them.
void check_rows(const CacheTraits& traits, const Sequence& sequence, const StepRows& rows);

/// Checks KvCache::fork() of a sequence with `rows` tokens.
///   prompted  the sequence is open, and its first prompt has ended
void check_fork(bool prompted, int rows, int max_rows);

}  // namespace kvlm
