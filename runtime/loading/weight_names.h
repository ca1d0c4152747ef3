#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/weight_map.h"

namespace kvlm {

/// The name under which the project knows a tensor of a LLaVA-type checkpoint (LLaVA, LLaVA-NeXT,
/// OneVision and InternVL as saved by transformers), whichever spelling the file uses:
///   transformers up to 4.57     language_model.model.layers..., vision_tower.vision_model...
///   transformers from 5.0       the same, or vision_tower.encoder..., or the canonical names
///   the original repositories   model.layers..., model.mm_projector.0, model.vision_tower
///                               .vision_tower.vision_model...
/// Canonical is transformers' 5.x module tree: lm_head, model.language_model,
/// model.multi_modal_projector, model.image_newline, model.vision_tower. Idempotent. An unknown
/// name comes back as it is, so that it is reported as unexpected under its own spelling.
///
/// Returns "" for tensors that no model reads: rotary caches, position_ids, and the towers'
/// post_layernorm, pooling head and visual_projection. Fits WeightMap::rename.
std::string canonical_llava_name(std::string_view name);

/// Tensors that nobody took mean a checkpoint of another shape: throws Error{kCorruptFile} naming
/// one, unless its name starts with one of `unread` (tower layers after the last whose output is
/// used).
void refuse_leftovers(const WeightMap& weights, std::span<const std::string_view> unread);

}  // namespace kvlm
