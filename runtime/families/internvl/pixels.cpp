#include "runtime/families/internvl/pixels.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/image_processor.h"

namespace kvlm {

namespace {

constexpr int kMostTiles = 1024;  // as dynamic_grid()
constexpr std::array kImageNetMean = {0.485, 0.456, 0.406};
constexpr std::array kImageNetStd = {0.229, 0.224, 0.225};

/// What a caller asks for in place of the most tiles of the files.
void limit_tiles(DynamicTiling& tiling, const LoadOptions& options) {
  if (!options.max_tiles) return;
  const int most = *options.max_tiles;
  if (most < tiling.min_tiles || most > kMostTiles) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "--tiles is {}; expected {} to {}, the most tiles that an image may be cut into", most,
            tiling.min_tiles, kMostTiles));
  }
  tiling.max_tiles = most;
}

/// Refuses processors of another kind: what a file leaves out is different for each.
void check_type(const ConfigReader& processor, std::string_view key, std::string_view expected) {
  const std::string type = processor.string(key, expected);
  std::string_view name = type;
  for (const std::string_view backend : {"Fast", "Pil"}) {
    if (name.ends_with(backend)) name.remove_suffix(backend.size());
  }
  if (name == expected) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: {} is \"{}\"; supported for this family is {}", processor.path(),
                          key, printable(type), expected));
}

/// Tiles and frames are of the one size that the tower takes.
PreprocessSpec parse_tile(const ConfigReader& processor, int tile, const LoadOptions& options) {
  const PreprocessSpec spec = parse_pixel_values(processor, {}, options);
  if (!spec.do_resize) {
    processor.fail("do_resize", "true: tiles are always resized");
  }
  const ConfigReader size = processor.object("size");
  for (const char* key : {"height", "width"}) {
    if (size.integer(key, 384, 1, kMaxEdge) != tile) {
      size.fail(key, fmt::format("{}, vision_config.image_size of config.json", tile));
    }
  }
  return spec;
}

SamplingRequest parse_sampling(const ConfigReader& video) {
  if (!video.boolean("do_sample_frames", false)) return {};
  const nlohmann::json& shift = video.raw("initial_shift");
  if (!shift.is_null() && shift != true) {
    video.fail("initial_shift", "true: frames are taken from the middle of their segments");
  }
  SamplingRequest sampling;
  if (video.has("num_frames")) sampling.frames = video.required_integer("num_frames", 1, 1 << 15);
  if (video.has("fps") && !sampling.frames) sampling.fps = video.required_number("fps", 1e-6, 1e6);
  return sampling;
}

}  // namespace

InternVlPixels read_internvl_pixels(const ModelSource& source, const InternVlConfig& model,
                                    const LoadOptions& options) {
  const nlohmann::json both = read_json(source, "processor_config.json");
  check_tile_rows(ConfigReader(both, "processor_config.json"), model);
  const int tile = model.vision.image_size;
  InternVlPixels pixels;
  const ProcessorFile image = read_image_processor(source);
  const ConfigReader processor = image.reader();
  check_type(processor, "image_processor_type", "GotOcr2ImageProcessor");
  pixels.picture = parse_tile(processor, tile, options);
  // crop_to_patches is not asked: the processor turns it on whatever the file says.
  pixels.tiling.tile = tile;
  pixels.tiling.min_tiles = static_cast<int>(processor.integer("min_patches", 1, 1, 1024));
  pixels.tiling.max_tiles =
      static_cast<int>(processor.integer("max_patches", 12, pixels.tiling.min_tiles, 1024));
  limit_tiles(pixels.tiling, options);

  const ProcessorFile video = read_video_processor(source);
  if (video.path == image.path) {
    pixels.frame = pixels.picture;
    return pixels;
  }
  check_type(video.reader(), "video_processor_type", "InternVLVideoProcessor");
  pixels.frame = parse_tile(video.reader(), tile, options);
  pixels.sampling = parse_sampling(video.reader());
  return pixels;
}

InternVlPixels read_internvl_chat_pixels(const ModelSource& source, const DynamicTiling& tiling,
                                         const LoadOptions& options) {
  InternVlPixels pixels;
  pixels.tiling = tiling;
  limit_tiles(pixels.tiling, options);
  const nlohmann::json file = read_json(source, "preprocessor_config.json");
  PreprocessSpec absent;
  absent.mean = kImageNetMean;
  absent.std = kImageNetStd;
  PreprocessSpec& spec = pixels.picture;
  spec = parse_pixel_values(ConfigReader(file, "preprocessor_config.json"), absent, options);
  spec.do_rescale = spec.do_normalize = true;
  spec.resize_backend = options.image_backend.value_or(ResizeBackend::kPil);
  spec.normalize_backend = NormalizeBackend::kToTensor;
  pixels.frame = spec;
  return pixels;
}

}  // namespace kvlm
