#pragma once

#include <vector>

#include "kvcache/plan/formula.h"
#include "kvcache/spec/policy.h"

namespace kvlm {

/// Longest prompt over which retention rules are run.
inline constexpr int kExactTokens = 1 << 16;

/// A prompt of so many tokens.
struct PromptSize {
  int tokens = 0;
  int visual = 0;
};

/// What a spec takes right after a prompt, without running anything.
struct Estimate {
  std::vector<LayerCounts> counts;  ///< (layers,)
  std::vector<PartBytes> layers;    ///< (layers,)
  PartBytes parts;                  ///< their sum
  size_t f16_bytes = 0;             ///< of plain f16 rows of all tokens
  double stored_bits = 0;           ///< 8 * bytes / elements of all tokens
  double nominal_bits = 0;          ///< the policy's own claim: codes only, times slots kept
  double slots = 0;                 ///< rows kept, mean over layers
  /// Retention looks at attention, which an estimate has not got: layers are given what they would
  /// keep if every token were attended alike, and visual tokens their share of it.
  bool even_attention = false;
  /// The prompt is longer than kExactTokens: what layers keep is extrapolated from shorter prompts.
  bool extrapolated = false;
};

/// Throws Error{kUnsupported} if `spec` cannot serve a decoder of this shape.
Estimate estimate(const CacheSpec& spec, const CacheShape& shape, const PromptSize& prompt,
                  const PolicyProfile* profile = nullptr);

}  // namespace kvlm
