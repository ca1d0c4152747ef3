#include "runtime/families/qwen_vl/files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/image_processor.h"

// preprocessor files of a Qwen-VL checkpoint: patch sizes that must agree with config.json, and the
// bounds between which a picture's or clip's size is chosen.
namespace kvlm {

namespace {

constexpr int64_t kMostPixels = int64_t{1} << 28;  // of a picture, as smart_resize()
constexpr int64_t kMostBudget = int64_t{1} << 40;  // of a clip
constexpr int64_t kMostTokens = int64_t{1} << 24;  // as capped_frame_budget()
constexpr int64_t kMostFrames = int64_t{1} << 22;  // as open_video()
constexpr std::array<std::string_view, 2> kImageTypes = {"Qwen2VLImageProcessor",
                                                         "Qwen2_5_VLImageProcessor"};

/// Absent, a type is the family's.
void check_type(const ConfigReader& processor, std::string_view key,
                std::span<const std::string_view> built_in) {
  const std::string type = processor.string(key, built_in.front());
  std::string_view name = type;
  for (const std::string_view backend : {"Fast", "Pil"}) {
    if (name.ends_with(backend)) name.remove_suffix(backend.size());
  }
  if (std::find(built_in.begin(), built_in.end(), name) != built_in.end()) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: {} is \"{}\"; supported for this family is {}", processor.path(),
                          key, printable(type), fmt::join(built_in, ", ")));
}

void check_patches(const ConfigReader& processor, const QwenVlConfig& config, int patch) {
  struct Side {
    std::string_view key;
    std::string_view own;  ///< of vision_config
    int fallback;
    int expected;
  };
  for (const Side& side :
       {Side{"patch_size", "patch_size", patch, config.vision.patch_size},
        Side{"merge_size", "spatial_merge_size", 2, config.vision.merge},
        Side{"temporal_patch_size", "temporal_patch_size", 2, config.vision.depth}}) {
    const int64_t found = processor.integer(side.key, side.fallback, 1, kMostPixels);
    if (found == side.expected) continue;
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}: {} is {}, but vision_config.{} of config.json is {}; the two "
                            "files do not belong together",
                            processor.path(), side.key, found, side.own, side.expected));
  }
}

/// size.shortest_edge and size.longest_edge, which count pixels, not edges; `older` are the names
/// that come before them where a processor still reads those.
PixelBudget parse_budget(const ConfigReader& processor, PixelBudget budget, bool older) {
  const auto read = [&](const char* key, const char* older_key, int64_t fallback) {
    if (older && processor.has(older_key)) {
      return processor.required_integer(older_key, 1, kMostBudget);
    }
    if (!processor.has("size")) return fallback;
    return processor.object("size").required_integer(key, 1, kMostBudget);
  };
  budget.min_pixels = read("shortest_edge", "min_pixels", budget.min_pixels);
  budget.max_pixels = read("longest_edge", "max_pixels", budget.max_pixels);
  return budget;
}

void check_option(std::string_view option, const std::optional<int64_t>& pixels, int64_t least) {
  if (!pixels || (*pixels >= least && *pixels <= kMostPixels)) return;
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is {}; expected {} to {} pixels", option,
                                                       *pixels, least, kMostPixels));
}

PixelBudget with_options(PixelBudget budget, const LoadOptions& options) {
  budget.min_pixels = options.min_pixels.value_or(budget.min_pixels);
  budget.max_pixels = options.max_pixels.value_or(budget.max_pixels);
  return budget;
}

/// `path` is where a limit is from that no option gives.
void check_options(const LoadOptions& options, const PixelBudget& budget, int token_side,
                   const std::string& path) {
  check_option("--min-pixels", options.min_pixels, 1);
  check_option("--max-pixels", options.max_pixels, int64_t{token_side} * token_side);
  if (!options.min_pixels && !options.max_pixels) return;
  if (budget.min_pixels <= budget.max_pixels) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("an image would need {} pixels or more ({}), but {} or fewer ({}); give "
                          "--min-pixels and --max-pixels that fit together",
                          budget.min_pixels, options.min_pixels ? "--min-pixels" : path,
                          budget.max_pixels, options.max_pixels ? "--max-pixels" : path));
}

/// What a processor of pictures and one of frames say alike.
PreprocessSpec parse_pixels(const ConfigReader& processor, const PreprocessSpec& absent,
                            const LoadOptions& options) {
  PreprocessSpec spec = parse_pixel_values(processor, absent, options);
  if (!spec.do_resize) {
    processor.fail("do_resize", "true: images of any size are not whole patches");
  }
  if (spec.do_rescale && !(spec.rescale_factor > 0)) {
    processor.fail("rescale_factor", "a positive number, usually 1/255");
  }
  spec.shortest_edge = 0;
  spec.do_center_crop = false;
  return spec;
}

QwenVlPixels read_pictures(const ModelSource& source, const QwenVlConfig& config,
                           const LoadOptions& options) {
  const ProcessorFile found = read_image_processor(source);
  const ConfigReader processor = found.reader();
  check_type(processor, "image_processor_type", kImageTypes);
  check_patches(processor, config, 14);
  const PixelBudget budget = with_options(parse_budget(processor, {}, /*older=*/true), options);
  check_options(options, budget, config.token_side(), processor.path());
  return {parse_pixels(processor, {}, options), budget};
}

/// The reference resizes frames with torchvision, whatever resizes pictures.
QwenVlPixels read_frames(const ConfigReader& processor, const QwenVlConfig& config,
                         LoadOptions options) {
  options.image_backend = ResizeBackend::kTorchvision;
  if (config.generation == QwenVlGeneration::kQwen3) {
    PreprocessSpec half;
    half.mean = half.std = {0.5, 0.5, 0.5};
    check_patches(processor, config, 16);
    return {parse_pixels(processor, half, options),
            parse_budget(processor, {int64_t{128} * 32 * 32, int64_t{768} * 32 * 32},
                         /*older=*/false)};
  }
  check_patches(processor, config, 14);
  const PixelBudget budget =
      parse_budget(processor, {int64_t{128} * 28 * 28, int64_t{768} * 28 * 28}, /*older=*/true);
  return {parse_pixels(processor, {}, options), with_options(budget, options)};
}

QwenVlClips read_clips(const ConfigReader& processor, const QwenVlConfig& config) {
  const bool third = config.generation == QwenVlGeneration::kQwen3;
  const std::string_view type = third ? "Qwen3VLVideoProcessor" : "Qwen2VLVideoProcessor";
  check_type(processor, "video_processor_type", {&type, 1});
  QwenVlClips clips;
  clips.samples = processor.boolean("do_sample_frames", third);
  if (clips.samples && processor.has("num_frames")) {
    processor.fail("num_frames", "null: give the number of frames with --frames");
  }
  clips.sampling.min_frames = processor.integer("min_frames", 4, 1, kMostFrames);
  clips.sampling.max_frames = processor.integer("max_frames", 768, 1, kMostFrames);
  clips.sampling.temporal_patch_size = config.vision.depth;
  clips.sampling.default_fps = processor.number("fps", third ? 2 : 0, 0, 1e6);
  clips.capped = processor.boolean("cap_pixels_per_frame", false);
  clips.max_tokens = processor.integer("max_video_tokens", third ? 768 : 128000, 1, kMostTokens);
  return clips;
}

}  // namespace

QwenVlFiles read_qwen_vl_files(const ModelSource& source, const QwenVlConfig& config,
                               const LoadOptions& options) {
  const ProcessorFile video = read_video_processor(source);
  return {read_pictures(source, config, options), read_frames(video.reader(), config, options),
          read_clips(video.reader(), config)};
}

}  // namespace kvlm
