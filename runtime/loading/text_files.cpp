#include "runtime/loading/text_files.h"

#include "runtime/loading/tokenizer_files.h"

namespace kvlm {

std::string TextFiles::render(const std::vector<ChatMessage>& messages) const {
  ChatTemplate::Context context;
  context.named_tokens = named_tokens;
  if (const auto bos = tokenizer->bos_id()) context.bos_token = tokenizer->token_of(*bos);
  if (const auto eos = tokenizer->eos_id()) context.eos_token = tokenizer->token_of(*eos);
  return chat_template->render(messages, context);
}

TextFiles read_text_files(const ModelSource& source, const ConfigReader& config,
                          std::span<const PlaceholderToken> placeholders,
                          std::string_view builtin_template) {
  TextFiles text;
  const nlohmann::json generation = read_json(source, "generation_config.json");
  text.defaults = parse_generation(ConfigReader(generation, "generation_config.json"), config);
  const TokenizerConfig tokens = read_tokenizer_config(source);
  text.named_tokens = tokens.named_tokens;
  text.tokenizer = load_tokenizer(source, tokens, placeholders.front().token);
  for (const PlaceholderToken& placeholder : placeholders) {
    check_placeholder(*text.tokenizer, placeholder.token, placeholder.key);
  }
  text.chat_template = std::make_unique<ChatTemplate>(load_chat_template(source, builtin_template));
  return text;
}

}  // namespace kvlm
