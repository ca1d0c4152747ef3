#include "runtime/loading/clip_config.h"

#include <fmt/format.h>

#include "runtime/loading/fields.h"

namespace kvlm {

ClipConfig parse_clip_config(const ConfigReader& vision, bool absent) {
  // LLaVA's own default tower is CLIP-L/14-336; a vision_config without sizes is CLIP's class
  // default.
  ClipConfig clip;
  clip.hidden = field(vision, "hidden_size", absent ? 1024 : 768, kMaxWidth);
  clip.intermediate = field(vision, "intermediate_size", absent ? 4096 : 3072, kMaxWidth);
  clip.layers = field(vision, "num_hidden_layers", absent ? 24 : 12, kMaxLayers);
  clip.heads = field(vision, "num_attention_heads", absent ? 16 : 12, kMaxWidth);
  clip.image_size = field(vision, "image_size", absent ? 336 : 224, kMaxEdge);
  clip.patch_size = field(vision, "patch_size", absent ? 14 : 32, kMaxEdge);
  clip.eps = static_cast<float>(vision.number("layer_norm_eps", 1e-5, 0, 1));
  clip.activation = parse_activation(vision, "hidden_act", "quick_gelu");
  check_tower(vision, clip.hidden, clip.heads, clip.image_size, clip.patch_size);
  return clip;
}

}  // namespace kvlm
