#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/activation.h"
#include "kernels/weight_map.h"
#include "vision/encoder.h"

namespace kvlm {

/// A vision transformer over tiles of one size: what CLIP, SigLIP and InternViT have and have not.
///
///   x = patches . W (+ b); x = [class ; x] + positions; x = norm(x) if pre_norm
///   x += scale1 * out(attention(norm1(x))); x += scale2 * fc2(act(fc1(norm2(x))))   each layer
struct VitConfig {
  int hidden = 768;
  int intermediate = 3072;
  int layers = 12;
  int heads = 12;
  int image_size = 224;
  int patch_size = 32;
  float eps = 1e-5f;
  Activation activation = Activation::kQuickGelu;
  enum class Norm : uint8_t { kLayer, kRms };
  Norm norm = Norm::kLayer;
  bool class_token = true;
  bool patch_bias = false;
  bool pre_norm = false;
  bool qkv_bias = true;
  bool qk_norm = false;      ///< rms_norm of q and of k, over all heads together
  bool final_norm = false;   ///< a norm after the last layer, of the state that is returned
  bool layer_scale = false;  ///< scale1 and scale2; without them, 1
  /// Which hidden states are returned, side by side on the channel axis: 0 is the input of the
  /// first layer, i the output of layer i; negative counts from the end.
  std::vector<int> feature_layers = {-1};
  /// The class token's row comes first among a tile's features; else it is left out.
  bool keep_class_token = false;
};

/// What a tower's tensors are called: those of layer i are `layer`.i.NAME. Norms and products have
/// .weight and .bias; tables and scales have their names alone; what a tower has not is empty. As
/// they stand, the names that CLIP and SigLIP have in common in transformers 5.
struct VitNames {
  std::string_view patch = "embeddings.patch_embedding";
  std::string_view class_token = {};
  std::string_view positions = "embeddings.position_embedding.weight";
  std::string_view pre_norm = {}, final_norm = {};
  std::string_view layer = "encoder.layers";
  std::string_view norm1 = "layer_norm1", norm2 = "layer_norm2";
  std::string_view q = "self_attn.q_proj", k = "self_attn.k_proj", v = "self_attn.v_proj";
  std::string_view out = "self_attn.out_proj";
  std::string_view q_norm = {}, k_norm = {};
  std::string_view scale1 = {};
  std::string_view fc1 = "mlp.fc1", fc2 = "mlp.fc2";
  std::string_view scale2 = {};
  bool batched_tables = false;  ///< the class token is (1, 1, hidden), positions (1, rows, hidden)
};

/// Takes the tensors below `prefix` that the selected states need. `workspace_bytes`, see
/// tower_workspace_bytes(). Throws Error{kCorruptFile} for a feature layer outside the tower.
/// Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words".
std::unique_ptr<VisionEncoder> make_vit(const VitConfig& config, const VitNames& names,
                                        WeightMap& weights, const std::string& prefix,
                                        size_t workspace_bytes);

}  // namespace kvlm
