#pragma once

#include <cstddef>

#include "kvcache/kv_cache.h"
#include "runtime/generator.h"
#include "runtime/model.h"

namespace kvlm {

/// Makes a GPU take the memory that it will need later, and load its kernels: one image through the
/// tower, one prompt of `rows` tokens, or of as many as the cache has room for, and steps of 1, 2,
/// 4, ... up to `sequences` sequences. What follows finds its buffers there. The cache, which must
/// be empty, is so again. Throws Error{kOutOfMemory}.
void warm_up(Model& model, const KvCache& cache, Generator& generator, size_t sequences, int rows);

}  // namespace kvlm
