#include "runtime/families/llava_onevision.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "runtime/families/anyres.h"
#include "runtime/families/llava_parts.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/image_processor.h"
#include "runtime/loading/text_files.h"
#include "vision/feature_map.h"

// LLaVA-OneVision: one picture as anyres tiles whose feature maps may be made smaller, several
// pictures as squares, clips as pooled frames; what it shares with the other LLaVAs is in
// llava_parts.h and anyres.h.
namespace kvlm {

namespace {

constexpr std::string_view kVideoToken = "<video>";
constexpr std::array kDecoders = {DecoderType::kQwen2};
constexpr LlavaDefaults kDefaults{"siglip_vision_model", kDecoders, -1, "full", 151646};
constexpr int kVideoId = 151647;
constexpr std::array kProcessors = {ImageProcessor::kLlavaOnevision};

struct OnevisionConfig {
  LlavaConfig llava;
  int32_t video_id;
  int max_tiles;
};

/// The number of vision_aspect_ratio "anyres_max_9".
int parse_max_tiles(const ConfigReader& config) {
  constexpr std::string_view kKey = "vision_aspect_ratio";
  constexpr std::string_view kBefore = "anyres_max_";
  const std::string text = config.string(kKey, "anyres_max_9");
  int tiles = 0;
  const char* end = text.data() + text.size();
  if (text.starts_with(kBefore)) {
    const auto read = std::from_chars(text.data() + kBefore.size(), end, tiles);
    if (read.ec == std::errc() && read.ptr == end && tiles >= 1) return tiles;
  }
  config.fail(kKey, "anyres_max_N, with the number of tiles whose features are kept whole");
}

OnevisionConfig parse(const ConfigReader& config) {
  OnevisionConfig onevision;
  onevision.llava = parse_llava_config(config, kDefaults);
  require_rows_of_patches(config, onevision.llava);
  onevision.video_id = parse_visual_id(config, "video", kVideoId, onevision.llava.text.vocab_size);
  onevision.max_tiles = parse_max_tiles(config);
  return onevision;
}

/// All of 1 x 1 to 6 x 6 tiles.
Pinpoints default_pinpoints() {
  constexpr int kTile = 384;
  Pinpoints pinpoints;
  for (int rows = 1; rows <= 6; ++rows) {
    for (int columns = 1; columns <= 6; ++columns) {
      pinpoints.push_back({rows * kTile, columns * kTile});
    }
  }
  return pinpoints;
}

/// Pictures of one tile each, or frames of a clip.
struct Squares {
  PreprocessSpec spec;
  NormalizationTable normalization;

  explicit Squares(const PreprocessSpec& from)
      : spec(from), normalization(normalization_table(from)) {}

  VisualPatches cut(std::span<const Image> images, const PatchLayout& patches) const {
    std::vector<Image> fitted;
    fitted.reserve(images.size());
    for (const Image& image : images) fitted.push_back(fit(image, spec));
    return cut_tiles(fitted, patches, normalization);
  }
};

/// What a clip takes of its video if nobody asks: all frames, unless the file says otherwise.
SamplingRequest parse_sampling(const ConfigReader& processor) {
  SamplingRequest request;
  if (!processor.boolean("do_sample_frames", false)) return request;
  if (processor.has("fps")) request.fps = processor.required_number("fps", 1e-6, 1e6);
  if (processor.has("num_frames")) {
    request.frames = processor.required_integer("num_frames", 1, 32768);
  }
  return request;
}

/// The image's own rows and a newline.
RowBlend with_newline(int64_t rows) {
  RowBlend blend;
  for (int64_t row = 0; row <= rows; ++row) blend.indices.push_back(static_cast<int32_t>(row));
  blend.weights.assign(blend.indices.size(), 1.0f);
  return blend;
}

/// How the features of the frames of a clip become its rows: `side` x `side` of each frame made
/// half as many either way, and a newline behind them all.
RowBlend pack_frames(int64_t frames, int side) {
  const int half = (side + 1) / 2;
  const RowBlend frame = resample_map(side, side, half, half);
  const int64_t features = int64_t{side} * side;
  RowBlend blend;
  blend.terms = frame.terms;
  for (int64_t i = 0; i < frames; ++i) {
    for (const int32_t index : frame.indices) {
      blend.indices.push_back(static_cast<int32_t>(i * features + index));
    }
    blend.weights.insert(blend.weights.end(), frame.weights.begin(), frame.weights.end());
  }
  blend.indices.insert(blend.indices.end(), static_cast<size_t>(frame.terms),
                       static_cast<int32_t>(frames * features));
  blend.weights.push_back(1);
  blend.weights.insert(blend.weights.end(), static_cast<size_t>(frame.terms) - 1, 0.0f);
  return blend;
}

/// The image processors of a checkpoint.
struct OnevisionPictures {
  AnyresPictures tiled;
  Squares squares;
  Squares frames;
  SamplingRequest sampling;
};

class LlavaOnevision final : public LlavaModel {
 public:
  LlavaOnevision(const LlavaSource& from, TextFiles text, const OnevisionConfig& onevision,
                 OnevisionPictures pictures)
      : LlavaModel(from, std::move(text)),
        video_id_(onevision.video_id),
        side_(onevision.llava.patches()),
        aspect_(from.options.image_aspect),
        pictures_(std::move(pictures)) {}

  std::string_view video_token() const noexcept override { return kVideoToken; }
  bool is_visual(int32_t id) const noexcept override {
    return id == video_id_ || LlavaModel::is_visual(id);
  }

  VisualText picture_text(const PictureShape& shape, size_t pictures) const override {
    const int64_t rows = is_tiled(pictures) ? pictures_.tiled.rows(shape) : tile_rows() + 1;
    return {std::string(kLlavaImageToken), {{.rows = rows}}};
  }
  VisualInput prepare(const Image& image, size_t pictures) const override {
    if (is_tiled(pictures)) return pictures_.tiled.prepare(image);
    return {pictures_.squares.cut({&image, 1}, patches()), tile_rows() + 1,
            with_newline(tile_rows())};
  }

  std::vector<int64_t> sample_frames(const VideoInfo& info,
                                     const SamplingRequest& request) const override {
    const bool asked = request.fps || request.frames;
    return kvlm::sample_frames(info, asked ? request : pictures_.sampling);
  }
  VisualText clip_text(const Clip& clip) const override {
    return {std::string(kVideoToken), {{.rows = clip_rows(std::ssize(clip.frames))}}};
  }
  VisualInput prepare_clip(const DecodedClip& clip) const override {
    const int64_t frames = std::ssize(clip.frames);
    return {pictures_.frames.cut(clip.frames, patches()), clip_rows(frames),
            pack_frames(frames, side_)};
  }
  Image fit_frame(const Clip& /*clip*/, Image frame) const override {
    return fit(frame, pictures_.frames.spec);
  }

 private:
  /// As the reference does with the pictures of a conversation.
  bool is_tiled(size_t pictures) const noexcept {
    return aspect_ ? *aspect_ == ImageAspect::kAnyres : pictures == 1;
  }
  int64_t clip_rows(int64_t frames) const noexcept {
    const int64_t half = (side_ + 1) / 2;
    return frames * half * half + 1;
  }

  int32_t video_id_;
  int side_;  // patches along that of a tile
  std::optional<ImageAspect> aspect_;
  OnevisionPictures pictures_;
};

}  // namespace

CacheShape llava_onevision_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse(ConfigReader(config, "config.json")).llava.text);
}

std::unique_ptr<Model> load_llava_onevision(ModelSource source, const LoadOptions& options,
                                            Stream& stream) {
  const ConfigReader config(source.config, "config.json");
  const OnevisionConfig onevision = parse(config);
  const LlavaConfig& llava = onevision.llava;
  refuse_unused(options, "LLaVA-OneVision", {.tiles = true, .pixels = true, .crop = true});
  const std::array placeholders = {
      PlaceholderToken{{llava.image_id, std::string(kLlavaImageToken)}, "image_token_index"},
      PlaceholderToken{{onevision.video_id, std::string(kVideoToken)}, "video_token_index"}};
  TextFiles text = read_text_files(source, config, llava.decoder, placeholders, {});

  LoadOptions plain = options;
  plain.image_aspect.reset();  // of pictures, not of tiles and frames
  const ProcessorFile images = read_image_processor(source);
  const ProcessorFile videos = read_video_processor(source);
  PreprocessSpec image = parse_preprocess(images.reader(), kProcessors, plain);
  const PreprocessSpec frame = parse_preprocess(videos.reader(), kProcessors, plain);
  const int tile = llava.image_size();
  check_picture_size(image, tile);
  check_picture_size(frame, tile);
  AnyresTiling tiling{tile, read_pinpoints(config, images.reader(), tile, default_pinpoints()),
                      onevision.max_tiles};
  AnyresPictures tiled(image, std::move(tiling), llava.patch_size());
  image.do_pad = true;
  OnevisionPictures pictures{std::move(tiled), Squares(image), Squares(frame),
                             parse_sampling(videos.reader())};
  return std::make_unique<LlavaOnevision>(
      LlavaSource{"llava-onevision", source, llava, options, stream, /*newline=*/true},
      std::move(text), onevision, std::move(pictures));
}

}  // namespace kvlm
