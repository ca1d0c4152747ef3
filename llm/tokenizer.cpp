#include "llm/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/bpe.h"
#include "llm/strict_json.h"
#include "llm/unicode.h"

// What tokenizers of every kind share: which added and special tokens tokenizer_config.json and
// special_tokens_map.json name, and a stream of text for tokenizers that can only decode all ids at
// once.
namespace kvlm {

namespace {

using nlohmann::json;

/// The stream of a tokenizer that knows no better: decodes everything again at every push.
class WholeTextStream final : public TextStream {
 public:
  WholeTextStream(const Tokenizer& tokenizer, bool skip_special)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}

  std::string push(int32_t id) override {
    ids_.push_back(id);
    std::string text = tokenizer_.decode(ids_, skip_special_);
    // Hold back what the next ids may complete: a cut sequence, or U+FFFD in its place.
    std::string well_formed;
    size_t end = append_lossy_utf8(well_formed, text);
    while (end >= 3 && std::string_view(text).substr(end - 3, 3) == "\xEF\xBF\xBD") end -= 3;
    return take(text, end);
  }
  std::string finish() override {
    const std::string text = tokenizer_.decode(ids_, skip_special_);
    return take(text, text.size());
  }

 private:
  std::string take(const std::string& text, size_t end) {
    if (end <= emitted_) return "";
    std::string fresh = text.substr(emitted_, end - emitted_);
    emitted_ = end;
    return fresh;
  }

  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::vector<int32_t> ids_;
  size_t emitted_ = 0;
};

[[noreturn]] void corrupt(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {}; download the file again", name, printable(what)));
}

bool flag(const json& object, const char* key, bool fallback, const std::string& name) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return fallback;
  if (!found->is_boolean()) corrupt(name, fmt::format("{} is not true or false", key));
  return found->get<bool>();
}

json parse_object(std::string_view text, const std::string& name) {
  if (text.empty()) return json::object();
  json value = parse_json(text, name);
  if (!value.is_object()) corrupt(name, "expected a JSON object");
  return value;
}

/// A token written as a string or as an object with "content"; nothing if neither.
std::optional<std::string> token_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object()) {
    const auto content = value.find("content");
    if (content != value.end() && content->is_string()) return content->get<std::string>();
  }
  return std::nullopt;
}

std::optional<std::string> token_field(const json& object, const char* key,
                                       const std::string& name) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return std::nullopt;
  auto text = token_text(*found);
  if (!text) corrupt(name, fmt::format("{} is neither a string nor an object with content", key));
  return text;
}

int32_t checked_id(int64_t id, const std::string& token, const std::string& name) {
  if (id < 0 || id > kMaxTokenId) {
    corrupt(name,
            fmt::format("added token \"{}\" has id {}; expected 0 to {}", token, id, kMaxTokenId));
  }
  return static_cast<int32_t>(id);
}

AddedToken added_token(const json& value, const std::string& content, const std::string& name) {
  AddedToken token;
  token.content = content;
  token.special = flag(value, "special", false, name);
  token.normalized = flag(value, "normalized", !token.special, name);
  token.lstrip = flag(value, "lstrip", false, name);
  token.rstrip = flag(value, "rstrip", false, name);
  token.single_word = flag(value, "single_word", false, name);
  return token;
}

/// Every token that special_tokens_map.json or tokenizer_config.json calls special, with the object
/// that describes it (null if it is a bare string).
std::map<std::string, json> special_tokens(const json& config, const json& map) {
  std::map<std::string, json> specials;
  const auto note = [&specials](const json& value) {
    if (const auto text = token_text(value)) {
      specials.try_emplace(*text, value.is_object() ? value : json());
    }
  };
  for (const json* file : {&map, &config}) {
    for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
                            "cls_token", "mask_token"}) {
      if (const auto found = file->find(key); found != file->end()) note(*found);
    }
    for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
      const auto found = file->find(key);
      if (found == file->end() || !(found->is_array() || found->is_object())) continue;
      for (const json& value : *found) note(value);
    }
  }
  return specials;
}

/// Every key that ends in _token, and those of extra_special_tokens where it gives names.
std::map<std::string, std::string> named_tokens(const json& config, const json& map) {
  std::map<std::string, std::string> tokens;
  const auto note = [&](const std::string& key, const json& value) {
    if (const auto text = token_text(value)) tokens.try_emplace(key, *text);
  };
  for (const json* file : {&config, &map}) {
    for (const auto& [key, value] : file->items()) {
      if (key.ends_with("_token")) note(key, value);
    }
    const auto extra = file->find("extra_special_tokens");
    if (extra == file->end() || !extra->is_object()) continue;
    for (const auto& [key, value] : extra->items()) note(key, value);
  }
  return tokens;
}

}  // namespace

std::unique_ptr<TextStream> Tokenizer::stream(bool skip_special) const {
  return std::make_unique<WholeTextStream>(*this, skip_special);
}

TokenizerConfig parse_tokenizer_config(std::string_view tokenizer_config,
                                       std::string_view special_tokens_map,
                                       std::string_view added_tokens, const std::string& name) {
  const std::string map_name = name + ": special_tokens_map";
  const std::string added_name = name + ": added_tokens";
  const json config = parse_object(tokenizer_config, name);
  const json map = parse_object(special_tokens_map, map_name);
  const json added = parse_object(added_tokens, added_name);

  TokenizerConfig result;
  const auto named_token = [&](const char* key) {
    auto text = token_field(config, key, name);
    return text ? text : token_field(map, key, map_name);
  };
  result.bos_token = named_token("bos_token");
  result.eos_token = named_token("eos_token");
  result.unk_token = named_token("unk_token");
  result.named_tokens = named_tokens(config, map);
  result.add_bos_token = flag(config, "add_bos_token", true, name);
  result.add_eos_token = flag(config, "add_eos_token", false, name);
  result.legacy = flag(config, "legacy", true, name);
  result.add_prefix_space = flag(config, "add_prefix_space", true, name);

  std::map<int32_t, AddedToken> by_id;
  std::map<std::string, int32_t> by_content;
  const auto insert = [&](int64_t id, AddedToken token, const std::string& file) {
    token.id = checked_id(id, token.content, file);
    if (token.content.empty()) return;
    if (!by_content.try_emplace(token.content, token.id).second) {
      corrupt(file, fmt::format("added token \"{}\" has two ids", token.content));
    }
    const int32_t key = token.id;
    if (const auto [old, fresh] = by_id.try_emplace(key, std::move(token)); !fresh) {
      corrupt(file, fmt::format("id {} has two added tokens, \"{}\" the first", key,
                                old->second.content));
    }
  };

  if (const auto decoder = config.find("added_tokens_decoder");
      decoder != config.end() && !decoder->is_null()) {
    if (!decoder->is_object()) corrupt(name, "added_tokens_decoder is not an object");
    for (const auto& [key, value] : decoder->items()) {
      int64_t id = -1;
      const auto [end, status] = std::from_chars(key.data(), key.data() + key.size(), id);
      const auto text = token_text(value);
      if (status != std::errc() || end != key.data() + key.size() || !value.is_object() || !text) {
        corrupt(name, fmt::format("added_tokens_decoder[\"{}\"] is not an id with a token", key));
      }
      insert(id, added_token(value, *text, name), name);
    }
  }
  const std::map<std::string, json> specials = special_tokens(config, map);
  for (const auto& [content, value] : added.items()) {
    if (by_content.contains(content)) continue;
    if (!value.is_number_integer()) {
      corrupt(added_name, fmt::format("the id of \"{}\" is not an integer", content));
    }
    const auto special = specials.find(content);
    AddedToken token;
    if (special != specials.end() && special->second.is_object()) {
      token = added_token(special->second, content, map_name);
    } else {
      token.content = content;
      token.normalized = special == specials.end();
    }
    token.special = special != specials.end();
    const auto id = value.get<int64_t>();
    if (id >= 0 && id <= kMaxTokenId && by_id.contains(static_cast<int32_t>(id))) {
      continue;  // tokenizer_config.json is the newer file
    }
    insert(id, std::move(token), added_name);
  }
  for (auto& [id, token] : by_id) result.added_tokens.push_back(std::move(token));
  return result;
}

}  // namespace kvlm
