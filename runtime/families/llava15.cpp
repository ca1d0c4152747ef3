#include "runtime/families/llava15.h"

#include <array>
#include <utility>

#include "runtime/families/llava_parts.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/text_files.h"
#include "vision/normalization.h"

namespace kvlm {

namespace {

constexpr std::array kDecoders = {DecoderType::kLlama, DecoderType::kMistral, DecoderType::kQwen2};
constexpr LlavaDefaults kDefaults{"clip_vision_model", kDecoders, -2, "default", 32000};
constexpr std::array kProcessors = {ImageProcessor::kLlava, ImageProcessor::kClip,
                                    ImageProcessor::kSiglip};

/// The prompt of the Hugging Face conversions, for checkpoints that carry no template of their own:
/// "USER: <image>\nQUESTION ASSISTANT:".
constexpr std::string_view kTemplate =
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for item in message['content'] if item['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}"
    "{{ item['text'] + ' ' }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}";

class Llava15 final : public LlavaModel {
 public:
  Llava15(const LlavaSource& from, TextFiles text, const PreprocessSpec& preprocess)
      : LlavaModel(from, std::move(text)),
        preprocess_(preprocess),
        normalization_(normalization_table(preprocess)) {
    check_picture_size(preprocess, from.config.image_size());
  }

  VisualText picture_text(const PictureShape& /*shape*/, size_t /*pictures*/) const override {
    return {std::string(kLlavaImageToken), {{.rows = tile_rows()}}};
  }
  VisualInput prepare(const Image& image, size_t /*pictures*/) const override {
    const Image fitted = fit(image, preprocess_);
    return {cut_tiles({&fitted, 1}, patches(), normalization_), tile_rows()};
  }

 private:
  PreprocessSpec preprocess_;
  NormalizationTable normalization_;
};

}  // namespace

CacheShape llava15_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse_llava_config(ConfigReader(config, "config.json"), kDefaults).text);
}

std::unique_ptr<Model> load_llava15(ModelSource source, const LoadOptions& options,
                                    Stream& stream) {
  const ConfigReader config(source.config, "config.json");
  const LlavaConfig llava = parse_llava_config(config, kDefaults);
  refuse_unused(options, "LLaVA-1.5", {.tiles = true, .pixels = true, .anyres = true});
  const PlaceholderToken image{{llava.image_id, std::string(kLlavaImageToken)},
                               "image_token_index"};
  TextFiles text = read_text_files(source, config, llava.decoder, {&image, 1}, kTemplate);
  const PreprocessSpec preprocess =
      parse_preprocess(read_image_processor(source).reader(), kProcessors, options);
  if (!preprocess.do_center_crop) {
    refuse_unused(options, "one that stretches images to a square", {.crop = true});
  }
  return std::make_unique<Llava15>(LlavaSource{"llava-1.5", source, llava, options, stream},
                                   std::move(text), preprocess);
}

}  // namespace kvlm
