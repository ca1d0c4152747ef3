#include "runtime/families/qwen_vl.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/llama.h"
#include "llm/mrope_positions.h"
#include "runtime/families/qwen_vl/config.h"
#include "runtime/families/qwen_vl/files.h"
#include "runtime/families/qwen_vl/processor.h"
#include "runtime/family_model.h"
#include "runtime/loading/fields.h"
#include "runtime/loading/text_files.h"
#include "runtime/loading/weight_names.h"

// Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, clips in slices with timestamps,
// positions of three axes, and the features that deepstack adds behind the first layers. qwen_vl/
// has configurations and files.
namespace kvlm {

namespace {

constexpr std::string_view kImageToken = "<|image_pad|>";
constexpr std::string_view kVideoToken = "<|video_pad|>";
constexpr std::string_view kVisionStart = "<|vision_start|>";
constexpr std::string_view kVisionEnd = "<|vision_end|>";

/// The prompt of the published templates, for checkpoints that carry none.
constexpr std::string_view kTemplate =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif item['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
/// Before it for Qwen2-VL and Qwen2.5-VL.
constexpr std::string_view kSystemTemplate =
    "{% if messages and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}";

class QwenVl final : public FamilyModel {
 public:
  QwenVl(const ModelSource& source, const QwenVlConfig& qwen, QwenVlProcessor processor,
         const LoadOptions& options, TextFiles text, WeightMap& weights, Stream& stream);

  std::string_view image_token() const noexcept override { return kImageToken; }
  std::string_view video_token() const noexcept override { return kVideoToken; }
  bool is_visual(int32_t id) const noexcept override { return id == image_id_ || id == video_id_; }
  VisualText picture_text(const PictureShape& shape, size_t pictures) const override;
  VisualInput prepare(const Image& image, size_t pictures) const override;
  std::vector<int64_t> sample_frames(const VideoInfo& info,
                                     const SamplingRequest& request) const override {
    return processor_.sample_frames(info, request);
  }
  VisualText clip_text(const Clip& clip) const override;
  VisualInput prepare_clip(const DecodedClip& clip) const override;
  Image fit_frame(const Clip& clip, Image frame) const override {
    return processor_.fit(clip, frame);
  }
  VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                    const Tap& tap) override;
  PromptPositions positions(std::span<const PositionSpan> spans) const override {
    return mrope_positions(spans, rule_);
  }

 private:
  size_t visual_weight_bytes() const noexcept override { return tower_->weight_bytes(); }
  PositionSpan span_of(const PatchGrid& grid, std::vector<int32_t> times) const;
  /// When the slices of a clip are, in positions from its first.
  std::vector<int32_t> times_of(const Clip& clip, int slices) const;
  VisualInput input_of(VisualPatches patches) const;

  QwenVlGeneration generation_;
  int merge_;
  int depth_;
  double tokens_per_second_;
  MropeRule rule_;
  int32_t image_id_;
  int32_t video_id_;
  QwenVlProcessor processor_;
  std::unique_ptr<QwenVit> tower_;
};

QwenVl::QwenVl(const ModelSource& source, const QwenVlConfig& qwen, QwenVlProcessor processor,
               const LoadOptions& options, TextFiles text, WeightMap& weights, Stream& stream)
    : FamilyModel(source.name, qwen.family, std::move(text)),
      generation_(qwen.generation),
      merge_(qwen.vision.merge),
      depth_(qwen.vision.depth),
      tokens_per_second_(qwen.tokens_per_second),
      rule_(options.transformers5 ? MropeRule::kTransformers5 : MropeRule::kTrained),
      image_id_(qwen.image_id),
      video_id_(qwen.video_id),
      processor_(std::move(processor)),
      tower_(std::make_unique<QwenVit>(qwen.vision, weights, "model.visual.",
                                       tower_workspace_bytes(stream.device()))) {
  set_decoder(make_llama(qwen.text, weights, "model.language_model."), options);
  refuse_leftovers(weights, {});
}

PositionSpan QwenVl::span_of(const PatchGrid& grid, std::vector<int32_t> times) const {
  return {.rows = std::ssize(times) * (grid.rows / merge_) * (grid.columns / merge_),
          .times = std::move(times),
          .height = grid.rows / merge_,
          .width = grid.columns / merge_};
}

VisualText QwenVl::picture_text(const PictureShape& shape, size_t /*pictures*/) const {
  return {std::string(kImageToken), {span_of(processor_.grid(shape), {0})}};
}

std::vector<int32_t> QwenVl::times_of(const Clip& clip, int slices) const {
  if (tokens_per_second_ <= 0) return clip_times(slices, 1, 1);
  const double seconds = depth_ / sampled_fps(clip.info, clip.frames.size());
  if (!(slices * tokens_per_second_ * seconds < static_cast<double>(kMaxPositions))) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: its {} frames last {:.6g} seconds, beyond the last position of {}; give a "
                    "shorter video",
                    clip.info.name, clip.frames.size(), slices * seconds, printable(name())));
  }
  return clip_times(slices, tokens_per_second_, seconds);
}

VisualText QwenVl::clip_text(const Clip& clip) const {
  const PatchGrid grid = processor_.grid(clip);
  if (generation_ != QwenVlGeneration::kQwen3) {
    return {std::string(kVideoToken), {span_of(grid, times_of(clip, grid.slices))}};
  }
  // Every slice is a picture of its own behind its time; the template's vision_start and vision_end
  // stay around all.
  VisualText text;
  for (const double time_s : temporal_patch_times_s(clip.info, clip.frames, depth_)) {
    text.text +=
        fmt::format("{}{}{}{}", timestamp_text(time_s), kVisionStart, kVideoToken, kVisionEnd);
    text.spans.push_back(span_of(grid, {0}));
  }
  return text;
}

VisualInput QwenVl::input_of(VisualPatches patches) const {
  const int64_t rows = patches.grids.front().cells(merge_);
  return {std::move(patches), rows};
}

VisualInput QwenVl::prepare(const Image& image, size_t /*pictures*/) const {
  return input_of(processor_.cut(image));
}

VisualInput QwenVl::prepare_clip(const DecodedClip& clip) const {
  return input_of(processor_.cut(clip));
}

VisualRows QwenVl::encode(std::span<const VisualInput* const> visuals, Stream& stream,
                          const Tap& tap) {
  std::vector<const VisualPatches*> patches;
  for (const VisualInput* visual : visuals) patches.push_back(&visual->patches);
  QwenFeatures features = tower_->encode(patches, stream, tap);
  if (tap) {
    tap("projector_out", features.rows);
    for (size_t i = 0; i < features.deepstack.size(); ++i) {
      tap(fmt::format("deepstack.{}", i), features.deepstack[i]);
    }
  }
  std::vector<int64_t> rows;
  for (const VisualInput* visual : visuals) rows.push_back(visual->rows);
  VisualRows result = pack_visuals(std::move(features.rows), rows, visuals, {}, stream);
  int64_t first = 0;
  for (size_t i = 0; i < visuals.size(); ++i) {
    for (const Tensor& layer : features.deepstack) {
      result.each[i].added.push_back(layer.view().slice(first, rows[i]));
    }
    first += rows[i];
  }
  for (Tensor& layer : features.deepstack) result.tensors.push_back(std::move(layer));
  return result;
}

}  // namespace

std::string canonical_qwen_vl_name(std::string_view name) {
  if (name.ends_with(".inv_freq")) return {};  // RoPE's, which follow from config.json
  if (name.starts_with("visual.")) return fmt::format("model.{}", name);
  constexpr std::string_view kModel = "model.";
  if (!name.starts_with(kModel) || name.starts_with("model.language_model.") ||
      name.starts_with("model.visual.")) {
    return std::string(name);
  }
  return fmt::format("model.language_model.{}", name.substr(kModel.size()));
}

CacheShape qwen_vl_cache_shape(const nlohmann::json& config) {
  return llama_cache_shape(parse_qwen_vl(ConfigReader(config, "config.json")).text);
}

std::unique_ptr<Model> load_qwen_vl(ModelSource source, const LoadOptions& options,
                                    Stream& stream) {
  const ConfigReader config(source.config, "config.json");
  const QwenVlConfig qwen = parse_qwen_vl(config);
  refuse_unused(options, "Qwen-VL", {.aspect = true, .tiles = true});
  QwenVlProcessor processor(qwen, read_qwen_vl_files(source, qwen, options));
  const PlaceholderToken placeholders[] = {
      {{qwen.image_id, std::string(kImageToken)}, "image_token_id"},
      {{qwen.video_id, std::string(kVideoToken)}, "video_token_id"}};
  std::string builtin(kTemplate);
  if (qwen.generation != QwenVlGeneration::kQwen3) builtin.insert(0, kSystemTemplate);
  TextFiles text = read_text_files(source, config, qwen.decoder, placeholders, builtin);
  WeightMap& weights = source.weights;
  weights.rename(&canonical_qwen_vl_name);
  prepare_weights(weights, options, stream);
  return std::make_unique<QwenVl>(source, qwen, std::move(processor), options, std::move(text),
                                  weights, stream);
}

}  // namespace kvlm
