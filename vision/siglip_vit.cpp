#include "vision/siglip_vit.h"

namespace kvlm {

std::unique_ptr<VisionEncoder> make_siglip_vit(const SiglipConfig& config, WeightMap& weights,
                                               const std::string& prefix, size_t workspace_bytes) {
  VitConfig vit;
  vit.hidden = config.hidden;
  vit.intermediate = config.intermediate;
  vit.layers = config.layers;
  vit.heads = config.heads;
  vit.image_size = config.image_size;
  vit.patch_size = config.patch_size;
  vit.eps = config.eps;
  vit.activation = config.activation;
  vit.class_token = false;
  vit.patch_bias = true;
  vit.feature_layers = config.feature_layers;
  return make_vit(vit, VitNames{}, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
