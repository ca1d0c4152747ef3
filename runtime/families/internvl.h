#pragma once

#include <memory>

#include "kvcache/kv_cache.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// InternVL 2, 2.5, 3 and 3.5: tiles of a picture through InternViT, four patches to a row, and a
/// LLaMA-type decoder. As transformers saves them (`-hf`).
/// Source: Chen et al. 2024, "How Far Are We to GPT-4V?" and "Expanding Performance Boundaries".
std::unique_ptr<Model> load_internvl(ModelSource source, const LoadOptions& options,
                                     Stream& stream);
/// The same models as OpenGVLab publishes them.
std::unique_ptr<Model> load_internvl_chat(ModelSource source, const LoadOptions& options,
                                          Stream& stream);

/// See Family::cache_shape.
CacheShape internvl_cache_shape(const nlohmann::json& config);
CacheShape internvl_chat_cache_shape(const nlohmann::json& config);

}  // namespace kvlm
