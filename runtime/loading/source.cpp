#include "runtime/loading/source.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/loading/config.h"

namespace kvlm {

void prepare_weights(WeightMap& weights, const LoadOptions& options, Stream& stream) {
  if (options.dtype) weights.convert(*options.dtype);
  weights.place_on(stream);
  weights.round(options.rounding, options.rounded);
  if (options.exact_activations) weights.keep_activations();
}

nlohmann::json read_json(const ModelSource& source, const std::string& file) {
  const auto text = source.file(file);
  if (!text) return nlohmann::json::object();
  nlohmann::json content = parse_json(*text, file);
  ConfigReader(content, file);  // refuses what is no object
  return content;
}

void refuse_unused(const LoadOptions& options, std::string_view family, UnusedOptions unused) {
  const auto refuse = [&](std::string_view option, std::string_view whose) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is for {} models, and this one is {}; leave it out", option, whose,
                            family));
  };
  const auto aspect_is = [&](ImageAspect aspect, bool named) {
    return (unused.aspect || named) && options.image_aspect == aspect;
  };
  if (aspect_is(ImageAspect::kCrop, unused.crop)) refuse("--image-aspect crop", "LLaVA-1.5");
  if (aspect_is(ImageAspect::kPad, unused.pad)) {
    refuse("--image-aspect pad", "LLaVA-1.5 and LLaVA-OneVision");
  }
  if (aspect_is(ImageAspect::kAnyres, unused.anyres)) {
    refuse("--image-aspect anyres", "LLaVA-OneVision");
  }
  if (unused.tiles && options.max_tiles) refuse("--tiles", "InternVL");
  if (unused.pixels && options.min_pixels) refuse("--min-pixels", "Qwen-VL");
  if (unused.pixels && options.max_pixels) refuse("--max-pixels", "Qwen-VL");
}

}  // namespace kvlm
