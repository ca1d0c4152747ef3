#pragma once

#include <string>

#include "kvcache/kv_cache.h"

namespace kvlm {

/// What the decoder of `model` (as -m takes it) needs from a cache, from its configuration alone: a
/// folder needs no weights. Throws Error as find_model(), synthetic_config() and Family do.
CacheShape model_shape(const std::string& model);

}  // namespace kvlm
