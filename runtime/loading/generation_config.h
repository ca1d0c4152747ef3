#pragma once

#include <cstdint>
#include <vector>

#include "llm/sampler.h"
#include "runtime/loading/config.h"

namespace kvlm {

/// What generation_config.json says.
struct GenerationDefaults {
  std::vector<int32_t> eos_ids;
  SamplerOptions sampling;
  int max_tokens = 128;
};

/// generation_config.json; eos ids fall back to the model's config, and are empty where neither has
/// any. Sampling only if do_sample.
/// Throws Error{kUnsupported} naming a key that would change the answers and is not built.
GenerationDefaults parse_generation(const ConfigReader& generation, const ConfigReader& model);

}  // namespace kvlm
