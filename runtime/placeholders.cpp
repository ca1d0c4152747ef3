#include "runtime/placeholders.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/printable.h"

namespace kvlm {

namespace {

/// What the families' own examples put where an image or a video belongs.
struct Placeholder {
  std::string_view text;
  bool video;
};
constexpr std::array kPlaceholders = {
    Placeholder{"<image>", false},
    Placeholder{"<video>", true},
    Placeholder{"<img>", false},
    Placeholder{"<IMG_CONTEXT>", false},
    Placeholder{"<|image_pad|>", false},
    Placeholder{"<|video_pad|>", true},
    Placeholder{"<|vision_start|>", false},
    Placeholder{"<|image|>", false},
    Placeholder{"<image_placeholder>", false},
};

bool holds(std::span<const ChatMessage> messages, std::string_view text) {
  return std::ranges::any_of(messages, [&](const ChatMessage& message) {
    return std::ranges::any_of(message.content, [&](const ContentItem& item) {
      return item.text.find(text) != std::string::npos;
    });
  });
}

}  // namespace

std::vector<std::string> foreign_placeholders(const Model& model,
                                              std::span<const ChatMessage> messages) {
  std::vector<std::string> warnings;
  for (const auto& [text, video] : kPlaceholders) {
    if (text == model.image_token() || text == model.video_token()) continue;
    if (!holds(messages, text) || model.tokenizer().id_of(text)) continue;
    const std::string_view own = video ? model.video_token() : model.image_token();
    const std::string_view kind = video ? "video" : "image";
    warnings.push_back(
        own.empty()
            ? fmt::format("the prompt has {}, which is plain text to {}, a model without videos; "
                          "leave it out",
                          text, printable(model.name()))
            : fmt::format("the prompt has {}, which is plain text to {}; leave it out, or write {} "
                          "where the {} belongs",
                          text, printable(model.name()), own, kind));
  }
  return warnings;
}

}  // namespace kvlm
