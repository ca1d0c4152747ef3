#pragma once

#include <string_view>

#include "kernels/base/device.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/plan/cache_plan.h"

namespace kvlm {

class CacheTraits;

/// Why no prompt can follow the first in a cache of `plan` on `device`; empty if one can.
std::string_view why_one_prompt(const CachePlan& plan, Device device) noexcept;

/// Refuses rows that a sequence cannot take now. Throws Error{kInvalidArgument} for more rows than
/// were announced, Error{kUnsupported} for what the policies cannot do, with the cure.
void check_rows(const CacheTraits& traits, const Sequence& sequence, const StepRows& rows);

/// Refuses a fork (KvCache::fork) of a sequence that holds `rows` tokens.
///   prompted  it is open, and its first prompt has ended
void check_fork(bool prompted, int rows, int max_rows);

}  // namespace kvlm
