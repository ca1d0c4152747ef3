#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/tensor.h"
#include "llm/position.h"
#include "runtime/model.h"

namespace kvlm {

/// The most pictures and clips of one prompt: as many as there are tags of 16 bits from 0.
inline constexpr size_t kMaxVisuals = 32768;

/// One user turn: the pictures first, then the videos, then the text, as the templates put them;
/// where the text itself holds placeholders of a kind, those stay where it wants them.
ChatMessage user_message(std::string text, size_t images, std::string_view image_token,
                         size_t videos = 0, std::string_view video_token = {});

/// What is asked where nobody gave words: for a caption, of videos alone for what they show.
std::string default_question(const Model& model, size_t images, size_t videos);

/// Makes a last turn that has images or videos and no words ask default_question(). Throws
/// Error{kInvalidArgument} if there is no turn, the last one is not the user's, or it is empty.
void complete_question(const Model& model, std::vector<ChatMessage>& messages);

/// What stands for the pictures and for the clips of a conversation, each in the order of their
/// placeholders.
struct PromptVisuals {
  std::vector<VisualText> pictures;
  std::vector<VisualText> clips;
};

/// What stands for pictures and clips that are in memory. Throws as Model::picture_text() and
/// Model::clip_text().
PromptVisuals visual_texts(const Model& model, std::span<const Image> images,
                           std::span<const DecodedClip> clips);
/// The same before they are decoded.
/// Throws Error{kInvalidArgument} for images of more than kMaxRequestPixels in all.
PromptVisuals visual_texts(const Model& model, std::span<const PictureShape> images,
                           std::span<const Clip> clips);

/// Picture or clip `index` of a conversation.
struct VisualPlace {
  bool clip = false;
  size_t index = 0;

  friend bool operator==(const VisualPlace&, const VisualPlace&) = default;
};

/// A tokenised conversation whose visual rows are counted, not laid out: what a request needs room
/// for, before a picture is decoded.
struct PromptOutline {
  std::vector<int32_t> ids;          ///< one visual token for each of `spans`
  std::vector<PositionSpan> spans;   ///< in the order of the prompt
  std::vector<size_t> span_visuals;  ///< which of `visuals` a span belongs to
  std::vector<VisualPlace> visuals;  ///< in the order of the prompt
  int64_t rows = 0;                  ///< of the prompt
  int64_t visual_rows = 0;           ///< of them
};

/// Renders and tokenises a conversation. A rendered text that starts with BOS is not given a second
/// one. Throws Error{kInvalidArgument} with both numbers if placeholders and pictures or videos do
/// not match, for more than kMaxVisuals of them, and for text that holds visual tokens of its own.
PromptOutline outline_prompt(const Model& model, const std::vector<ChatMessage>& messages,
                             const PromptVisuals& visuals);

/// A tokenised prompt with every visual token expanded to its rows.
struct Prompt {
  std::vector<int32_t> ids;          // (rows,) visual tokens repeated
  std::vector<int16_t> modality;     // (rows,) kTextRow or the place of the picture or clip
  std::vector<Position> positions;   // (rows,)
  int32_t next_position = 0;         // of the first generated token
  std::vector<VisualPlace> visuals;  // by tag

  int64_t visual_rows() const noexcept;
};

Prompt make_prompt(const Model& model, const PromptOutline& outline);

/// Says why a context is shorter than the model's configuration tells elsewhere; else empty.
std::string_view window_note(Model& model, int context);

/// Throws Error{kInvalidArgument} unless a context of that many tokens holds the prompt and one
/// more token; `who` starts the message if it is not empty, `cure` ends it.
void require_context(const PromptOutline& outline, std::string_view who, Model& model, int context,
                     std::string_view cure = "use fewer images or a shorter prompt");

/// Embeds rows [first, first + rows.shape()[0]) of the prompt and splices in visual rows: rows is
/// (rows, hidden) f32, visuals[tag] those of the whole picture or clip; one that is not among these
/// rows may be empty. Returns what is to be added to rows after decoder layers.
std::vector<AddedRows> embed_prompt(Model& model, const Prompt& prompt, int64_t first,
                                    std::span<const VisualFeatures> visuals, TensorView rows,
                                    Stream& stream);

}  // namespace kvlm
