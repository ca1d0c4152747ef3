#pragma once

#include "kvcache/spec/policy.h"
#include "kvcache/spec/spec.h"
#include "tools/kv/estimate.h"

namespace kvlm {

/// The spec whose retention rule keeps as much as makes the cache of such a prompt take `bits` for
/// each element of all its tokens, so that rules are compared at equal bytes: keep= is solved to
/// four decimals, and evict=, unless written, is score (window with a quantizer) where the rule
/// would evict nothing in decode. A spec without a retention rule is returned as it is. Throws
/// Error{kInvalidArgument} if the spec has keep= already, its rule has none, or no keep= reaches
/// `bits`.
CacheSpec at_equal_bits(const CacheSpec& spec, double bits, const CacheShape& shape,
                        const PromptSize& prompt, const PolicyProfile* profile);

}  // namespace kvlm
