#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llm/tokenizer.h"
#include "runtime/chat_template.h"
#include "runtime/loading/config.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/generation_config.h"
#include "runtime/loading/source.h"

namespace kvlm {

/// What a checkpoint says of text: how it is tokenised, how a conversation is written, what ends an
/// answer.
struct TextFiles {
  std::unique_ptr<Tokenizer> tokenizer;
  std::map<std::string, std::string> named_tokens;
  std::unique_ptr<ChatTemplate> chat_template;
  GenerationDefaults defaults;

  /// The prompt text of a conversation, ready for the assistant's next words.
  std::string render(const std::vector<ChatMessage>& messages) const;
};

/// A visual token as config.json has it, and which key says so.
struct PlaceholderToken {
  AddedToken token;
  std::string_view key;
};

/// Reads generation_config.json, the tokenizer and its companions, and the chat template, or
/// `builtin_template` if there is none (see load_chat_template()). Throws Error{kCorruptFile}
/// unless the tokenizer makes each of `placeholders`, of which there is at least one, of its text,
/// and if nothing says which token ends an answer: a file, or the class of the decoder.
TextFiles read_text_files(const ModelSource& source, const ConfigReader& config,
                          DecoderType decoder, std::span<const PlaceholderToken> placeholders,
                          std::string_view builtin_template);

}  // namespace kvlm
