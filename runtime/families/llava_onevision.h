#pragma once

#include <memory>

#include "kvcache/kv_cache.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// LLaVA-OneVision: SigLIP tower, Qwen2 decoder; a picture alone in its prompt is tiled, one of
/// several is a square, and so is a frame of a clip. Source: Li et al. 2024, "LLaVA-OneVision: Easy
/// Visual Task Transfer".
std::unique_ptr<Model> load_llava_onevision(ModelSource source, const LoadOptions& options,
                                            Stream& stream);

/// See Family::cache_shape.
CacheShape llava_onevision_cache_shape(const nlohmann::json& config);

}  // namespace kvlm
