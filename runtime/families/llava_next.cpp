#include "runtime/families/llava_next.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/families/anyres.h"
#include "runtime/families/llava_parts.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/text_files.h"

namespace kvlm {

namespace {

constexpr std::array kDecoders = {DecoderType::kLlama, DecoderType::kMistral, DecoderType::kQwen2};
constexpr LlavaDefaults kDefaults{"clip_vision_model", kDecoders, -2, "default", 32000};
constexpr std::array kProcessors = {ImageProcessor::kLlavaNext};

Pinpoints default_pinpoints() {
  return {{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}};
}

class LlavaNext final : public LlavaModel {
 public:
  LlavaNext(const LlavaSource& from, TextFiles text, AnyresPictures pictures)
      : LlavaModel(from, std::move(text)), pictures_(std::move(pictures)) {}

  VisualText picture_text(const PictureShape& shape, size_t /*pictures*/) const override {
    return {std::string(kLlavaImageToken), {{.rows = pictures_.rows(shape)}}};
  }
  VisualInput prepare(const Image& image, size_t /*pictures*/) const override {
    return pictures_.prepare(image);
  }

 private:
  AnyresPictures pictures_;
};

LlavaConfig parse(const ConfigReader& config) {
  const LlavaConfig llava = parse_llava_config(config, kDefaults);
  require_rows_of_patches(config, llava);
  return llava;
}

}  // namespace

CacheShape llava_next_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse(ConfigReader(config, "config.json")).text);
}

std::unique_ptr<Model> load_llava_next(ModelSource source, const LoadOptions& options,
                                       Stream& stream) {
  const ConfigReader config(source.config, "config.json");
  const LlavaConfig llava = parse(config);
  refuse_unused(options, "LLaVA-NeXT", {.aspect = true, .tiles = true, .pixels = true});
  const PlaceholderToken image{{llava.image_id, std::string(kLlavaImageToken)},
                               "image_token_index"};
  TextFiles text = read_text_files(source, config, llava.decoder, {&image, 1}, {});
  const ProcessorFile file = read_image_processor(source);
  const PreprocessSpec spec = parse_preprocess(file.reader(), kProcessors, options);
  const int tile = llava.image_size();
  check_picture_size(spec, tile);
  // The whole picture is resized to `size`, the others are cut by `crop_size`.
  if (std::max({spec.shortest_edge, spec.resize_height, spec.resize_width}) != tile) {
    file.reader().fail("size", fmt::format("{} pixels, as crop_size", tile));
  }
  AnyresTiling tiling;
  tiling.tile = tile;
  tiling.pinpoints = read_pinpoints(config, file.reader(), tile, default_pinpoints());
  return std::make_unique<LlavaNext>(
      LlavaSource{"llava-next", source, llava, options, stream, /*newline=*/true}, std::move(text),
      AnyresPictures(spec, std::move(tiling), llava.patch_size()));
}

}  // namespace kvlm
