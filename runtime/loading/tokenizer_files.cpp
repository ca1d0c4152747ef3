#include "runtime/loading/tokenizer_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/loading/config.h"

namespace kvlm {

TokenizerConfig read_tokenizer_config(const ModelSource& source) {
  const auto read = [&](const char* file) { return source.file(file).value_or(std::string()); };
  return parse_tokenizer_config(read("tokenizer_config.json"), read("special_tokens_map.json"),
                                read("added_tokens.json"), "tokenizer_config.json");
}

std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source, TokenizerConfig config,
                                          const AddedToken& placeholder) {
  if (const auto json = source.file("tokenizer.json")) {
    return make_json_tokenizer(*json, config, "tokenizer.json");
  }
  if (const auto model = source.file("tokenizer.model")) {
    const bool known =
        std::any_of(config.added_tokens.begin(), config.added_tokens.end(),
                    [&](const AddedToken& token) { return token.content == placeholder.content; });
    if (!known) config.added_tokens.push_back(placeholder);
    return make_sentencepiece_tokenizer(*model, config, "tokenizer.model");
  }
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("{} has neither tokenizer.json nor tokenizer.model; download one of them from "
                  "the model's page",
                  source.name));
}

void check_placeholder(const Tokenizer& tokenizer, const AddedToken& placeholder,
                       std::string_view key) {
  const auto id = tokenizer.id_of(placeholder.content);
  if (id == placeholder.id) return;
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format(
          "config.json says that {} is token {} ({}), but the tokenizer's {} is {}; the two "
          "files do not belong together",
          placeholder.content, placeholder.id, key, placeholder.content,
          id ? fmt::format("token {}", *id) : "no token"));
}

namespace {

/// The template of a key that holds it, or a list of {name, template}; nothing if there is none.
std::optional<ChatTemplate> template_of(const ConfigReader& reader, const std::string& file) {
  const nlohmann::json& value = reader.raw("chat_template");
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return ChatTemplate(value.get<std::string>(), file);
  if (!value.is_array()) reader.fail("chat_template", "a template or a list of them");
  for (const nlohmann::json& entry : value) {
    const ConfigReader named(entry, file + ": chat_template");
    if (named.required_string("name") == "default") {
      return ChatTemplate(named.required_string("template"), file);
    }
  }
  reader.fail("chat_template", "a template named default");
}

}  // namespace

ChatTemplate load_chat_template(const ModelSource& source, std::string_view builtin) {
  const auto in_json = [&](const std::string& file) -> std::optional<ChatTemplate> {
    const auto text = source.file(file);
    if (!text) return std::nullopt;
    const nlohmann::json json = parse_json(*text, file);
    const ConfigReader reader(json, file);
    if (file == "chat_template.json") reader.required_string("chat_template");
    return template_of(reader, file);
  };
  for (const char* file : {"processor_config.json", "chat_template.json"}) {
    if (auto found = in_json(file)) return std::move(*found);
  }
  if (const auto jinja = source.file("chat_template.jinja")) {
    return ChatTemplate(*jinja, "chat_template.jinja");
  }
  if (auto found = in_json("tokenizer_config.json")) return std::move(*found);
  return ChatTemplate(builtin, "the built-in template");
}

}  // namespace kvlm
