#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace kvlm {

/// How a conversation is written with an original InternVL, which names it in config.json and whose
/// code does not look at the tokenizer's template.
struct InternVlConversation {
  std::string_view name;
  std::string_view system;     ///< what is said first where neither config.json nor the caller does
  std::string_view separator;  ///< after every turn

  /// What internvl_chat_template() calls by name; `system_message` in place of its own.
  std::map<std::string, std::string> variables(
      const std::optional<std::string>& system_message) const;
};

/// The end of every separator, which ends an answer too.
inline constexpr std::string_view kInternVlEnd = "<|im_end|>";

/// By the name in config.json. Throws Error{kUnsupported} listing those that are built in.
/// Source: OpenGVLab/InternVL, conversation.py.
const InternVlConversation& internvl_conversation(const std::string& name);

/// The chat template of all of them. Pictures are "<image>\n" and clips "<video>\n", where they
/// stand.
std::string_view internvl_chat_template() noexcept;

}  // namespace kvlm
