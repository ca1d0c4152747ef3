#include "runtime/loading/image_processor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

namespace kvlm {

namespace {

std::array<double, 3> parse_triple(const ConfigReader& reader, std::string_view key,
                                   const std::array<double, 3>& fallback) {
  const nlohmann::json& value = reader.raw(key);
  if (value.is_null()) return fallback;
  if (value.is_number()) {  // of all three channels
    const auto same = value.get<double>();
    return {same, same, same};
  }
  const bool ok = value.is_array() && value.size() == 3 &&
                  std::all_of(value.begin(), value.end(),
                              [](const nlohmann::json& entry) { return entry.is_number(); });
  if (!ok) reader.fail(key, "a number or three");
  return {value[0].get<double>(), value[1].get<double>(), value[2].get<double>()};
}

void parse_size(const ConfigReader& processor, PreprocessSpec& spec) {
  const nlohmann::json& size = processor.raw("size");
  if (size.is_number()) {
    spec.shortest_edge = static_cast<int>(processor.integer("size", 224, 1, kMaxEdge));
    return;
  }
  const ConfigReader reader = processor.object("size");
  if (reader.has("height") || reader.has("width")) {
    spec.shortest_edge = 0;
    spec.resize_height = static_cast<int>(reader.required_integer("height", 1, kMaxEdge));
    spec.resize_width = static_cast<int>(reader.required_integer("width", 1, kMaxEdge));
    return;
  }
  for (const char* key : {"longest_edge", "max_height", "max_width"}) {
    if (reader.has(key)) {
      reader.fail(key, "null: a limit on the longer side is not built in for this family");
    }
  }
  spec.shortest_edge = static_cast<int>(reader.integer("shortest_edge", 224, 1, kMaxEdge));
}

/// Whether pictures are padded to a square before all else. That is what do_pad means to LLaVA's
/// image processor, which also reads files without a type; to CLIP's it means padding pictures of
/// different sizes afterwards, which the tower does not take. Refuses other processors: what a file
/// leaves out is different for each.
bool pads_to_square(const ConfigReader& processor) {
  std::string type = processor.string("image_processor_type", "");
  if (type.empty()) {  // the older name
    type = processor.string("feature_extractor_type", "LlavaImageProcessor");
    if (const size_t at = type.find("FeatureExtractor"); at != std::string::npos) {
      type.replace(at, std::string_view("FeatureExtractor").size(), "ImageProcessor");
    }
  }
  std::string_view name = type;
  for (const std::string_view backend : {"Fast", "Pil"}) {
    if (name.ends_with(backend)) name.remove_suffix(backend.size());
  }
  if (name != "CLIPImageProcessor" && name != "LlavaImageProcessor") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: image_processor_type is \"{}\"; built in for this family are "
                            "CLIPImageProcessor and LlavaImageProcessor",
                            processor.path(), printable(type)));
  }
  const bool do_pad = processor.boolean("do_pad", false);
  if (name == "LlavaImageProcessor") return do_pad;
  if (do_pad && processor.has("pad_size")) {
    processor.fail("pad_size", "null: padding after the crop is not built in");
  }
  return false;
}

void parse_crop(const ConfigReader& processor, PreprocessSpec& spec) {
  const nlohmann::json& crop = processor.raw("crop_size");
  if (crop.is_number()) {
    spec.crop_height = spec.crop_width =
        static_cast<int>(processor.integer("crop_size", 224, 1, kMaxEdge));
    return;
  }
  const ConfigReader reader = processor.object("crop_size");
  spec.crop_height = static_cast<int>(reader.integer("height", 224, 1, kMaxEdge));
  spec.crop_width = static_cast<int>(reader.integer("width", 224, 1, kMaxEdge));
}

}  // namespace

PreprocessSpec parse_pixel_values(const ConfigReader& processor, const PreprocessSpec& absent,
                                  const LoadOptions& options) {
  PreprocessSpec spec = absent;
  spec.resize_backend = options.image_backend.value_or(ResizeBackend::kTorchvision);
  spec.normalize_backend = spec.resize_backend == ResizeBackend::kPil
                               ? NormalizeBackend::kPil
                               : NormalizeBackend::kTorchvision;
  spec.do_resize = processor.boolean("do_resize", absent.do_resize);
  spec.do_rescale = processor.boolean("do_rescale", absent.do_rescale);
  spec.do_normalize = processor.boolean("do_normalize", absent.do_normalize);
  spec.resample = static_cast<Resample>(
      processor.integer("resample", static_cast<int64_t>(absent.resample), 0, 5));
  spec.rescale_factor = processor.number("rescale_factor", absent.rescale_factor, 0, 1e6);
  spec.mean = parse_triple(processor, "image_mean", absent.mean);
  spec.std = parse_triple(processor, "image_std", absent.std);
  if (std::any_of(spec.std.begin(), spec.std.end(), [](double value) { return !(value > 0); })) {
    processor.fail("image_std", "positive numbers");
  }
  return spec;
}

ProcessorFile read_image_processor(const ModelSource& source) {
  const std::string outer_file = "processor_config.json";
  nlohmann::json outer = read_json(source, outer_file);
  const ConfigReader reader(outer, outer_file);
  if (reader.has("image_processor")) {
    return {reader.raw("image_processor"), outer_file + ": image_processor"};
  }
  const std::string file = "preprocessor_config.json";
  nlohmann::json object = read_json(source, file);
  if (object.empty()) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("{} has no preprocessor_config.json, which says how pictures are resized "
                    "and normalised; download it from the model's page",
                    source.name));
  }
  return {std::move(object), file};
}

ProcessorFile read_video_processor(const ModelSource& source) {
  const std::string outer_file = "processor_config.json";
  nlohmann::json outer = read_json(source, outer_file);
  const ConfigReader reader(outer, outer_file);
  if (reader.has("video_processor")) {
    return {reader.raw("video_processor"), outer_file + ": video_processor"};
  }
  const std::string file = "video_preprocessor_config.json";
  nlohmann::json object = read_json(source, file);
  return object.empty() ? read_image_processor(source) : ProcessorFile{std::move(object), file};
}

PreprocessSpec parse_preprocess(const ConfigReader& processor, const LoadOptions& options) {
  PreprocessSpec spec = parse_pixel_values(processor, {}, options);
  spec.do_center_crop = processor.boolean("do_center_crop", true);
  const bool do_pad = pads_to_square(processor);
  spec.do_pad = options.pad_to_square.value_or(do_pad);
  parse_size(processor, spec);
  parse_crop(processor, spec);
  return spec;
}

PreprocessSpec read_preprocess(const ModelSource& source, const LoadOptions& options) {
  return parse_preprocess(read_image_processor(source).reader(), options);
}

void check_picture_size(const PreprocessSpec& preprocess, int image_size) {
  const auto size = fitted_size(preprocess);
  if (size == std::array{image_size, image_size}) return;
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("preprocessor_config.json makes pictures of {}, but the tower of config.json "
                  "takes {} x {} (vision_config.image_size); the two files do not belong together",
                  size ? fmt::format("{} x {}", (*size)[0], (*size)[1]) : "any size", image_size,
                  image_size));
}

}  // namespace kvlm
