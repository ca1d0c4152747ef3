#include "runtime/families/llava_parts.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/feature_selection.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/weight_names.h"

namespace kvlm {

namespace {

/// Tower layers after the last one whose output is used.
constexpr std::array<std::string_view, 1> kUnreadTensors = {"model.vision_tower.encoder.layers."};
constexpr const char* kTowerPrefix = "model.vision_tower.";
constexpr std::string_view kStrategy = "vision_feature_select_strategy";

std::variant<ClipConfig, SiglipConfig> parse_tower(const ConfigReader& config,
                                                   const LlavaDefaults& defaults) {
  const FeatureSelection features =
      parse_feature_selection(config, defaults.feature_layer, defaults.feature_strategy);
  const ConfigReader vision = config.object("vision_config");
  const bool absent = !config.has("vision_config");
  const std::string type = vision.string("model_type", defaults.tower);
  if (type == "clip_vision_model") {
    ClipConfig clip = parse_clip_config(vision, absent);
    clip.feature_layers = features.layers;
    clip.keep_class_token = features.keep_first_row;
    return clip;
  }
  if (type == "siglip_vision_model") {
    // The reference leaves out the first row whatever it is.
    if (!features.keep_first_row) {
      config.fail(kStrategy, "full: a SigLIP tower has no class token to leave out");
    }
    SiglipConfig siglip = parse_siglip_config(vision, absent);
    siglip.feature_layers = features.layers;
    return siglip;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: model_type is \"{}\"; supported towers of this family are "
                          "clip_vision_model and siglip_vision_model",
                          vision.path(), printable(type)));
}

std::unique_ptr<VisionEncoder> make_tower(const LlavaConfig& llava, WeightMap& weights) {
  const size_t workspace = tower_workspace_bytes(weights.device());
  if (const auto* clip = std::get_if<ClipConfig>(&llava.tower)) {
    return make_clip_vit(*clip, weights, kTowerPrefix, workspace);
  }
  return make_siglip_vit(std::get<SiglipConfig>(llava.tower), weights, kTowerPrefix, workspace);
}

}  // namespace

int LlavaConfig::image_size() const noexcept {
  return std::visit([](const auto& vit) { return vit.image_size; }, tower);
}

int LlavaConfig::patch_size() const noexcept {
  return std::visit([](const auto& vit) { return vit.patch_size; }, tower);
}

LlavaConfig parse_llava_config(const ConfigReader& config, const LlavaDefaults& defaults) {
  if (config.has("mm_vision_tower") && !config.has("text_config")) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} is a checkpoint of the original LLaVA repository, whose vision tower {} is "
                    "published separately; use the Hugging Face conversion (llava-hf/...)",
                    config.path(), printable(config.string("mm_vision_tower", ""))));
  }
  LlavaConfig llava;
  const ConfigReader text = config.object("text_config");
  llava.decoder = decoder_type(text, defaults.decoders);
  llava.text = parse_decoder_config(text, llava.decoder);
  if (config.boolean("tie_word_embeddings", false)) llava.text.tie_embeddings = true;
  llava.tower = parse_tower(config, defaults);
  llava.projector_activation = parse_activation(config, "projector_hidden_act", "gelu");
  llava.projector_bias = config.boolean("multimodal_projector_bias", true);
  llava.image_id = parse_visual_id(config, "image", defaults.image_id, llava.text.vocab_size);
  return llava;
}

void require_rows_of_patches(const ConfigReader& config, const LlavaConfig& llava) {
  const auto* clip = std::get_if<ClipConfig>(&llava.tower);
  if (clip == nullptr || !clip->keep_class_token) return;
  config.fail(kStrategy,
              "default: the class token of a CLIP tower has no position in a map of tiles");
}

int32_t parse_visual_id(const ConfigReader& config, std::string_view kind, int fallback,
                        int vocab_size) {
  const std::string older = fmt::format("{}_token_index", kind);
  const int64_t id =
      config.integer(fmt::format("{}_token_id", kind),
                     config.integer(older, fallback, 0, vocab_size - 1), 0, vocab_size - 1);
  if (id >= vocab_size) config.fail(older, fmt::format("0 to {}", vocab_size - 1));
  return static_cast<int32_t>(id);
}

LlavaModel::LlavaModel(const LlavaSource& from, TextFiles text)
    : FamilyModel(from.source.name, from.family, std::move(text)), image_id_(from.config.image_id) {
  const LlavaConfig& llava = from.config;
  WeightMap& weights = from.source.weights;
  weights.rename(&canonical_llava_name);
  prepare_weights(weights, from.options, from.stream);

  tower_ = make_tower(llava, weights);
  projector_ =
      std::make_unique<MlpProjector>(tower_->width(), llava.text.hidden, llava.projector_activation,
                                     llava.projector_bias, weights, "model.multi_modal_projector.");
  if (from.newline) newline_ = weights.take_f32("model.image_newline", {llava.text.hidden});
  owners_ = weights.owners();
  set_decoder(make_llama(llava.text, weights, "model.language_model."), from.options);
  refuse_leftovers(weights, kUnreadTensors);

  patches_.patch = llava.patch_size();
  tile_rows_ = tower_->tokens(patches_of(1, llava.image_size(), llava.image_size(), patches_));
}

VisualRows LlavaModel::encode(std::span<const VisualInput* const> visuals, Stream& stream,
                              const Tap& tap) {
  std::vector<const VisualPatches*> patches;
  std::vector<int64_t> rows;
  for (const VisualInput* visual : visuals) {
    patches.push_back(&visual->patches);
    rows.push_back(std::ssize(visual->patches.grids) * tile_rows_);
  }
  features_ = tower_->encode(patches, stream, tap, std::move(features_));
  Tensor features = projector_->project(features_, stream);
  if (tap) tap("projector_out", features);
  return pack_visuals(std::move(features), rows, visuals, newline_, stream);
}

}  // namespace kvlm
