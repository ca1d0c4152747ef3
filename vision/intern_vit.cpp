#include "vision/intern_vit.h"

namespace kvlm {

namespace {

constexpr VitNames kNames = {
    .patch = "embeddings.patch_embeddings.projection",
    .class_token = "embeddings.cls_token",
    .positions = "embeddings.position_embeddings",
    .final_norm = "layernorm",
    .layer = "encoder.layer",
    .norm1 = "layernorm_before",
    .norm2 = "layernorm_after",
    .q = "attention.q_proj",
    .k = "attention.k_proj",
    .v = "attention.v_proj",
    .out = "attention.projection_layer",
    .q_norm = "attention.q_norm",
    .k_norm = "attention.k_norm",
    .scale1 = "lambda_1",
    .scale2 = "lambda_2",
    .batched_tables = true,
};

}  // namespace

std::unique_ptr<VisionEncoder> make_intern_vit(const InternVitConfig& config, WeightMap& weights,
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
  vit.norm = config.norm;
  vit.patch_bias = true;
  vit.qkv_bias = config.qkv_bias;
  vit.qk_norm = config.qk_norm;
  vit.final_norm = config.final_norm;
  vit.layer_scale = true;
  vit.feature_layers = {config.feature_layer};
  return make_vit(vit, kNames, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
