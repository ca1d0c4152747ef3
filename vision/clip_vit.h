#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/activation.h"
#include "kernels/weight_map.h"
#include "vision/vit.h"

namespace kvlm {

/// The shape of a CLIP vision tower.
struct ClipConfig {
  int hidden = 768;
  int intermediate = 3072;
  int layers = 12;
  int heads = 12;
  int image_size = 224;
  int patch_size = 32;
  float eps = 1e-5f;
  Activation activation = Activation::kQuickGelu;
  /// Which hidden states are returned, side by side on the channel axis: 0 is the input of the
  /// first layer, i the output of layer i; negative counts from the end.
  std::vector<int> feature_layers = {-2};
  /// Strategy "full" keeps the class token's row, "default" drops it.
  bool keep_class_token = false;
};

/// A CLIP tower from canonical names (those of transformers 5): `prefix` +
/// "embeddings.class_embedding", "embeddings.patch_embedding.weight", "pre_layrnorm.weight" (sic),
/// "encoder.layers.N...". Layers beyond the last one needed are neither taken nor evaluated.
/// `workspace_bytes`, see tower_workspace_bytes().
/// Source: Radford et al. 2021, "CLIP", sec. 2.4; Dosovitskiy et al. 2021, "ViT".
std::unique_ptr<VisionEncoder> make_clip_vit(const ClipConfig& config, WeightMap& weights,
                                             const std::string& prefix, size_t workspace_bytes);

}  // namespace kvlm
