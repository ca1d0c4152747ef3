#include "vision/clip_vit.h"

namespace kvlm {

namespace {

constexpr VitNames kNames = {
    .class_token = "embeddings.class_embedding",
    .pre_norm = "pre_layrnorm",  // sic
};

}  // namespace

std::unique_ptr<VisionEncoder> make_clip_vit(const ClipConfig& config, WeightMap& weights,
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
  vit.pre_norm = true;
  vit.feature_layers = config.feature_layers;
  vit.keep_class_token = config.keep_class_token;
  return make_vit(vit, kNames, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
