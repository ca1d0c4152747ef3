#pragma once

#include <memory>
#include <string>

#include "kernels/weight_map.h"
#include "vision/vit.h"

namespace kvlm {

/// The shape of an InternViT: 300M has layer norms and biases of q, k and v; 6B has rms norms, also
/// of q and k, and no such biases.
struct InternVitConfig {
  int hidden = 1024;
  int intermediate = 4096;
  int layers = 24;
  int heads = 16;
  int image_size = 448;
  int patch_size = 14;
  float eps = 1e-6f;
  Activation activation = Activation::kGelu;
  VitConfig::Norm norm = VitConfig::Norm::kLayer;
  bool qkv_bias = true;
  bool qk_norm = false;
  bool final_norm = false;  ///< "layernorm" after the last layer: towers without mean pooling
  int feature_layer = -1;   ///< which hidden state is returned, see VitConfig::feature_layers
};

/// An InternViT from canonical names (those of transformers 5): `prefix` + "embeddings.cls_token",
/// "embeddings.patch_embeddings.projection.weight", "encoder.layer.N...". The class token's row is
/// left out of the features. `workspace_bytes`, see tower_workspace_bytes().
/// Source: Chen et al. 2024, "InternVL", sec. 3.1; Gao et al. 2024, "Mini-InternVL".
std::unique_ptr<VisionEncoder> make_intern_vit(const InternVitConfig& config, WeightMap& weights,
                                               const std::string& prefix, size_t workspace_bytes);

}  // namespace kvlm
