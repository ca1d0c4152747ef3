#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/blend_rows.h"
#include "llm/decoder.h"
#include "llm/tokenizer.h"
#include "runtime/chat_template.h"
#include "runtime/loading/generation_config.h"
#include "vision/frame_sampling.h"
#include "vision/image.h"
#include "vision/patches.h"
#include "vision/video.h"

namespace kvlm {

/// Of the images of one request in all, and of the frames of a video, as the model sees them.
inline constexpr int64_t kMaxRequestPixels = int64_t{1} << 29;

/// What is known of a picture before its pixels are: the headers tell it.
struct PictureShape {
  int height = 0;  ///< upright
  int width = 0;
  std::string name = {};  ///< the file, fit for messages; may be empty
};

/// What stands in a prompt for a picture or clip.
struct VisualText {
  std::string text;                 ///< in place of its placeholder: one visual token for each span
  std::vector<PositionSpan> spans;  ///< the rows that each of these tokens becomes

  int64_t rows() const noexcept;
  friend bool operator==(const VisualText&, const VisualText&) = default;
};

/// A picture or clip ready for the vision tower.
struct VisualInput {
  VisualPatches patches;
  int64_t rows = 0;  ///< visual rows it becomes
  /// How those rows are made of what the tower and the projector give; empty: they are that.
  RowBlend packing = {};
};

/// What a picture or clip becomes.
struct VisualFeatures {
  ConstTensorView rows;  ///< (rows, hidden) f32, decoder input
  /// As much for the rows after the first decoder layers, layer by layer (Qwen3-VL's deepstack).
  std::vector<ConstTensorView> added;
};

/// What pictures and clips become.
struct VisualRows {
  std::vector<Tensor> tensors;       ///< what `each` is parts of
  std::vector<VisualFeatures> each;  ///< in the order given
};

/// One vision-language model, put together: everything between a picture and logits. Built by a
/// family (runtime/family.h). One thread at a time; but what is const, of it and of its decoder and
/// tokenizer, never changes and any thread may ask for it meanwhile.
class Model {
 public:
  virtual ~Model() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual std::string_view family() const noexcept = 0;
  virtual DType dtype() const noexcept = 0;
  /// Decoder::weight_format().
  virtual std::string weight_format() const { return std::string(dtype_name(dtype())); }
  virtual size_t weight_bytes() const noexcept = 0;

  virtual const Tokenizer& tokenizer() const noexcept = 0;
  virtual Decoder& decoder() noexcept = 0;
  virtual const GenerationDefaults& defaults() const noexcept = 0;
  /// The prompt that asks for a caption.
  virtual std::string_view caption_prompt() const noexcept = 0;
  /// The prompt text of a conversation, ready for the assistant's next words; a placeholder stands
  /// for every picture and clip.
  virtual std::string render(const std::vector<ChatMessage>& messages) const = 0;

  /// The placeholder of a picture and that of a clip; empty if the model takes none.
  virtual std::string_view image_token() const noexcept = 0;
  virtual std::string_view video_token() const noexcept { return {}; }
  /// Whether a token stands for visual rows, of a picture or of a clip.
  virtual bool is_visual(int32_t id) const noexcept = 0;

  /// What stands for one of `pictures` pictures of a prompt. Throws Error{kInvalidArgument} for a
  /// shape that the family's processor refuses.
  virtual VisualText picture_text(const PictureShape& shape, size_t pictures) const = 0;
  /// Resizes, cuts and normalises such a picture as the family's image processor does.
  virtual VisualInput prepare(const Image& image, size_t pictures) const = 0;

  /// The frames that the family's processor takes of a video. These three throw
  /// Error{kUnsupported} for a model that takes no videos.
  virtual std::vector<int64_t> sample_frames(const VideoInfo& info,
                                             const SamplingRequest& request) const;
  virtual VisualText clip_text(const Clip& clip) const;
  virtual VisualInput prepare_clip(const DecodedClip& clip) const;
  /// A frame of a clip, resized as prepare_clip() does, which takes it either way: so a clip is in
  /// memory as the model sees it, not as it is stored. Without a rule of the family, the frame.
  virtual Image fit_frame(const Clip& clip, Image frame) const;

  /// Tower and projector, of all pictures and clips together; at least one.
  virtual VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                            const Tap& tap) = 0;
  /// Where the rows of a prompt stand; one after the other on every axis, unless a family has its
  /// own rule.
  virtual PromptPositions positions(std::span<const PositionSpan> spans) const;
};

}  // namespace kvlm
