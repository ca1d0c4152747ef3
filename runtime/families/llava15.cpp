#include "runtime/families/llava15.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/llama.h"
#include "runtime/family_model.h"
#include "runtime/loading/clip_config.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/text_files.h"
#include "runtime/loading/weight_names.h"
#include "vision/normalization.h"
#include "vision/projector.h"

namespace kvlm {

namespace {

constexpr std::string_view kImageToken = "<image>";
constexpr std::array kDecoders = {DecoderType::kLlama, DecoderType::kMistral};
/// Tower layers after the last one whose output is used.
constexpr std::array<std::string_view, 1> kUnreadTensors = {"model.vision_tower.encoder.layers."};

/// The prompt of the Hugging Face conversions, for checkpoints that carry no template of their own:
/// "USER: <image>\nQUESTION ASSISTANT:" (models.md 9.2).
constexpr std::string_view kTemplate =
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for item in message['content'] if item['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}"
    "{{ item['text'] + ' ' }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}";

/// config.json, checked.
struct LlavaConfig {
  LlamaConfig text;
  ClipConfig vision;
  Activation projector_activation;
  bool projector_bias;
  int32_t image_id;
};

LlavaConfig parse(const ConfigReader& config) {
  if (config.has("mm_vision_tower") && !config.has("text_config")) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is of the original LLaVA repository, whose vision tower {} is "
                            "published apart; use the Hugging Face conversion (llava-hf/...)",
                            config.path(), printable(config.string("mm_vision_tower", ""))));
  }
  LlavaConfig llava;
  const ConfigReader text = config.object("text_config");
  llava.text = parse_decoder_config(text, decoder_type(text, kDecoders));
  if (config.boolean("tie_word_embeddings", false)) llava.text.tie_embeddings = true;
  llava.vision = parse_clip_config(config.object("vision_config"), config);
  llava.projector_activation = parse_activation(config, "projector_hidden_act", "gelu");
  llava.projector_bias = config.boolean("multimodal_projector_bias", true);
  const int64_t fallback = config.integer("image_token_index", 32000, 0, llava.text.vocab_size - 1);
  llava.image_id = static_cast<int32_t>(
      config.integer("image_token_id", fallback, 0, llava.text.vocab_size - 1));
  if (llava.image_id >= llava.text.vocab_size) {
    config.fail("image_token_index", fmt::format("0 to {}", llava.text.vocab_size - 1));
  }
  return llava;
}

class Llava15 final : public FamilyModel {
 public:
  Llava15(const ModelSource& source, const LlavaConfig& llava, const LoadOptions& options,
          TextFiles text, WeightMap& weights, Stream& stream);

  std::string_view image_token() const noexcept override { return kImageToken; }
  bool is_visual(int32_t id) const noexcept override { return id == image_id_; }
  VisualText picture_text(const PictureShape& shape, size_t pictures) const override;
  VisualInput prepare(const Image& image, size_t pictures) const override;
  VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                    const Tap& tap) override;

 private:
  size_t visual_weight_bytes() const noexcept override {
    return tower_->weight_bytes() + projector_->weight_bytes();
  }

  int32_t image_id_;
  PreprocessSpec preprocess_;
  NormalizationTable normalization_;
  PatchLayout patches_;
  int64_t image_rows_ = 0;
  std::unique_ptr<VisionEncoder> tower_;
  std::unique_ptr<MlpProjector> projector_;
};

Llava15::Llava15(const ModelSource& source, const LlavaConfig& llava, const LoadOptions& options,
                 TextFiles text, WeightMap& weights, Stream& stream)
    : FamilyModel(source.name, "llava-1.5", std::move(text)),
      image_id_(llava.image_id),
      preprocess_(read_preprocess(source, options)),
      patches_{.patch = llava.vision.patch_size, .merge = 1, .depth = 1} {
  tower_ = make_clip_vit(llava.vision, weights, "model.vision_tower.",
                         tower_workspace_bytes(stream.device()));
  projector_ =
      std::make_unique<MlpProjector>(tower_->width(), llava.text.hidden, llava.projector_activation,
                                     llava.projector_bias, weights, "model.multi_modal_projector.");
  set_decoder(make_llama(llava.text, weights, "model.language_model."), options);
  refuse_leftovers(weights, kUnreadTensors);
  check_picture_size(preprocess_, llava.vision.image_size);
  normalization_ = normalization_table(preprocess_);
  image_rows_ =
      tower_->tokens(patches_of(1, llava.vision.image_size, llava.vision.image_size, patches_));
}

VisualText Llava15::picture_text(const PictureShape& /*shape*/, size_t /*pictures*/) const {
  return {std::string(kImageToken), {{.rows = image_rows_}}};
}

VisualInput Llava15::prepare(const Image& image, size_t /*pictures*/) const {
  const Image fitted = fit(image, preprocess_);
  return {cut_tiles({&fitted, 1}, patches_, normalization_), image_rows_};
}

VisualRows Llava15::encode(std::span<const VisualInput* const> visuals, Stream& stream,
                           const Tap& tap) {
  std::vector<const VisualPatches*> patches;
  for (const VisualInput* visual : visuals) patches.push_back(&visual->patches);
  Tensor features = projector_->project(tower_->encode(patches, stream, tap), stream);
  if (tap) tap("projector_out", features);
  const std::vector<int64_t> rows(visuals.size(), image_rows_);
  return pack_visuals(std::move(features), rows, visuals, {}, stream);
}

}  // namespace

CacheShape llava15_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse(ConfigReader(config, "config.json")).text);
}

std::unique_ptr<Model> load_llava15(ModelSource source, const LoadOptions& options,
                                    Stream& stream) {
  const ConfigReader config(source.config, "config.json");
  const LlavaConfig llava = parse(config);
  refuse_unused(options, "LLaVA-1.5", {.tiles = true, .pixels = true});
  const PlaceholderToken image{{llava.image_id, std::string(kImageToken)}, "image_token_index"};
  TextFiles text = read_text_files(source, config, {&image, 1}, kTemplate);
  WeightMap& weights = source.weights;
  weights.rename(&canonical_llava_name);
  if (options.dtype) weights.convert(*options.dtype);
  weights.place_on(stream.device());
  return std::make_unique<Llava15>(source, llava, options, std::move(text), weights, stream);
}

}  // namespace kvlm
