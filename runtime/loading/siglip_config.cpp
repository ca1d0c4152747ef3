#include "runtime/loading/siglip_config.h"

#include "runtime/loading/fields.h"

namespace kvlm {

SiglipConfig parse_siglip_config(const ConfigReader& vision, bool absent) {
  // LLaVA-OneVision's own default tower is so400m-384 without its last layer.
  SiglipConfig siglip;
  siglip.hidden = field(vision, "hidden_size", absent ? 1152 : 768, kMaxWidth);
  siglip.intermediate = field(vision, "intermediate_size", absent ? 4304 : 3072, kMaxWidth);
  siglip.layers = field(vision, "num_hidden_layers", absent ? 26 : 12, kMaxLayers);
  siglip.heads = field(vision, "num_attention_heads", absent ? 16 : 12, kMaxWidth);
  siglip.image_size = field(vision, "image_size", absent ? 384 : 224, kMaxEdge);
  siglip.patch_size = field(vision, "patch_size", absent ? 14 : 16, kMaxEdge);
  siglip.eps = static_cast<float>(vision.number("layer_norm_eps", 1e-6, 0, 1));
  siglip.activation = parse_activation(vision, "hidden_act", "gelu_pytorch_tanh");
  check_tower(vision, siglip.hidden, siglip.heads, siglip.image_size, siglip.patch_size);
  return siglip;
}

}  // namespace kvlm
