#include "runtime/prompt.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

/// The pictures that a conversation has a place for, before it is rendered.
size_t asked_for(const std::vector<ChatMessage>& messages, std::string_view image_token) {
  size_t count = 0;
  for (const ChatMessage& message : messages) {
    for (const ContentItem& item : message.content) {
      if (item.kind == ContentItem::Kind::kImage) ++count;
      for (size_t at = 0; (at = item.text.find(image_token, at)) != std::string::npos;
           at += image_token.size()) {
        ++count;
      }
    }
  }
  return count;
}

}  // namespace

ChatMessage user_message(std::string text, int images, std::string_view image_token) {
  ChatMessage message{"user", {}};
  if (text.find(image_token) == std::string::npos) {
    message.content.resize(static_cast<size_t>(images), {ContentItem::Kind::kImage, {}});
  }
  message.content.push_back({ContentItem::Kind::kText, std::move(text)});
  return message;
}

namespace {

/// The conversation's ids with one placeholder a picture; there are as many as `images`.
std::vector<int32_t> encode_conversation(const Model& model,
                                         const std::vector<ChatMessage>& messages, size_t images) {
  if (images > kMaxPictures) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the prompt has {} images; at most {} are told apart, use fewer",
                            images, kMaxPictures));
  }
  const std::string text = model.render(messages);
  const Tokenizer& tokenizer = model.tokenizer();
  Tokenizer::EncodeOptions options;
  if (const auto bos = tokenizer.bos_id()) {
    options.add_special_tokens = !text.starts_with(tokenizer.token_of(*bos));
  }
  std::vector<int32_t> ids = tokenizer.encode(text, options);

  const auto placeholders =
      static_cast<size_t>(std::count(ids.begin(), ids.end(), model.image_id()));
  if (placeholders != images) {
    if (asked_for(messages, model.image_token()) == images) {
      throw Error(
          ErrorCode::kCorruptFile,
          fmt::format("the chat template of {} makes {} {} placeholder{} of {} image{}; use "
                      "the template of the model's page",
                      model.name(), placeholders, model.image_token(), placeholders == 1 ? "" : "s",
                      images, images == 1 ? "" : "s"));
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the prompt has {} {} placeholder{} and {} image{} given; give one --image "
                    "for each placeholder",
                    placeholders, model.image_token(), placeholders == 1 ? "" : "s", images,
                    images == 1 ? " is" : "s are"));
  }
  return ids;
}

}  // namespace

int64_t prompt_rows(const Model& model, const std::vector<ChatMessage>& messages, size_t images,
                    int image_tokens) {
  const std::vector<int32_t> ids = encode_conversation(model, messages, images);
  return static_cast<int64_t>(ids.size()) +
         static_cast<int64_t>(images) * (static_cast<int64_t>(image_tokens) - 1);
}

Prompt make_prompt(const Model& model, const std::vector<ChatMessage>& messages,
                   std::span<const int> image_tokens) {
  const std::vector<int32_t> ids = encode_conversation(model, messages, image_tokens.size());
  Prompt prompt;
  size_t image = 0;
  for (const int32_t id : ids) {
    const bool picture = id == model.image_id();
    const auto copies = picture ? static_cast<size_t>(image_tokens[image]) : 1;
    prompt.ids.insert(prompt.ids.end(), copies, id);
    prompt.modality.insert(prompt.modality.end(), copies,
                           picture ? static_cast<int16_t>(image) : kTextRow);
    if (picture) ++image;
  }
  prompt.positions = following_positions(0, prompt.ids.size());
  prompt.next_position = static_cast<int32_t>(prompt.ids.size());
  return prompt;
}

std::string_view window_note(Model& model, int context) {
  if (model.decoder().sliding_window() != context) return "";
  return " (its sliding window, beyond which it is not built in)";
}

void require_context(const Prompt& prompt, std::string_view who, Model& model, int context) {
  if (prompt.ids.size() < static_cast<size_t>(std::max(context, 0))) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}{}the prompt has {} tokens, but {} has a context of {}{}; use fewer images or "
                  "a shorter prompt",
                  who, who.empty() ? "" : ": ", prompt.ids.size(), model.name(), context,
                  window_note(model, context)));
}

void embed_prompt(Model& model, const Prompt& prompt, int64_t first,
                  std::span<const ConstTensorView> pictures, TensorView rows, Stream& stream) {
  const int64_t count = rows.shape()[0];
  model.decoder().embed(
      std::span(prompt.ids).subspan(static_cast<size_t>(first), static_cast<size_t>(count)), rows,
      stream);
  // Rows of one picture that follow each other are copied together.
  std::vector<int64_t> next(pictures.size(), 0);  // row of each picture that comes next
  for (int64_t row = 0; row < first + count;) {
    const int16_t tag = prompt.modality[static_cast<size_t>(row)];
    int64_t end = row + 1;
    while (end < first + count && end != first &&
           prompt.modality[static_cast<size_t>(end)] == tag) {
      ++end;
    }
    const int64_t run = end - row;
    if (tag != kTextRow) {
      const auto picture = static_cast<size_t>(tag);
      if (row >= first) {
        copy(rows.slice(row - first, run), pictures[picture].slice(next[picture], run), stream);
      }
      next[picture] += run;
    }
    row = end;
  }
}

}  // namespace kvlm
