#include "runtime/families/internvl.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/base/error.h"
#include "llm/llama.h"
#include "runtime/families/internvl/chat_weights.h"
#include "runtime/families/internvl/config.h"
#include "runtime/families/internvl/conversation.h"
#include "runtime/families/internvl/pixels.h"
#include "runtime/family_model.h"
#include "runtime/loading/text_files.h"
#include "runtime/loading/tokenizer_files.h"
#include "runtime/loading/weight_names.h"
#include "vision/normalization.h"
#include "vision/shuffle_projector.h"

// InternVL in both spellings of its checkpoints: pictures as tiles with a thumbnail, frames of a
// clip as one tile each, what the prompt says around them, and the assembly of tower, projector and
// decoder. internvl/ has configurations, weight names and texts.
namespace kvlm {

namespace {

constexpr std::string_view kVisualToken = "<IMG_CONTEXT>";
constexpr std::string_view kBefore = "<img>";
constexpr std::string_view kAfter = "</img>";
constexpr std::string_view kVideoToken = "<video>";
/// Tower layers after the last one whose output is used.
constexpr std::array<std::string_view, 2> kUnreadTensors = {"model.vision_tower.encoder.layer.",
                                                            "model.vision_tower.layernorm."};

/// What transformers' own conversions render, for checkpoints without a template.
constexpr std::string_view kTemplate =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}"
    "{% elif item['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Frames of a video by a wish of the caller or the processor.
using SampleFrames = std::vector<int64_t> (*)(const VideoInfo&, const SamplingRequest&);

/// What differs between the two spellings of a checkpoint once it is read.
struct InternVlParts {
  InternVlConfig config;
  InternVlPixels pixels;
  TextFiles text;
  std::string_view image_token;  ///< in the text of a conversation
  SampleFrames sample;
};

/// A picture or frame in the text of a prompt; its one visual token becomes the rows of its tiles.
std::string visual_block() { return fmt::format("{}{}{}", kBefore, kVisualToken, kAfter); }

/// The id of a token without which no picture can be shown, or no answer ended.
int32_t required_id(const Tokenizer& tokenizer, std::string_view token, int vocab_size) {
  const auto id = tokenizer.id_of(token);
  if (!id) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("the tokenizer has no token {}, which an InternVL needs; download the "
                            "tokenizer's files from the model's page",
                            token));
  }
  if (*id < vocab_size) return *id;
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("the tokenizer's {} is token {}, but vocab_size of config.json is {}; the "
                  "files do not belong together",
                  token, *id, vocab_size));
}

class InternVl final : public FamilyModel {
 public:
  InternVl(const ModelSource& source, InternVlParts parts, const LoadOptions& options,
           WeightMap& weights, Stream& stream);

  std::string_view image_token() const noexcept override { return image_token_; }
  std::string_view video_token() const noexcept override { return kVideoToken; }
  bool is_visual(int32_t id) const noexcept override { return id == visual_id_; }
  VisualText picture_text(const PictureShape& shape, size_t pictures) const override;
  VisualInput prepare(const Image& image, size_t pictures) const override;
  std::vector<int64_t> sample_frames(const VideoInfo& info,
                                     const SamplingRequest& request) const override;
  VisualText clip_text(const Clip& clip) const override;
  VisualInput prepare_clip(const DecodedClip& clip) const override;
  Image fit_frame(const Clip& clip, Image frame) const override;
  VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                    const Tap& tap) override;

 private:
  size_t visual_weight_bytes() const noexcept override {
    return tower_->weight_bytes() + projector_->weight_bytes();
  }
  VisualInput cut(std::span<const Image> tiles, const NormalizationTable& table) const;

  std::string_view image_token_;
  SampleFrames sample_;
  InternVlPixels pixels_;
  NormalizationTable picture_table_;
  NormalizationTable frame_table_;
  PatchLayout patches_;
  int64_t tile_rows_;
  int32_t visual_id_;
  std::unique_ptr<VisionEncoder> tower_;
  std::unique_ptr<ShuffleProjector> projector_;
  Tensor features_;  // of the tower, from the last call: the next one's, if they are as many
};

InternVl::InternVl(const ModelSource& source, InternVlParts parts, const LoadOptions& options,
                   WeightMap& weights, Stream& stream)
    : FamilyModel(source.name, "internvl", std::move(parts.text)),
      image_token_(parts.image_token),
      sample_(parts.sample),
      pixels_(parts.pixels),
      picture_table_(normalization_table(pixels_.picture)),
      frame_table_(normalization_table(pixels_.frame)),
      patches_{.patch = parts.config.vision.patch_size, .merge = 1, .depth = 1},
      tile_rows_(parts.config.tile_rows()) {
  const InternVlConfig& config = parts.config;
  const int vocab_size = config.text.vocab_size;
  visual_id_ = required_id(tokenizer(), kVisualToken, vocab_size);
  for (const std::string_view token : {kBefore, kAfter}) {
    required_id(tokenizer(), token, vocab_size);
  }
  tower_ = make_intern_vit(config.vision, weights, "model.vision_tower.",
                           tower_workspace_bytes(stream.device()));
  projector_ = std::make_unique<ShuffleProjector>(tower_->width(), config.text.hidden, config.merge,
                                                  config.columns_first, weights,
                                                  "model.multi_modal_projector.");
  set_decoder(make_llama(config.text, weights, "model.language_model."), options);
  refuse_leftovers(weights, kUnreadTensors);
}

VisualText InternVl::picture_text(const PictureShape& shape, size_t /*pictures*/) const {
  const int tiles = dynamic_tile_count(shape.height, shape.width, pixels_.tiling);
  return {visual_block(), {{.rows = tiles * tile_rows_}}};
}

VisualInput InternVl::prepare(const Image& image, size_t /*pictures*/) const {
  const PreprocessSpec& spec = pixels_.picture;
  return cut(dynamic_tiles(image, pixels_.tiling, spec.resample, spec.resize_backend),
             picture_table_);
}

std::vector<int64_t> InternVl::sample_frames(const VideoInfo& info,
                                             const SamplingRequest& request) const {
  return sample_(info, request.fps || request.frames ? request : pixels_.sampling);
}

VisualText InternVl::clip_text(const Clip& clip) const {
  VisualText visual;
  for (size_t frame = 1; frame <= clip.frames.size(); ++frame) {
    visual.text += fmt::format("{}Frame{}: {}", frame > 1 ? "\n" : "", frame, visual_block());
    visual.spans.push_back({.rows = tile_rows_});
  }
  return visual;
}

VisualInput InternVl::prepare_clip(const DecodedClip& clip) const {
  std::vector<Image> tiles;
  for (const Image& frame : clip.frames) tiles.push_back(fit_frame(clip.clip, frame));
  return cut(tiles, frame_table_);
}

Image InternVl::fit_frame(const Clip& /*clip*/, Image frame) const {
  const PreprocessSpec& spec = pixels_.frame;
  const int tile = pixels_.tiling.tile;
  return resize(frame, tile, tile, spec.resample, spec.resize_backend);
}

VisualInput InternVl::cut(std::span<const Image> tiles, const NormalizationTable& table) const {
  return {cut_tiles(tiles, patches_, table), std::ssize(tiles) * tile_rows_};
}

VisualRows InternVl::encode(std::span<const VisualInput* const> visuals, Stream& stream,
                            const Tap& tap) {
  std::vector<const VisualPatches*> patches;
  std::vector<PatchGrid> grids;
  std::vector<int64_t> rows;
  for (const VisualInput* visual : visuals) {
    patches.push_back(&visual->patches);
    grids.insert(grids.end(), visual->patches.grids.begin(), visual->patches.grids.end());
    rows.push_back(visual->rows);
  }
  features_ = tower_->encode(patches, stream, tap, std::move(features_));
  Tensor features = projector_->project(features_, grids, stream);
  if (tap) tap("projector_out", features);
  return pack_visuals(std::move(features), rows, visuals, {}, stream);
}

/// The text files of an original. Its code writes conversations itself, and ends an answer where
/// one of their turns ends, beside what generation_config.json says.
TextFiles read_chat_text(const ModelSource& source, const ConfigReader& config,
                         const InternVlChatConfig& chat) {
  const InternVlConversation& conversation = internvl_conversation(chat.conversation);
  TextFiles text;
  TokenizerConfig tokens = read_tokenizer_config(source);
  text.named_tokens = conversation.variables(chat.system_message);
  text.tokenizer = load_tokenizer(source, std::move(tokens), {});
  text.chat_template =
      std::make_unique<ChatTemplate>(internvl_chat_template(), std::string(conversation.name));
  const nlohmann::json file = read_json(source, "generation_config.json");
  const ConfigReader generation(file, "generation_config.json");
  text.defaults = parse_generation(generation, config);
  std::vector<int32_t>& ends = text.defaults.eos_ids;
  const int32_t end = required_id(*text.tokenizer, kInternVlEnd, chat.model.text.vocab_size);
  if (std::ranges::find(ends, end) == ends.end()) ends.push_back(end);
  text.defaults.sampling.rules.eos_ids = ends;
  return text;
}

std::unique_ptr<Model> assemble(ModelSource& source, InternVlParts parts,
                                const LoadOptions& options, Stream& stream) {
  WeightMap& weights = source.weights;
  prepare_weights(weights, options, stream);
  return std::make_unique<InternVl>(source, std::move(parts), options, weights, stream);
}

constexpr UnusedOptions kUnusedOptions = {.aspect = true, .pixels = true};

}  // namespace

CacheShape internvl_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse_internvl_config(ConfigReader(config, "config.json")).model.text);
}

CacheShape internvl_chat_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(
      parse_internvl_chat_config(ConfigReader(config, "config.json")).model.text);
}

std::unique_ptr<Model> load_internvl(ModelSource source, const LoadOptions& options,
                                     Stream& stream) {
  refuse_unused(options, "InternVL", kUnusedOptions);
  const ConfigReader config(source.config, "config.json");
  const InternVlHfConfig hf = parse_internvl_config(config);
  const PlaceholderToken image{{hf.image_id, std::string(kVisualToken)}, "image_token_id"};
  InternVlParts parts{hf.model, read_internvl_pixels(source, hf.model, options),
                      read_text_files(source, config, hf.decoder, {&image, 1}, kTemplate),
                      kVisualToken, &sample_frames_internvl};
  source.weights.rename(&canonical_llava_name);
  return assemble(source, std::move(parts), options, stream);
}

std::unique_ptr<Model> load_internvl_chat(ModelSource source, const LoadOptions& options,
                                          Stream& stream) {
  refuse_unused(options, "InternVL", kUnusedOptions);
  const ConfigReader config(source.config, "config.json");
  const InternVlChatConfig chat = parse_internvl_chat_config(config);
  InternVlParts parts{chat.model, read_internvl_chat_pixels(source, chat.tiling, options),
                      read_chat_text(source, config, chat), "<image>",
                      &sample_frames_internvl_original};
  source.weights.rename(&canonical_internvl_chat_name);
  unpack_internvl_chat(source.weights, chat);
  return assemble(source, std::move(parts), options, stream);
}

}  // namespace kvlm
