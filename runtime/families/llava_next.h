#pragma once

#include <memory>

#include "kvcache/kv_cache.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// LLaVA-NeXT, also called LLaVA-1.6: LLaVA-1.5 over the tiles of a picture. Published with LLaMA
/// (Vicuna, Yi, Llama 3), Mistral and Qwen1.5 decoders. Source: Liu et al. 2024, "LLaVA-NeXT:
/// Improved reasoning, OCR, and world knowledge".
std::unique_ptr<Model> load_llava_next(ModelSource source, const LoadOptions& options,
                                       Stream& stream);

/// See Family::cache_shape.
CacheShape llava_next_cache_shape(const nlohmann::json& config);

}  // namespace kvlm
