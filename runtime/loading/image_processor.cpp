#include "runtime/loading/image_processor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

// preprocessor_config.json and its newer spellings to a PreprocessSpec, with the defaults of each
// class of processor for what the file leaves out.
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

/// What a class has where its file is silent.
struct Defaults {
  ImageProcessor type;
  std::string_view name;  ///< without "ImageProcessor" and what says whose arithmetic
  int side;               ///< of `size`
  bool square;            ///< `size` is that of both sides, not of the shorter one
  bool crops;
  bool pads_to_square;  ///< what do_pad means; else pictures are padded after all that is done here
  std::array<double, 3> mean, std;
};

const Defaults& defaults_of(ImageProcessor type) {
  constexpr std::array<double, 3> kClipMean = PreprocessSpec().mean;
  constexpr std::array<double, 3> kClipStd = PreprocessSpec().std;
  constexpr std::array<double, 3> kHalf{0.5, 0.5, 0.5};
  static constexpr std::array kAll = {
      Defaults{ImageProcessor::kLlava, "Llava", 224, false, true, true, kClipMean, kClipStd},
      Defaults{ImageProcessor::kClip, "CLIP", 224, false, true, false, kClipMean, kClipStd},
      Defaults{ImageProcessor::kSiglip, "Siglip", 224, true, false, false, kHalf, kHalf},
      Defaults{ImageProcessor::kLlavaNext, "LlavaNext", 224, false, true, false, kClipMean,
               kClipStd},
      Defaults{ImageProcessor::kLlavaOnevision, "LlavaOnevision", 384, true, false, false,
               kClipMean, kClipStd}};
  return *std::find_if(kAll.begin(), kAll.end(),
                       [&](const Defaults& entry) { return entry.type == type; });
}

/// What the file calls its class, of pictures or of videos, or by the older name.
std::string class_name(const ConfigReader& processor) {
  for (const char* key :
       {"image_processor_type", "video_processor_type", "feature_extractor_type"}) {
    if (std::string name = processor.string(key, ""); !name.empty()) return name;
  }
  return {};
}

/// Refuses classes that are not built in: what a file leaves out is different for each.
const Defaults& class_of(const ConfigReader& processor, std::span<const ImageProcessor> built_in) {
  const std::string type = class_name(processor);
  if (type.empty()) return defaults_of(built_in.front());
  std::string_view name = type;
  for (const std::string_view suffix :
       {"Fast", "Pil", "ImageProcessor", "VideoProcessor", "FeatureExtractor"}) {
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  }
  std::vector<std::string> names;
  for (const ImageProcessor known : built_in) {
    if (defaults_of(known).name == name) return defaults_of(known);
    names.push_back(fmt::format("{}ImageProcessor", defaults_of(known).name));
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: image_processor_type is \"{}\"; supported for this family are {}",
                          processor.path(), printable(type), fmt::join(names, ", ")));
}

void parse_size(const ConfigReader& processor, const Defaults& absent, PreprocessSpec& spec) {
  const auto set = [&](int side) {
    spec.shortest_edge = absent.square ? 0 : side;
    if (absent.square) spec.resize_height = spec.resize_width = side;
  };
  const nlohmann::json& size = processor.raw("size");
  if (size.is_number() || size.is_null()) {
    return set(static_cast<int>(processor.integer("size", absent.side, 1, kMaxEdge)));
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
      reader.fail(key, "null: a limit on the longer side is not supported for this family");
    }
  }
  spec.shortest_edge = static_cast<int>(reader.integer("shortest_edge", 224, 1, kMaxEdge));
}

/// Whether pictures are padded to a square before all else. do_pad means that to LLaVA's class; to
/// the anyres ones that a batch is filled up with tiles, which none needs here; to the others that
/// pictures of different sizes are padded afterwards, which the tower does not take.
bool parse_pad(const ConfigReader& processor, const Defaults& absent) {
  const bool do_pad = processor.boolean("do_pad", false);
  const bool anyres =
      absent.type == ImageProcessor::kLlavaNext || absent.type == ImageProcessor::kLlavaOnevision;
  if (do_pad && !absent.pads_to_square && !anyres && processor.has("pad_size")) {
    processor.fail("pad_size", "null: padding after the crop is not supported");
  }
  return do_pad && absent.pads_to_square;
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

/// A processor that newer checkpoints keep in one file with the others.
std::optional<ProcessorFile> nested_processor(const ModelSource& source, const std::string& key) {
  constexpr const char* kFile = "processor_config.json";
  const nlohmann::json all = read_json(source, kFile);
  const ConfigReader outer(all, kFile);
  if (!outer.has(key)) return std::nullopt;
  return ProcessorFile{outer.raw(key), outer.object(key).path()};
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
  constexpr const char* kOwn = "preprocessor_config.json";
  if (auto nested = nested_processor(source, "image_processor")) return std::move(*nested);
  ProcessorFile file{read_json(source, kOwn), kOwn};
  if (!file.content.empty()) return file;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{} has no preprocessor_config.json, which says how images are resized "
                          "and normalised; download it from the model's page",
                          source.name));
}

ProcessorFile read_video_processor(const ModelSource& source) {
  constexpr const char* kOwn = "video_preprocessor_config.json";
  if (auto nested = nested_processor(source, "video_processor")) return std::move(*nested);
  if (!source.file(kOwn)) return read_image_processor(source);
  ProcessorFile file{read_json(source, kOwn), kOwn};
  if (!file.content.empty()) return file;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{} is an empty object; expected how videos are resized and normalised: "
                          "download it again",
                          kOwn));
}

PreprocessSpec parse_preprocess(const ConfigReader& processor,
                                std::span<const ImageProcessor> built_in,
                                const LoadOptions& options) {
  const Defaults& absent = class_of(processor, built_in);
  PreprocessSpec silent;
  silent.mean = absent.mean;
  silent.std = absent.std;
  PreprocessSpec spec = parse_pixel_values(processor, silent, options);
  spec.do_center_crop = processor.boolean("do_center_crop", absent.crops);
  spec.do_pad = parse_pad(processor, absent);
  if (options.image_aspect) spec.do_pad = *options.image_aspect == ImageAspect::kPad;
  parse_size(processor, absent, spec);
  parse_crop(processor, spec);
  return spec;
}

void check_picture_size(const PreprocessSpec& preprocess, int image_size) {
  const auto size = fitted_size(preprocess);
  if (size == std::array{image_size, image_size}) return;
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("preprocessor_config.json makes images of {}, but the tower of config.json takes "
                  "{} x {} (vision_config.image_size); the two files do not belong together",
                  size ? fmt::format("{} x {}", (*size)[0], (*size)[1]) : "any size", image_size,
                  image_size));
}

}  // namespace kvlm
