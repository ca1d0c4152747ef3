#pragma once

#include <memory>

#include "kvcache/kv_cache.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// LLaVA-1.5 and what shares its layout: a picture becomes the features of one tile. Published with
/// CLIP and SigLIP towers and with LLaMA, Mistral and Qwen2 decoders. Source: Liu et al. 2023,
/// "Improved Baselines with Visual Instruction Tuning".
std::unique_ptr<Model> load_llava15(ModelSource source, const LoadOptions& options, Stream& stream);

/// See Family::cache_shape.
CacheShape llava15_cache_shape(const nlohmann::json& config);

}  // namespace kvlm
