#pragma once

#include <memory>
#include <string>

#include "kernels/weight_map.h"
#include "vision/vit.h"

namespace kvlm {

/// The shape of a SigLIP tower.
struct SiglipConfig {
  int hidden = 768;
  int intermediate = 3072;
  int layers = 12;
  int heads = 12;
  int image_size = 224;
  int patch_size = 16;
  float eps = 1e-6f;
  Activation activation = Activation::kGeluTanh;
  /// Which hidden states are returned, see VitConfig::feature_layers.
  std::vector<int> feature_layers = {-1};
};

/// A SigLIP tower from canonical names (those of transformers 5), which are CLIP's: no class token,
/// no norm before the first layer or after the last. Pixels beyond the last whole patch are not its
/// concern. `workspace_bytes`, see tower_workspace_bytes().
/// Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training".
std::unique_ptr<VisionEncoder> make_siglip_vit(const SiglipConfig& config, WeightMap& weights,
                                               const std::string& prefix, size_t workspace_bytes);

}  // namespace kvlm
