#include "runtime/loading/tokenizer_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/strict_json.h"
#include "llm/unicode.h"
#include "runtime/loading/config.h"

// Finds and reads the files of a tokenizer in the spellings that checkpoints have: tokenizer.json,
// a sentencepiece model, or vocab.json with merges.txt; and the chat template in the order in which
// transformers looks for it.
namespace kvlm {

TokenizerConfig read_tokenizer_config(const ModelSource& source) {
  const auto read = [&](const char* file) { return source.file(file).value_or(std::string()); };
  return parse_tokenizer_config(read("tokenizer_config.json"), read("special_tokens_map.json"),
                                read("added_tokens.json"), "tokenizer_config.json");
}

namespace {

/// vocab.json and merges.txt as the tokenizer.json that transformers makes of them. They do not say
/// how a text is cut before it is merged; for Qwen2's class that is the expression of transformers'
/// Qwen2Tokenizer.
std::string json_of_vocab(const ModelSource& source, const std::string& vocab,
                          const std::string& merges) {
  const nlohmann::json tokenizer_config = read_json(source, "tokenizer_config.json");
  const ConfigReader reader(tokenizer_config, "tokenizer_config.json");
  const std::string type = reader.string("tokenizer_class", "");
  if (type != "Qwen2Tokenizer" && type != "Qwen2TokenizerFast") {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "tokenizer_config.json: tokenizer_class is \"{}\"; with vocab.json and merges.txt only "
            "Qwen2Tokenizer is supported: use a checkpoint that has tokenizer.json",
            printable(type)));
  }
  if (!is_valid_utf8(merges)) {
    throw Error(ErrorCode::kCorruptFile, "merges.txt is not UTF-8; download the file again");
  }
  std::vector<std::string> pairs;
  for (size_t at = 0; at < merges.size();) {
    const size_t end = std::min(merges.find('\n', at), merges.size());
    std::string line = merges.substr(at, end - at);
    if (line.ends_with('\r')) line.pop_back();
    const bool version = at == 0 && line.starts_with("#version:");
    if (!line.empty() && !version) pairs.push_back(std::move(line));
    at = end + 1;
  }
  constexpr std::string_view kCuts =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const nlohmann::json cut = {
      {"type", "Split"}, {"pattern", {{"Regex", kCuts}}}, {"behavior", "Isolated"}};
  const nlohmann::json bytes = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const nlohmann::json tokenizer = {
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", nlohmann::json::array({cut, bytes})}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", parse_json(vocab, "vocab.json")}, {"merges", pairs}}}};
  return tokenizer.dump();
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source, TokenizerConfig config,
                                          const std::optional<AddedToken>& placeholder) {
  if (const auto json = source.file("tokenizer.json")) {
    return make_json_tokenizer(*json, config, "tokenizer.json");
  }
  if (const auto model = source.file("tokenizer.model")) {
    const bool known =
        !placeholder || std::ranges::any_of(config.added_tokens, [&](const AddedToken& token) {
          return token.content == placeholder->content;
        });
    if (!known) config.added_tokens.push_back(*placeholder);
    return make_sentencepiece_tokenizer(*model, config, "tokenizer.model");
  }
  const auto vocab = source.file("vocab.json");
  const auto merges = source.file("merges.txt");
  if (vocab && merges) {
    return make_json_tokenizer(json_of_vocab(source, *vocab, *merges), config,
                               "vocab.json and merges.txt");
  }
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{} has neither tokenizer.json nor tokenizer.model, nor vocab.json with "
                          "merges.txt; download one of them from the model's page",
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
  if (!builtin.empty()) return ChatTemplate(builtin, "the built-in template");
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("{} has no chat template (chat_template.json, chat_template.jinja), which "
                  "says how its prompts are written; download it from the model's page",
                  source.name));
}

}  // namespace kvlm
