// Tokenizers on hostile files and hostile text. The first byte says which: a tokenizer.json and,
// behind a NUL, a text for it; a sentencepiece model likewise; a tokenizer_config.json; or a text
// for two small tokenizers that are sound. Whatever loads must keep its promises: ids in range,
// streamed text equal to decoded text, Error and nothing else thrown.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "llm/tokenizer.h"
#include "llm/unicode.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Function>
void attempt(const Function& function) {
  try {
    function();
  } catch (const kvlm::Error& error) {
    const std::string_view text = error.what();
    require(kvlm::is_valid_utf8(text) && text.size() < 1000);
    for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
  }
}

void exercise(const kvlm::Tokenizer& tokenizer, std::string_view text) {
  require(tokenizer.vocab_size() >= 0);
  std::vector<int32_t> ids;
  for (const bool parse_special : {false, true}) {
    for (const bool add_special : {false, true}) {
      attempt([&] {
        ids = tokenizer.encode(text, {add_special, parse_special});
        require(kvlm::is_valid_utf8(text));
      });
    }
  }
  // Any ids at all, these among them.
  for (size_t i = 0; i + 1 < text.size() && i < 64; i += 2) {
    ids.push_back(static_cast<unsigned char>(text[i]) * 3 - static_cast<signed char>(text[i + 1]));
  }
  for (const bool skip_special : {false, true}) {
    const std::string whole = tokenizer.decode(ids, skip_special);
    kvlm::StreamDecoder stream(tokenizer, skip_special);
    std::string streamed;
    for (const int32_t id : ids) {
      const std::string piece = stream.push(id);
      streamed += piece;
    }
    streamed += stream.finish();
    require(streamed == whole);
  }
  for (const int32_t id : ids) {
    const std::string token = tokenizer.token_of(id);
    if (!token.empty()) require(tokenizer.id_of(token).has_value());
  }
}

std::unique_ptr<kvlm::Tokenizer> llama_like() {
  nlohmann::json vocab = {{"<unk>", 0}, {"<s>", 1}};
  const auto add = [&vocab](const std::string& token) {
    if (!vocab.contains(token)) vocab[token] = vocab.size();
  };
  for (int byte = 0; byte < 256; ++byte) {
    constexpr std::string_view kHex = "0123456789ABCDEF";
    add(std::string("<0x") + kHex[static_cast<size_t>(byte / 16)] +
        kHex[static_cast<size_t>(byte % 16)] + ">");
  }
  const std::string space = "\xE2\x96\x81";
  for (const std::string& token : {space, std::string("a"), std::string("b"), std::string("ab"),
                                   space + space, space + "a", std::string("aa")}) {
    add(token);
  }
  const nlohmann::json file = {
      {"added_tokens",
       {{{"id", 300}, {"content", "<image>"}, {"special", true}},
        {{"id", 301}, {"content", "<r>"}, {"special", false}, {"rstrip", true}, {"lstrip", true}}}},
      {"pre_tokenizer",
       {{"type", "Metaspace"},
        {"replacement", space},
        {"prepend_scheme", "first"},
        {"split", true}}},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"}, {"pattern", {{"String", space}}}, {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}},
          {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 1}}}}}},
      {"model",
       {{"type", "BPE"},
        {"vocab", vocab},
        {"merges", {"a b", "\xE2\x96\x81 \xE2\x96\x81", "\xE2\x96\x81 a", "a a"}},
        {"unk_token", "<unk>"},
        {"byte_fallback", true}}}};
  return kvlm::make_json_tokenizer(file.dump(), {}, "llama");
}

std::unique_ptr<kvlm::Tokenizer> qwen_like() {
  nlohmann::json vocab = nlohmann::json::object();
  for (char32_t c = 33; c < 0x144; ++c) {
    if ((c > 126 && c < 161) || c == 173) continue;
    std::string token;
    kvlm::append_utf8(token, c);
    vocab[token] = vocab.size();
  }
  vocab["\xC4\xA0\xC4\xA0"] = vocab.size();
  const nlohmann::json file = {
      {"normalizer", {{"type", "NFC"}}},
      {"added_tokens", {{{"id", 400}, {"content", "<|im_end|>"}, {"special", true}}}},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"behavior", "Isolated"},
           {"pattern",
            {{"Regex",
              "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
              "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"\xC4\xA0 \xC4\xA0"}}}}};
  return kvlm::make_json_tokenizer(file.dump(), {}, "qwen");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t nul = input.rfind('\0');
  const std::string_view file = input.substr(0, nul);
  const std::string_view text =
      nul == input.npos ? "Hello <s> w\xC3\xB6rld" : input.substr(nul + 1);
  switch (data[0]) {
    case 'j':
      attempt([&] { exercise(*kvlm::make_json_tokenizer(file, {}, "tokenizer.json"), text); });
      break;
    case 'm':
      for (const bool legacy : {true, false}) {
        kvlm::TokenizerConfig config;
        config.legacy = legacy;
        attempt([&] {
          exercise(*kvlm::make_sentencepiece_tokenizer(input, config, "tokenizer.model"),
                   "Hello <s> w\xC3\xB6rld");
        });
      }
      break;
    case 'c':
      attempt([&] { kvlm::parse_tokenizer_config(file, text, text, "tokenizer_config.json"); });
      break;
    default: {
      static const auto kLlama = llama_like();
      static const auto kQwen = qwen_like();
      exercise(*kLlama, input);
      exercise(*kQwen, input);
      if (kvlm::is_valid_utf8(input)) {
        // Byte-level without a special token: nothing is lost but what NFC changes.
        const auto ids = kQwen->encode(input, {.parse_special = false});
        require(kQwen->decode(ids, true) == kvlm::to_nfc(input));
      }
    }
  }
  return 0;
}
