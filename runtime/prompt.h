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

/// The most pictures of one prompt: as many as there are tags of 16 bits from 0.
inline constexpr size_t kMaxPictures = 32768;

/// A tokenised prompt with every picture's placeholder expanded to its visual tokens.
struct Prompt {
  std::vector<int32_t> ids;         // (rows,) placeholders repeated
  std::vector<int16_t> modality;    // (rows,) kTextRow or the picture's index
  std::vector<Position> positions;  // (rows,)
  int32_t next_position = 0;        // of the first generated token
};

/// One user turn: the pictures first, then the text, as the templates put them; or, when the text
/// itself holds placeholders, the text as it is with the pictures where it wants them.
ChatMessage user_message(std::string text, int images, std::string_view image_token);

/// Renders, tokenises and expands a conversation. image_tokens[i] is the number of visual tokens of
/// the i-th picture. A rendered text that starts with BOS is not given a second one.
/// Throws Error{kInvalidArgument} with both numbers if pictures and placeholders do not match, and
/// for more than kMaxPictures of them.
Prompt make_prompt(const Model& model, const std::vector<ChatMessage>& messages,
                   std::span<const int> image_tokens);

/// Rows of the prompt that make_prompt() makes of a conversation with `images` pictures of
/// `image_tokens` visual tokens each, without opening a picture. Throws like make_prompt().
int64_t prompt_rows(const Model& model, const std::vector<ChatMessage>& messages, size_t images,
                    int image_tokens);

/// Says why a context is shorter than the model's configuration tells elsewhere; else empty.
std::string_view window_note(Model& model, int context);

/// Throws Error{kInvalidArgument} unless a context of that many tokens holds the prompt and one
/// more token; `who` starts the message if it is not empty.
void require_context(const Prompt& prompt, std::string_view who, Model& model, int context);

/// Embeds rows [first, first + rows.shape()[0]) of the prompt and splices in visual tokens: rows is
/// (rows, hidden) f32, pictures[i] (image_tokens[i], hidden) f32; one whose rows lie before `first`
/// may be empty.
void embed_prompt(Model& model, const Prompt& prompt, int64_t first,
                  std::span<const ConstTensorView> pictures, TensorView rows, Stream& stream);

}  // namespace kvlm
