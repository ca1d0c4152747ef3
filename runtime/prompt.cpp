#include "runtime/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/elementwise.h"

// From messages to rows. outline: the chat template is rendered, every placeholder becomes what the
// family writes for that picture or clip, and the text is tokenised. make_prompt(): visual tokens
// are repeated for their rows, rows get tags and positions. embed_prompt(): the tower's rows
// replace the embedded visual tokens.
namespace kvlm {

namespace {

size_t count_text(std::string_view text, std::string_view part) {
  size_t count = 0;
  if (part.empty()) return 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) {
    ++count;
  }
  return count;
}

/// Pictures or clips of a prompt, for matching them with placeholders.
struct VisualKind {
  std::string_view token;  // its placeholder
  std::string_view noun;   // "image"
  ContentItem::Kind item;
  const std::vector<VisualText>* given;

  std::string some(size_t count) const {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
  }
};

/// Those that a conversation has a place for, before it is rendered.
size_t asked_for(const std::vector<ChatMessage>& messages, const VisualKind& kind) {
  size_t count = 0;
  for (const ChatMessage& message : messages) {
    for (const ContentItem& item : message.content) {
      count += item.kind == kind.item ? 1 : count_text(item.text, kind.token);
    }
  }
  return count;
}

void require_match(const Model& model, const std::vector<ChatMessage>& messages,
                   const VisualKind& kind, size_t placeholders) {
  const size_t given = kind.given->size();
  if (placeholders == given) return;
  const std::string_view plural = placeholders == 1 ? "" : "s";
  if (asked_for(messages, kind) == given) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("the chat template of {} makes {} {} placeholder{} of {}; use the "
                            "template of the model's page",
                            model.name(), placeholders, kind.token, plural, kind.some(given)));
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the prompt has {} {} placeholder{} and {} {} given; give {}, one for "
                          "each placeholder",
                          placeholders, kind.token, plural, kind.some(given),
                          given == 1 ? "is" : "are", kind.some(placeholders)));
}

/// The rendered text with what stands for each picture and clip in place of its placeholder, and
/// their order.
struct ExpandedText {
  std::string text;
  std::vector<VisualPlace> visuals;
};

ExpandedText expand_placeholders(const std::string& text, std::span<const VisualKind> kinds) {
  ExpandedText expanded;
  std::vector<size_t> next(kinds.size(), 0);
  for (size_t at = 0;;) {
    size_t found = std::string::npos;
    size_t kind = 0;
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i].token.empty()) continue;
      const size_t place = text.find(kinds[i].token, at);
      if (place < found) {
        found = place;
        kind = i;
      }
    }
    if (found == std::string::npos) {
      expanded.text += text.substr(at);
      return expanded;
    }
    expanded.text.append(text, at, found - at);
    const size_t index = next[kind]++;
    expanded.text += (*kinds[kind].given)[index].text;
    expanded.visuals.push_back({kinds[kind].item == ContentItem::Kind::kVideo, index});
    at = found + kinds[kind].token.size();
  }
}

/// "2 images and 1 video".
std::string counted(const std::vector<VisualPlace>& visuals) {
  const auto some = [](size_t count, const char* noun) {
    return count == 0 ? std::string() : fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
  };
  const auto clips = static_cast<size_t>(std::ranges::count(visuals, true, &VisualPlace::clip));
  const std::string pictures = some(visuals.size() - clips, "image");
  return pictures + (pictures.empty() || clips == 0 ? "" : " and ") + some(clips, "video");
}

}  // namespace

std::string default_question(const Model& model, size_t images, size_t videos) {
  return images == 0 && videos > 0 ? "Describe the video." : std::string(model.caption_prompt());
}

void complete_question(const Model& model, std::vector<ChatMessage>& messages) {
  if (messages.empty() || messages.back().role != "user") {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the last message is {}; it must be the user's",
                            messages.empty() ? "missing"
                                             : "of the role " + printable(messages.back().role)));
  }
  std::vector<ContentItem>& content = messages.back().content;
  using Kind = ContentItem::Kind;
  const auto count = [&](Kind kind) {
    return static_cast<size_t>(std::ranges::count_if(content, [kind](const ContentItem& item) {
      return item.kind == kind && (kind != Kind::kText || !item.text.empty());
    }));
  };
  if (count(Kind::kText) > 0) return;
  const size_t images = count(Kind::kImage);
  const size_t videos = count(Kind::kVideo);
  if (images + videos == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "the last message is empty; send a question, an image or a video");
  }
  content.push_back({Kind::kText, default_question(model, images, videos)});
}

ChatMessage user_message(std::string text, size_t images, std::string_view image_token,
                         size_t videos, std::string_view video_token) {
  ChatMessage message{"user", {}};
  const auto add = [&](ContentItem::Kind kind, size_t count, std::string_view token) {
    if (count_text(text, token) > 0) return;
    message.content.resize(message.content.size() + count, {kind, {}});
  };
  add(ContentItem::Kind::kImage, images, image_token);
  add(ContentItem::Kind::kVideo, videos, video_token);
  message.content.push_back({ContentItem::Kind::kText, std::move(text)});
  return message;
}

PromptVisuals visual_texts(const Model& model, std::span<const Image> images,
                           std::span<const DecodedClip> clips) {
  std::vector<PictureShape> shapes;
  for (const Image& image : images) shapes.push_back({image.height, image.width, image.name});
  PromptVisuals visuals = visual_texts(model, shapes, {});
  for (const DecodedClip& clip : clips) visuals.clips.push_back(model.clip_text(clip.clip));
  return visuals;
}

PromptVisuals visual_texts(const Model& model, std::span<const PictureShape> images,
                           std::span<const Clip> clips) {
  PromptVisuals visuals;
  int64_t pixels = 0;
  for (const PictureShape& shape : images) pixels += int64_t{shape.height} * shape.width;
  if (pixels > kMaxRequestPixels) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the {} images of one request have {} pixels in all, more than the "
                            "limit of {}; give fewer, or scale them down first",
                            images.size(), pixels, kMaxRequestPixels));
  }
  for (const PictureShape& shape : images) {
    visuals.pictures.push_back(model.picture_text(shape, images.size()));
  }
  for (const Clip& clip : clips) visuals.clips.push_back(model.clip_text(clip));
  return visuals;
}

PromptOutline outline_prompt(const Model& model, const std::vector<ChatMessage>& messages,
                             const PromptVisuals& visuals) {
  const VisualKind kinds[] = {
      {model.image_token(), "image", ContentItem::Kind::kImage, &visuals.pictures},
      {model.video_token(), "video", ContentItem::Kind::kVideo, &visuals.clips}};
  const size_t given = visuals.pictures.size() + visuals.clips.size();
  if (given > kMaxVisuals) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the prompt has {} images and videos; at most {} can be distinguished, use fewer",
            given, kMaxVisuals));
  }
  const std::string rendered = model.render(messages);
  for (const VisualKind& kind : kinds) {
    require_match(model, messages, kind, count_text(rendered, kind.token));
  }
  ExpandedText expanded = expand_placeholders(rendered, kinds);

  PromptOutline outline;
  outline.visuals = std::move(expanded.visuals);
  for (size_t tag = 0; tag < outline.visuals.size(); ++tag) {
    const VisualPlace& place = outline.visuals[tag];
    const VisualText& visual = (place.clip ? visuals.clips : visuals.pictures)[place.index];
    outline.spans.insert(outline.spans.end(), visual.spans.begin(), visual.spans.end());
    outline.span_visuals.insert(outline.span_visuals.end(), visual.spans.size(), tag);
    outline.visual_rows += visual.rows();
  }

  const Tokenizer& tokenizer = model.tokenizer();
  Tokenizer::EncodeOptions options;
  if (const auto bos = tokenizer.bos_id()) {
    options.add_special_tokens = !rendered.starts_with(tokenizer.token_of(*bos));
  }
  outline.ids = tokenizer.encode(expanded.text, options);
  const auto tokens = static_cast<size_t>(std::count_if(
      outline.ids.begin(), outline.ids.end(), [&](int32_t id) { return model.is_visual(id); }));
  if (tokens != outline.spans.size()) {
    const auto stray = std::find_if(outline.ids.begin(), outline.ids.end(),
                                    [&](int32_t id) { return model.is_visual(id); });
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the prompt has {} visual token{} where its images and videos make {}; leave "
                    "{} out of the text",
                    tokens, tokens == 1 ? "" : "s", outline.spans.size(),
                    stray == outline.ids.end() ? "special tokens" : tokenizer.token_of(*stray)));
  }
  outline.rows =
      static_cast<int64_t>(outline.ids.size() - outline.spans.size()) + outline.visual_rows;
  return outline;
}

Prompt make_prompt(const Model& model, const PromptOutline& outline) {
  Prompt prompt;
  prompt.visuals = outline.visuals;
  const auto rows = static_cast<size_t>(outline.rows);
  prompt.ids.reserve(rows);
  prompt.modality.reserve(rows);
  std::vector<PositionSpan> spans;
  size_t span = 0;
  for (const int32_t id : outline.ids) {
    const bool visual = model.is_visual(id);
    if (visual) {
      spans.push_back(outline.spans[span]);
    } else if (!spans.empty() && spans.back().times.empty() && prompt.modality.back() == kTextRow) {
      ++spans.back().rows;
    } else {
      spans.push_back({.rows = 1});
    }
    const auto copies = visual ? static_cast<size_t>(spans.back().rows) : 1;
    prompt.ids.insert(prompt.ids.end(), copies, id);
    prompt.modality.insert(prompt.modality.end(), copies,
                           visual ? static_cast<int16_t>(outline.span_visuals[span]) : kTextRow);
    span += visual ? 1 : 0;
  }
  PromptPositions positions = model.positions(spans);
  prompt.positions = std::move(positions.rows);
  prompt.next_position = positions.next;
  return prompt;
}

int64_t Prompt::visual_rows() const noexcept {
  return std::ssize(modality) - std::count(modality.begin(), modality.end(), kTextRow);
}

std::string_view window_note(Model& model, int context) {
  if (model.decoder().sliding_window() != context) return "";
  return " (its sliding window, and longer contexts are not supported)";
}

void require_context(const PromptOutline& outline, std::string_view who, Model& model, int context,
                     std::string_view cure) {
  if (outline.rows < context) return;
  const std::string visual =
      outline.visuals.empty()
          ? ""
          : fmt::format(", {} of them of its {}", outline.visual_rows, counted(outline.visuals));
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}{}the prompt has {} tokens{}, but {} has a context of {}{}; {}", who,
                          who.empty() ? "" : ": ", outline.rows, visual, model.name(), context,
                          window_note(model, context), cure));
}

std::vector<AddedRows> embed_prompt(Model& model, const Prompt& prompt, int64_t first,
                                    std::span<const VisualFeatures> visuals, TensorView rows,
                                    Stream& stream) {
  const int64_t count = rows.shape()[0];
  model.decoder().embed(
      std::span(prompt.ids).subspan(static_cast<size_t>(first), static_cast<size_t>(count)), rows,
      stream);
  // Rows of one picture that follow each other are copied together.
  std::vector<AddedRows> added;
  std::vector<int64_t> next(prompt.visuals.size(), 0);  // row of each visual that comes next
  for (int64_t row = 0; row < first + count;) {
    const int16_t tag = prompt.modality[static_cast<size_t>(row)];
    int64_t end = row + 1;
    while (end < first + count && end != first &&
           prompt.modality[static_cast<size_t>(end)] == tag) {
      ++end;
    }
    const int64_t span = end - row;
    if (tag != kTextRow) {
      int64_t& from = next[static_cast<size_t>(tag)];
      if (row >= first) {
        const VisualFeatures& features = visuals[static_cast<size_t>(tag)];
        copy(rows.slice(row - first, span), features.rows.slice(from, span), stream);
        for (size_t layer = 0; layer < features.added.size(); ++layer) {
          added.push_back(
              {static_cast<int>(layer), row - first, features.added[layer].slice(from, span)});
        }
      }
      from += span;
    }
    row = end;
  }
  return added;
}

}  // namespace kvlm
