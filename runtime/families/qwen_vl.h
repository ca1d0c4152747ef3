#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "kvcache/kv_cache.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"

namespace kvlm {

/// Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense: a tower for pictures of any size and clips, a Qwen
/// decoder with positions of three axes, from Qwen3-VL on with features of several tower layers.
/// Source: Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".
std::unique_ptr<Model> load_qwen_vl(ModelSource source, const LoadOptions& options, Stream& stream);

/// See Family::cache_shape.
CacheShape qwen_vl_cache_shape(const nlohmann::json& config);

/// The name under which the room knows a tensor, whichever spelling the file uses: visual...,
/// model.layers... (hub, transformers up to 4.51), or transformers' 5.x module tree, which is
/// canonical. "" for tensors that no model reads. Fits WeightMap::rename.
std::string canonical_qwen_vl_name(std::string_view name);

}  // namespace kvlm
