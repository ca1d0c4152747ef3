#include "vision/siglip_vit.h"

namespace kvlm {

namespace {

constexpr VitNames kNames = {
    .patch = "embeddings.patch_embedding",
    .class_token = {},
    .positions = "embeddings.position_embedding.weight",
    .pre_norm = {},
    .layer = "encoder.layers",
    .norm1 = "layer_norm1",
    .norm2 = "layer_norm2",
    .q = "self_attn.q_proj",
    .k = "self_attn.k_proj",
    .v = "self_attn.v_proj",
    .out = "self_attn.out_proj",
    .q_norm = {},
    .k_norm = {},
    .scale1 = {},
    .fc1 = "mlp.fc1",
    .fc2 = "mlp.fc2",
    .scale2 = {},
};

}  // namespace

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
  return make_vit(vit, kNames, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
