#include "runtime/loading/text_files.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/loading/tokenizer_files.h"

namespace kvlm {

std::string TextFiles::render(const std::vector<ChatMessage>& messages) const {
  ChatTemplate::Context context;
  context.named_tokens = named_tokens;
  if (const auto bos = tokenizer->bos_id()) context.bos_token = tokenizer->token_of(*bos);
  if (const auto eos = tokenizer->eos_id()) context.eos_token = tokenizer->token_of(*eos);
  return chat_template->render(messages, context);
}

namespace {

/// Where no file says it. A guess would end answers in the middle: 2 is "#" in Qwen's vocabulary.
int32_t end_of(DecoderType decoder, const ModelSource& source) {
  if (const auto id = default_eos_id(decoder)) return *id;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("neither generation_config.json nor config.json of {} has eos_token_id, "
                          "so nothing says where an answer ends; download generation_config.json "
                          "from the model's page",
                          source.name));
}

}  // namespace

TextFiles read_text_files(const ModelSource& source, const ConfigReader& config,
                          DecoderType decoder, std::span<const PlaceholderToken> placeholders,
                          std::string_view builtin_template) {
  TextFiles text;
  const nlohmann::json generation = read_json(source, "generation_config.json");
  text.defaults = parse_generation(ConfigReader(generation, "generation_config.json"), config);
  if (text.defaults.eos_ids.empty()) {
    text.defaults.eos_ids = text.defaults.sampling.rules.eos_ids = {end_of(decoder, source)};
  }
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
