#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// One piece of a chat message, in the order it was given.
struct ContentItem {
  enum class Kind : uint8_t { kText, kImage, kVideo } kind = Kind::kText;
  std::string text;  ///< kText only
};

/// One turn.
struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::vector<ContentItem> content;
};

/// A Jinja2 chat template, compiled once: what such templates use of the language, with
/// transformers' trim_blocks and lstrip_blocks.
class ChatTemplate {
 public:
  /// Throws Error{kUnsupported} naming the construct and its line when the template leaves the
  /// subset, Error{kCorruptFile} when it is not well-formed. `name` is the file's name in messages.
  ChatTemplate(std::string_view source, std::string name);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  struct Context {
    std::string bos_token;
    std::string eos_token;
    bool add_generation_prompt = true;
    /// Further variables: "pad_token", "image_token" and whatever the tokenizer's files name so.
    std::map<std::string, std::string> named_tokens = {};
  };
  /// The prompt text. Throws Error{kInvalidArgument} with the template's own words when it calls
  /// raise_exception, or like the constructor for a fault that shows only now.
  std::string render(const std::vector<ChatMessage>& messages, const Context& context) const;

 private:
  struct Program;
  std::unique_ptr<Program> program_;
};

}  // namespace kvlm
