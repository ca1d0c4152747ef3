#include "runtime/loading/clip_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

namespace kvlm {

ClipConfig parse_clip_config(const ConfigReader& vision, const ConfigReader& model) {
  // LLaVA's own default tower is CLIP-L/14-336; a vision_config without sizes is CLIP's class
  // default.
  const bool absent = !model.has("vision_config");
  const std::string type = vision.string("model_type", "clip_vision_model");
  if (type != "clip_vision_model") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model_type is \"{}\"; the tower built in for this family is "
                            "clip_vision_model",
                            vision.path(), printable(type)));
  }
  ClipConfig clip;
  clip.hidden = field(vision, "hidden_size", absent ? 1024 : 768, kMaxWidth);
  clip.intermediate = field(vision, "intermediate_size", absent ? 4096 : 3072, kMaxWidth);
  clip.layers = field(vision, "num_hidden_layers", absent ? 24 : 12, kMaxLayers);
  clip.heads = field(vision, "num_attention_heads", absent ? 16 : 12, kMaxWidth);
  clip.image_size = field(vision, "image_size", absent ? 336 : 224, kMaxEdge);
  clip.patch_size = field(vision, "patch_size", absent ? 14 : 32, kMaxEdge);
  clip.eps = static_cast<float>(vision.number("layer_norm_eps", 1e-5, 0, 1));
  clip.activation = parse_activation(vision, "hidden_act", "quick_gelu");
  if (clip.hidden % clip.heads != 0) {
    vision.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", clip.heads));
  }
  if (clip.patch_size > clip.image_size) {
    vision.fail("patch_size", fmt::format("at most image_size {}", clip.image_size));
  }

  const nlohmann::json& layer = model.raw("vision_feature_layer");
  if (layer.is_array()) {
    clip.feature_layers.clear();
    for (const nlohmann::json& entry : layer) {
      if (!entry.is_number_integer()) model.fail("vision_feature_layer", "integers");
      clip.feature_layers.push_back(static_cast<int>(
          std::clamp<int64_t>(entry.get<int64_t>(), -kMaxLayers - 1, kMaxLayers + 1)));
    }
    if (clip.feature_layers.empty()) model.fail("vision_feature_layer", "at least one layer");
  } else {
    clip.feature_layers = {
        static_cast<int>(model.integer("vision_feature_layer", -2, -kMaxLayers, kMaxLayers))};
  }
  const std::string strategy = model.string("vision_feature_select_strategy", "default");
  if (strategy != "default" && strategy != "full") {
    model.fail("vision_feature_select_strategy", "default or full");
  }
  clip.keep_class_token = strategy == "full";
  return clip;
}

}  // namespace kvlm
