#include "runtime/placeholders.h"

#include <fmt/format.h>

#include <regex>
#include <set>

#include "kernels/base/printable.h"

namespace kvlm {

namespace {

/// What the examples of models and harnesses put where an image or a video belongs: <image>,
/// <ImageHere>, <image 1>, <|image_pad|>, <start_of_image>, [IMG].
const std::regex& placeholder_pattern() {
  static const std::regex kPattern(
      R"(<\|?(?:(?:start|begin)_of_)?(?:image|img|video|vision))"
      R"((?:[ _-]?(?:here|placeholder|pad|context|start|token|\d{1,3}))?\|?>|\[IMG\])",
      std::regex::icase);
  return kPattern;
}

std::set<std::string> placeholders_in(std::span<const ChatMessage> messages) {
  std::set<std::string> found;
  for (const ChatMessage& message : messages) {
    for (const ContentItem& item : message.content) {
      const std::sregex_iterator first(item.text.begin(), item.text.end(), placeholder_pattern());
      for (auto it = first; it != std::sregex_iterator(); ++it) found.insert(it->str());
    }
  }
  return found;
}

}  // namespace

std::vector<std::string> foreign_placeholders(const Model& model,
                                              std::span<const ChatMessage> messages) {
  std::vector<std::string> warnings;
  for (const std::string& text : placeholders_in(messages)) {
    if (text == model.image_token() || text == model.video_token()) continue;
    if (model.tokenizer().id_of(text)) continue;
    const bool video = text.find("ideo") != text.npos || text.find("IDEO") != text.npos;
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
