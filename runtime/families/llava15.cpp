#include "runtime/families/llava15.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <map>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/llama.h"
#include "runtime/loading/clip_config.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/tokenizer_files.h"
#include "runtime/loading/weight_names.h"
#include "vision/normalization.h"
#include "vision/projector.h"

namespace kvlm {

namespace {

constexpr std::string_view kCaptionPrompt = "Describe the image.";
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

class Llava15 final : public Model {
 public:
  Llava15(ModelSource source, const LoadOptions& options, Stream& stream);

  std::string_view name() const noexcept override { return name_; }
  std::string_view family() const noexcept override { return "llava-1.5"; }
  DType dtype() const noexcept override { return dtype_; }
  size_t weight_bytes() const noexcept override {
    return tower_->weight_bytes() + projector_->weight_bytes() + decoder_->weight_bytes();
  }
  const Tokenizer& tokenizer() const noexcept override { return *tokenizer_; }
  Decoder& decoder() noexcept override { return *decoder_; }
  const GenerationDefaults& defaults() const noexcept override { return defaults_; }
  std::string_view caption_prompt() const noexcept override { return kCaptionPrompt; }
  std::string_view image_token() const noexcept override { return kImageToken; }
  int32_t image_id() const noexcept override { return image_id_; }

  int min_image_tokens() const noexcept override { return image_tokens_; }
  int max_image_tokens() const noexcept override { return image_tokens_; }
  VisualInput prepare(const Image& image) const override;
  VisualRows encode(std::span<const VisualInput* const> pictures, Stream& stream,
                    const Tap& tap) override;
  std::string render(const std::vector<ChatMessage>& messages) const override;

 private:
  std::string name_;
  DType dtype_ = DType::kF32;
  int32_t image_id_ = 0;
  int image_tokens_ = 0;
  PreprocessSpec preprocess_;
  NormalizationTable normalization_;
  PatchLayout patches_;
  GenerationDefaults defaults_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::map<std::string, std::string> named_tokens_;
  std::unique_ptr<ChatTemplate> template_;
  std::unique_ptr<VisionEncoder> tower_;
  std::unique_ptr<MlpProjector> projector_;
  std::unique_ptr<Decoder> decoder_;
};

Llava15::Llava15(ModelSource source, const LoadOptions& options, Stream& stream)
    : name_(source.name) {
  const ConfigReader config(source.config, "config.json");
  const LlavaConfig llava = parse(config);
  image_id_ = llava.image_id;
  preprocess_ = read_preprocess(source, options);
  const nlohmann::json generation = read_json(source, "generation_config.json");
  defaults_ = parse_generation(ConfigReader(generation, "generation_config.json"), config);
  const TokenizerConfig tokens = read_tokenizer_config(source);
  named_tokens_ = tokens.named_tokens;
  const AddedToken placeholder{image_id_, std::string(kImageToken)};
  tokenizer_ = load_tokenizer(source, tokens, placeholder);
  check_placeholder(*tokenizer_, placeholder, "image_token_index");
  template_ = std::make_unique<ChatTemplate>(load_chat_template(source, kTemplate));

  WeightMap& weights = source.weights;
  weights.rename(&canonical_llava_name);
  if (options.dtype) weights.convert(*options.dtype);
  weights.place_on(stream.device());
  tower_ = make_clip_vit(llava.vision, weights, "model.vision_tower.",
                         tower_workspace_bytes(stream.device()));
  projector_ =
      std::make_unique<MlpProjector>(tower_->width(), llava.text.hidden, llava.projector_activation,
                                     llava.projector_bias, weights, "model.multi_modal_projector.");
  decoder_ = make_llama(llava.text, weights, "model.language_model.");
  dtype_ = options.dtype.value_or(decoder_->weight_dtype());
  refuse_leftovers(weights, kUnreadTensors);
  check_picture_size(preprocess_, llava.vision.image_size);
  normalization_ = normalization_table(preprocess_);
  patches_ = {.patch = llava.vision.patch_size, .merge = 1, .depth = 1};
  image_tokens_ = static_cast<int>(
      tower_->tokens(patches_of(1, llava.vision.image_size, llava.vision.image_size, patches_)));
}

VisualInput Llava15::prepare(const Image& image) const {
  const Image fitted = fit(image, preprocess_);
  return {cut_tiles({&fitted, 1}, patches_, normalization_), image_tokens_};
}

VisualRows Llava15::encode(std::span<const VisualInput* const> pictures, Stream& stream,
                           const Tap& tap) {
  std::vector<const VisualPatches*> patches;
  for (const VisualInput* picture : pictures) patches.push_back(&picture->patches);
  VisualRows visual;
  visual.all = projector_->project(tower_->encode(patches, stream, tap), stream);
  if (tap) tap("projector_out", visual.all);
  for (int64_t i = 0; i < std::ssize(pictures); ++i) {
    visual.pictures.push_back(visual.all.view().slice(i * image_tokens_, image_tokens_));
  }
  return visual;
}

std::string Llava15::render(const std::vector<ChatMessage>& messages) const {
  ChatTemplate::Context context;
  context.named_tokens = named_tokens_;
  if (const auto bos = tokenizer_->bos_id()) context.bos_token = tokenizer_->token_of(*bos);
  if (const auto eos = tokenizer_->eos_id()) context.eos_token = tokenizer_->token_of(*eos);
  return template_->render(messages, context);
}

}  // namespace

CacheShape llava15_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse(ConfigReader(config, "config.json")).text);
}

std::unique_ptr<Model> load_llava15(ModelSource source, const LoadOptions& options,
                                    Stream& stream) {
  return std::make_unique<Llava15>(std::move(source), options, stream);
}

}  // namespace kvlm
