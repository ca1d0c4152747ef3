// Tokenizers against the reference libraries, on the tiny vocabularies of tests/llm/make_data.py.
// The released LLaMA and Qwen vocabularies are not in this repository, so the ids of transformers'
// common test of tokenizers cannot be checked here; its text is among the cases, with the ids of
// the tiny vocabularies.

#include "llm/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <tuple>

#include "kernels/base/error.h"
#include "tests/source_folder.h"

namespace kvlm {
namespace {

using testing::HasSubstr;

using nlohmann::json;
using Ids = std::vector<int32_t>;

std::string read_data(const std::string& name) {
  std::ifstream file(test::source_folder() / "tests/llm/data" / name, std::ios::binary);
  if (!file) throw std::runtime_error("no " + name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TokenizerConfig llama_config(bool legacy) {
  TokenizerConfig config;
  config.bos_token = "<s>";
  config.eos_token = "</s>";
  config.unk_token = "<unk>";
  config.legacy = legacy;
  for (const auto& [id, content] : {std::pair{700, "<image>"}, std::pair{701, "<pad>"}}) {
    AddedToken token;
    token.id = id;
    token.content = content;
    config.added_tokens.push_back(token);
  }
  return config;
}

std::unique_ptr<Tokenizer> load(const std::string& name) {
  if (name.starts_with("sentencepiece")) {
    return make_sentencepiece_tokenizer(read_data("llama.tokenizer.model"),
                                        llama_config(name == "sentencepiece_legacy"),
                                        "tokenizer.model");
  }
  if (name == "internlm2") {
    return make_sentencepiece_tokenizer(read_data("internlm2.tokenizer.model"), llama_config(true),
                                        "tokenizer.model");
  }
  return make_json_tokenizer(read_data(name + ".tokenizer.json"), {}, "tokenizer.json");
}

template <class Function>
Error error_of(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing thrown";
  return Error(ErrorCode::kDevice, "");
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  StreamDecoder decoder(tokenizer, skip_special);
  std::string text;
  for (const int32_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

class TokenizerGolden : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerGolden, EncodesAsTheReference) {
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  for (const json& entry : golden.at("cases")) {
    const auto text = entry.at("text").get<std::string>();
    EXPECT_EQ(tokenizer->encode(text), entry.at("ids").get<Ids>()) << entry.at("text");
    EXPECT_EQ(tokenizer->encode(text, {.add_special_tokens = false}), entry.at("plain").get<Ids>())
        << entry.at("text");
  }
}

TEST_P(TokenizerGolden, DecodesAsTheReference) {
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  for (const char* list : {"cases", "decodes"}) {
    for (const json& entry : golden.at(list)) {
      const auto ids = entry.at("ids").get<Ids>();
      EXPECT_EQ(tokenizer->decode(ids, false), entry.at("decoded").get<std::string>()) << entry;
      EXPECT_EQ(tokenizer->decode(ids, true), entry.at("skipped").get<std::string>()) << entry;
    }
  }
}

TEST_P(TokenizerGolden, StreamsWhatItDecodes) {
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  for (const char* list : {"cases", "decodes"}) {
    for (const json& entry : golden.at(list)) {
      const auto ids = entry.at("ids").get<Ids>();
      for (const bool skip : {false, true}) {
        EXPECT_EQ(streamed(*tokenizer, ids, skip), tokenizer->decode(ids, skip)) << entry;
      }
    }
  }
}

/// Of a text without special tokens, but for the space that some put in front of it.
TEST_P(TokenizerGolden, BytesOfTokensAreThoseOfTheText) {
  const bool spaced = GetParam() == std::string_view("no_decoder");  // puts spaces between tokens
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  size_t compared = 0;
  for (const json& entry : golden.at("cases")) {
    const Ids ids = tokenizer->encode(entry.at("text").get<std::string>(),
                                      {.add_special_tokens = false, .parse_special = false});
    std::string text = tokenizer->decode(ids, false);
    const auto is_unknown = [&](int32_t id) { return tokenizer->token_of(id) == "<unk>"; };
    if (std::ranges::any_of(ids, is_unknown)) continue;
    std::string bytes;
    for (const int32_t id : ids) bytes += tokenizer->bytes_of(id);
    if (spaced) {
      std::erase(text, ' ');
      std::erase(bytes, ' ');
    }
    EXPECT_TRUE(bytes == text || bytes == " " + text) << entry << bytes;
    ++compared;
  }
  EXPECT_GT(compared, 3u);
  EXPECT_EQ(tokenizer->bytes_of(-1), "");
  EXPECT_EQ(tokenizer->bytes_of(tokenizer->vocab_size()), "");
}

TEST_P(TokenizerGolden, NamesEveryToken) {
  const auto tokenizer = load(GetParam());
  ASSERT_GT(tokenizer->vocab_size(), 0);
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    const std::string token = tokenizer->token_of(id);
    ASSERT_NE(token, "") << id;
    EXPECT_EQ(tokenizer->id_of(token), id) << token;
  }
  for (const int32_t id : {-1, tokenizer->vocab_size(), tokenizer->vocab_size() + 1000000}) {
    EXPECT_EQ(tokenizer->token_of(id), "");
    EXPECT_EQ(tokenizer->decode(Ids{id}, false), "");
  }
  EXPECT_EQ(tokenizer->id_of("no such token"), std::nullopt);
}

TEST_P(TokenizerGolden, RefusesTextThatIsNotUtf8) {
  const auto tokenizer = load(GetParam());
  for (const char* text :
       {"\x80", "a\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xFF"}) {
    EXPECT_EQ(error_of([&] { tokenizer->encode(text); }).code(), ErrorCode::kInvalidArgument);
  }
}

TEST_P(TokenizerGolden, KeepsSpecialsOutWhenToldTo) {
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  for (const json& entry : golden.at("cases")) {
    const auto text = entry.at("text").get<std::string>();
    const Ids ids = tokenizer->encode(text, {.add_special_tokens = false, .parse_special = false});
    for (const int32_t id : ids) {
      const std::string token = tokenizer->token_of(id);
      for (const char* special : {"<s>", "</s>", "<image>", "<|im_start|>", "<|eot_id|>"}) {
        EXPECT_NE(token, special) << entry.at("text");
      }
    }
  }
}

TEST_P(TokenizerGolden, IsFastOnLongText) {
  const auto tokenizer = load(GetParam());
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "word " + std::string(static_cast<size_t>(i % 7), 'a');
  for (const std::string& long_text : {text, std::string(200000, 'a'), std::string(200000, ' ')}) {
    const Ids ids = tokenizer->encode(long_text);
    EXPECT_EQ(streamed(*tokenizer, ids, true), tokenizer->decode(ids, true));
  }
}

TEST_P(TokenizerGolden, IsSharedBetweenThreads) {
  const auto tokenizer = load(GetParam());
  const json golden = json::parse(read_data(std::string(GetParam()) + ".golden.json"));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (const json& entry : golden.at("cases")) {
        const auto ids = entry.at("ids").get<Ids>();
        if (tokenizer->encode(entry.at("text").get<std::string>()) != ids) ++wrong;
        if (tokenizer->decode(ids, true) != entry.at("skipped").get<std::string>()) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGolden,
                         testing::Values("llama_legacy", "llama_metaspace", "sentencepiece_legacy",
                                         "sentencepiece", "internlm2", "qwen2", "llama3", "digits",
                                         "numbers", "odd", "no_decoder"),
                         [](const auto& test) { return std::string(test.param); });

/// A kind of tokenizer on texts in many scripts, with odd white space, marks in every normal form,
/// controls, special tokens and long runs.
class TokenizerStrings : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerStrings, EncodesTwoThousandAsTheReference) {
  const auto tokenizer = load(GetParam());
  const json strings = json::parse(read_data("strings.json"));
  const std::string kind = GetParam();
  const std::string file = kind == "sentencepiece_legacy" ? "llama_legacy" : kind;
  const json ids = json::parse(read_data(file + ".strings.json"));
  ASSERT_EQ(strings.size(), 2000u);
  ASSERT_EQ(ids.size(), strings.size());
  int wrong = 0;
  for (size_t i = 0; i < strings.size(); ++i) {
    const auto text = strings[i].get<std::string>();
    if (tokenizer->encode(text) == ids[i].get<Ids>()) continue;
    if (++wrong <= 5) {
      ADD_FAILURE() << "string " << i << ": " << strings[i] << " gives "
                    << json(tokenizer->encode(text)) << " instead of " << ids[i];
    }
  }
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerStrings,
                         testing::Values("llama_legacy", "llama_metaspace", "sentencepiece_legacy",
                                         "sentencepiece", "internlm2", "qwen2", "llama3", "digits"),
                         [](const auto& test) { return std::string(test.param); });

/// A small sound file, for tests that change one thing about it.
json small_file() {
  return {{"added_tokens", {{{"id", 9}, {"content", "<x>"}, {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder", {{"type", "Fuse"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}, {" ", 3}, {"<s>", 4}}},
            {"merges", {"a b"}}}}};
}

std::unique_ptr<Tokenizer> make(const json& file, const TokenizerConfig& config = {}) {
  return make_json_tokenizer(file.dump(), config, "tokenizer.json");
}

TEST(JsonTokenizer, NamesWhatIsNotBuilt) {
  const std::vector<std::pair<json::json_pointer, json>> changes = {
      {json::json_pointer("/normalizer"), {{"type", "NFKC"}}},
      {json::json_pointer("/normalizer"),
       {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}},
      {json::json_pointer("/normalizer"),
       {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", "b"}}},
      {json::json_pointer("/pre_tokenizer"), {{"type", "Whitespace"}}},
      {json::json_pointer("/pre_tokenizer"),
       {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Removed"}}},
      {json::json_pointer("/pre_tokenizer"),
       {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}}},
      {json::json_pointer("/pre_tokenizer"),
       {{"type", "Split"}, {"pattern", {{"Regex", "\\h"}}}, {"behavior", "Isolated"}}},
      {json::json_pointer("/pre_tokenizer"),
       {{"type", "Split"}, {"pattern", {{"Regex", "[a-z&&[^b]]"}}}, {"behavior", "Isolated"}}},
      {json::json_pointer("/post_processor"), {{"type", "BertProcessing"}}},
      {json::json_pointer("/decoder"), {{"type", "WordPiece"}}},
      {json::json_pointer("/model/type"), "Unigram"},
      {json::json_pointer("/model/dropout"), 0.1},
  };
  for (const auto& [pointer, value] : changes) {
    json file = small_file();
    file[pointer] = value;
    const Error error = error_of([&] { make(file); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << value;
    EXPECT_THAT(error.what(), HasSubstr("tokenizer.json: ")) << value;
  }
}

/// A file of a few kilobytes must not make gigabytes of a word, nor of a token.
TEST(JsonTokenizer, RefusesTextThatGrowsWithoutBound) {
  const json twice = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  const json prepend = {{"type", "Prepend"}, {"prepend", std::string(10000, 'p')}};
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const auto sequence = [](const char* list, const json& step, size_t times) {
    return json{{"type", "Sequence"}, {list, json(times, step)}};
  };
  for (const auto& [pointer, value] : std::vector<std::pair<json::json_pointer, json>>{
           {json::json_pointer("/normalizer"), sequence("normalizers", twice, 40)},
           {json::json_pointer("/normalizer"),
            sequence("normalizers", {{"type", "Prepend"}, {"prepend", "p"}}, 10000)},
           {json::json_pointer("/normalizer"), prepend},
           {json::json_pointer("/normalizer"), sequence("normalizers", {{"type", "NFC"}}, 100000)},
           {json::json_pointer("/pre_tokenizer"), sequence("pretokenizers", byte_level, 40)},
           {json::json_pointer("/decoder"), sequence("decoders", twice, 1040)},
           {json::json_pointer("/decoder"), sequence("decoders", twice, 7)}}) {
    json file = small_file();
    file[pointer] = value;
    const Error error = error_of([&] { make(file); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << pointer;
    EXPECT_THAT(error.what(), HasSubstr("tokenizer.json: ")) << pointer;
    EXPECT_THAT(error.what(), HasSubstr(pointer.back())) << pointer;
    EXPECT_THAT(error.what(), HasSubstr("at most")) << pointer;
  }
  json file = small_file();
  file["normalizer"] = sequence("normalizers", twice, 6);
  file["decoder"] = sequence("decoders", twice, 6);
  EXPECT_EQ(make(file)->encode("a").size(), 64u);
  EXPECT_EQ(make(file)->decode(Ids{1}, true).size(), 1u);
}

/// What is said of a damaged file: where, what was found, what was expected, what to do.
TEST(JsonTokenizer, NamesThePlaceOfDamage) {
  for (const auto& [pointer, value, words] :
       std::vector<std::tuple<const char*, json, const char*>>{
           {"/normalizer", 1, "normalizer is 1; expected an object"},
           {"/normalizer",
            {{"type", "Prepend"}},
            "normalizer.prepend is missing; expected a string"},
           {"/normalizer",
            {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", 3}}}}},
            "normalizer.normalizers[1].type is 3; expected a string"},
           {"/pre_tokenizer",
            {{"type", "Sequence"}, {"pretokenizers", json::object()}},
            "pre_tokenizer.pretokenizers is an object; expected a list"},
           {"/decoder",
            {{"type", "Strip"}, {"content", "ab"}, {"start", 1}, {"stop", 1}},
            "decoder.content is \"ab\"; expected one character"},
           {"/decoder",
            {{"type", "Strip"}, {"content", "a"}, {"start", -1}, {"stop", 1}},
            "decoder.start is -1; expected an integer from 0"},
           {"/post_processor",
            {{"type", "TemplateProcessing"},
             {"special_tokens", json::object()},
             {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}}},
            "post_processor.special_tokens.<s> is missing; expected an object"},
           {"/added_tokens/0/id", json::object(), "added_tokens[0].id is an object"},
           {"/added_tokens/0/special", "yes", "added_tokens[0].special is \"yes\""},
           {"/model", 1, "model is 1; expected an object"},
           {"/model/vocab", json::array(), "model.vocab is a list of 0; expected an object"},
           {"/model/byte_fallback", "yes", "model.byte_fallback is \"yes\""},
           {"/truncation", {{"max_length", "x"}}, "truncation.max_length is \"x\""}}) {
    json file = small_file();
    file[json::json_pointer(pointer)] = value;
    const Error error = error_of([&] { make(file); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << pointer;
    EXPECT_THAT(error.what(), HasSubstr(words)) << pointer;
    EXPECT_THAT(error.what(), HasSubstr("tokenizer.json: ")) << pointer;
    EXPECT_THAT(error.what(), HasSubstr("download the file again")) << pointer;
  }
}

/// The reference cuts a text without a picture there: a text that fits is encoded, others refused.
TEST(JsonTokenizer, RefusesTextsThatTheReferenceWouldCut) {
  json file = small_file();
  file["truncation"] = {{"max_length", 4}, {"direction", "Right"}, {"stride", 0}};
  const size_t short_text = make(file)->encode("aa").size();
  EXPECT_LE(short_text, 4u);
  EXPECT_EQ(make(small_file())->encode("aa").size(), short_text);
  const Error error = error_of([&] { make(file)->encode("a a a a a a a"); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("cuts texts after 4 tokens"));
}

TEST(JsonTokenizer, RefusesDamage) {
  const std::vector<std::pair<json::json_pointer, json>> changes = {
      {json::json_pointer("/model/vocab/a"), 1},
      {json::json_pointer("/model/vocab/a"), -1},
      {json::json_pointer("/model/vocab/a"), 1 << 30},
      {json::json_pointer("/model/vocab/a"), "0"},
      {json::json_pointer("/model/vocab"), json::array()},
      {json::json_pointer("/model/merges/0"), "a c"},
      {json::json_pointer("/model/merges/0"), "a"},
      {json::json_pointer("/model/merges/0"), "a b c"},
      {json::json_pointer("/model/merges/0"), json::array({"a"})},
      {json::json_pointer("/model/merges/0"), 5},
      {json::json_pointer("/model/unk_token"), "<unk>"},
      {json::json_pointer("/model/byte_fallback"), "yes"},
      {json::json_pointer("/added_tokens/0/id"), -1},
      {json::json_pointer("/added_tokens/0/id"), 1 << 30},
      {json::json_pointer("/added_tokens/0/content"), "ab"},
      {json::json_pointer("/added_tokens"), "none"},
      {json::json_pointer("/decoder"), {{"type", "Strip"}, {"content", "ab"}}},
      {json::json_pointer("/decoder"), {{"type", "Strip"}, {"content", " "}}},
      {json::json_pointer("/normalizer"), {{"type", "Prepend"}}},
      {json::json_pointer("/normalizer"), 1},
      {json::json_pointer("/post_processor"),
       {{"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", {}}}},
  };
  for (const auto& [pointer, value] : changes) {
    json file = small_file();
    file[pointer] = value;
    EXPECT_EQ(error_of([&] { make(file); }).code(), ErrorCode::kCorruptFile) << pointer << value;
  }
  for (const char* text : {"", "[]", "{}", "{\"model\":{},\"model\":{}}", "{\"a\":\"\xFF\"}"}) {
    EXPECT_THROW(make_json_tokenizer(text, {}, "tokenizer.json"), Error) << text;
  }
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_EQ(error_of([&] { make_json_tokenizer(deep, {}, "t"); }).code(), ErrorCode::kCorruptFile);
}

TEST(JsonTokenizer, ReadsTokensAndFlagsOfTheConfiguration) {
  TokenizerConfig config;
  config.bos_token = "<s>";
  config.eos_token = "<y>";
  AddedToken x;
  x.id = 9;
  x.content = "<x>";
  x.rstrip = true;  // the file says nothing of it
  AddedToken y;
  y.id = 12;
  y.content = "<y>";
  config.added_tokens = {x, y};
  const auto tokenizer = make(small_file(), config);
  EXPECT_EQ(tokenizer->bos_id(), 4);
  EXPECT_EQ(tokenizer->eos_id(), 12);
  EXPECT_EQ(tokenizer->vocab_size(), 13);
  EXPECT_EQ(tokenizer->encode("a<x>  b<y> "), (Ids{0, 9, 1, 12, 3}));
  EXPECT_EQ(make(small_file())->encode("a<x> b"), (Ids{0, 9, 3, 1}));
  EXPECT_EQ(make(small_file())->bos_id(), std::nullopt);
  config.added_tokens[0].id = 10;  // belongs to another file
  EXPECT_EQ(error_of([&] { make(small_file(), config); }).code(), ErrorCode::kCorruptFile);
}

TEST(JsonTokenizer, MakesNoSpecialTokenFromPlainText) {
  json file = small_file();
  file["model"]["vocab"]["<x"] = 5;
  file["model"]["vocab"][">"] = 6;
  file["model"]["vocab"]["<"] = 7;
  file["model"]["vocab"]["x"] = 8;
  file["model"]["vocab"]["<x>"] = 9;
  file["model"]["merges"] = {"< x", "<x >"};  // as in a vocabulary converted from sentencepiece
  const auto tokenizer = make(file);
  EXPECT_EQ(tokenizer->encode("<x>"), (Ids{9}));
  EXPECT_EQ(tokenizer->encode("<x>", {.parse_special = false}), (Ids{5, 6}));
}

TEST(JsonTokenizer, GivesUpOnRunawayExpressions) {
  json file = small_file();
  file["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", "(a+)+b"}}}, {"behavior", "Isolated"}};
  const auto tokenizer = make(file);
  EXPECT_EQ(tokenizer->encode("aab"), (Ids{0, 2}));
  // The final b keeps the library from seeing at once that there is no match.
  EXPECT_EQ(error_of([&] { tokenizer->encode(std::string(60, 'a') + "cb"); }).code(),
            ErrorCode::kInvalidArgument);
}

TEST(SentencepieceTokenizer, RefusesDamage) {
  const std::string model = read_data("llama.tokenizer.model");
  std::string bad_length = model;
  bad_length[1] = '\x7F';
  for (const std::string& bytes :
       {std::string(), std::string("x"), std::string(1000, '\xFF'), std::string(1000, '\0'),
        model.substr(0, model.size() / 2), bad_length}) {
    EXPECT_EQ(error_of([&] { make_sentencepiece_tokenizer(bytes, {}, "m"); }).code(),
              ErrorCode::kCorruptFile);
    const std::string message =
        error_of([&] { make_sentencepiece_tokenizer(bytes, {}, "tokenizer.model"); }).what();
    EXPECT_THAT(message, HasSubstr("download the file again"));
    EXPECT_EQ(message.find("./src/"), std::string::npos) << message;
  }
  TokenizerConfig config = llama_config(true);
  config.added_tokens[0].content = "</s>";
  EXPECT_EQ(error_of([&] { make_sentencepiece_tokenizer(model, config, "m"); }).code(),
            ErrorCode::kCorruptFile);
}

TEST(SentencepieceTokenizer, TakesSpecialTokensFromTheModelItself) {
  const auto tokenizer = make_sentencepiece_tokenizer(read_data("llama.tokenizer.model"), {}, "m");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_EQ(tokenizer->vocab_size(), 700);
  EXPECT_EQ(tokenizer->encode("<s></s>"), (Ids{1, 1, 2}));
  TokenizerConfig config;
  config.add_bos_token = false;
  config.add_eos_token = true;
  const auto other = make_sentencepiece_tokenizer(read_data("llama.tokenizer.model"), config, "m");
  EXPECT_EQ(other->encode("<s>"), (Ids{1, 2}));
  EXPECT_EQ(other->encode("<s>", {.add_special_tokens = false}), (Ids{1}));
}

TEST(TokenizerConfig, ReadsTheLlavaForm) {
  const TokenizerConfig config = parse_tokenizer_config(
      R"({"add_bos_token": true, "add_eos_token": false, "add_prefix_space": null, "legacy": false,
          "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false},
          "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": true, "normalized": false},
            "32000": {"content": "<image>", "special": true, "normalized": false, "lstrip": true},
            "32001": {"content": "<tool>", "special": false}},
          "unknown": [1]})",
      R"({"unk_token": {"content": "<unk>"}, "bos_token": "not this"})", "",
      "tokenizer_config.json");
  EXPECT_EQ(config.bos_token, "<s>");
  EXPECT_EQ(config.eos_token, "</s>");
  EXPECT_EQ(config.unk_token, "<unk>");
  EXPECT_FALSE(config.legacy);
  EXPECT_TRUE(config.add_bos_token);
  EXPECT_TRUE(config.add_prefix_space);
  ASSERT_EQ(config.added_tokens.size(), 3U);
  EXPECT_EQ(config.added_tokens[1].id, 32000);
  EXPECT_EQ(config.added_tokens[1].content, "<image>");
  EXPECT_TRUE(config.added_tokens[1].special);
  EXPECT_TRUE(config.added_tokens[1].lstrip);
  EXPECT_FALSE(config.added_tokens[2].special);
  EXPECT_TRUE(config.added_tokens[2].normalized);
}

TEST(TokenizerConfig, ReadsTheOlderForm) {
  const TokenizerConfig config = parse_tokenizer_config(
      R"({"legacy": null})",
      R"({"eos_token": "<e>", "additional_special_tokens": ["<a>", {"content": "<b>", "rstrip": true}]})",
      R"({"<a>": 7, "<b>": 8, "<c>": 9})", "tokenizer_config.json");
  EXPECT_TRUE(config.legacy);
  EXPECT_EQ(config.bos_token, std::nullopt);
  EXPECT_EQ(config.eos_token, "<e>");
  ASSERT_EQ(config.added_tokens.size(), 3U);
  EXPECT_TRUE(config.added_tokens[0].special);
  EXPECT_TRUE(config.added_tokens[1].special);
  EXPECT_TRUE(config.added_tokens[1].rstrip);
  EXPECT_FALSE(config.added_tokens[2].special);
  EXPECT_TRUE(parse_tokenizer_config("", "", "", "x").added_tokens.empty());
}

TEST(TokenizerConfig, RefusesDamage) {
  for (const char* text :
       {"[]", "{", R"({"bos_token": 1})", R"({"legacy": "yes"})", R"({"added_tokens_decoder": []})",
        R"({"added_tokens_decoder": {"x": {"content": "a"}}})",
        R"({"added_tokens_decoder": {"-1": {"content": "a"}}})",
        R"({"added_tokens_decoder": {"1": "a"}})",
        R"({"added_tokens_decoder": {"1": {"content": "a"}, "2": {"content": "a"}}})",
        R"({"added_tokens_decoder": {"99999999": {"content": "a"}}})"}) {
    const Error error = error_of([&] { parse_tokenizer_config(text, "", "", "tc.json"); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << text;
    EXPECT_THAT(error.what(), HasSubstr("tc.json")) << text;
  }
  EXPECT_THROW(parse_tokenizer_config("", "", R"({"a": "1"})", "x"), Error);
}

TEST(StreamDecoder, HoldsBackHalfCharacters) {
  const auto tokenizer = load("qwen2");
  const Ids ids = tokenizer->encode(
      "a\U0001F60A"
      "b");
  ASSERT_EQ(ids.size(), 6U);  // the emoji is four bytes in this vocabulary
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push(ids[0]), "a");
  EXPECT_EQ(decoder.push(ids[1]), "");
  EXPECT_EQ(decoder.push(ids[2]), "");
  EXPECT_EQ(decoder.push(ids[3]), "");
  EXPECT_EQ(decoder.push(ids[4]), "\U0001F60A");
  EXPECT_EQ(decoder.push(ids[1]), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
}

TEST(StreamDecoder, StripsOnlyTheFirstSpace) {
  const auto tokenizer = load("llama_legacy");
  const Ids ids = tokenizer->encode("Hello there", {.add_special_tokens = false});
  StreamDecoder decoder(*tokenizer);
  std::string text;
  for (const int32_t id : {1, ids.front(), ids.front()}) text += decoder.push(id);
  EXPECT_FALSE(text.starts_with(' '));
  EXPECT_THAT(text, HasSubstr(" "));
}

/// A tokenizer that has only decode(), as a stand-in in other tests might.
class PlainTokenizer final : public Tokenizer {
 public:
  using Tokenizer::encode;
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions&) const override {
    return {text.begin(), text.end()};
  }
  std::string decode(std::span<const int32_t> ids, bool) const override {
    std::string text;
    for (const int32_t id : ids) text.push_back(static_cast<char>(id));
    return text;
  }
  int32_t vocab_size() const noexcept override { return 256; }
  std::optional<int32_t> id_of(std::string_view) const override { return std::nullopt; }
  std::string token_of(int32_t) const override { return ""; }
  std::string bytes_of(int32_t id) const override { return {static_cast<char>(id)}; }
  std::optional<int32_t> bos_id() const noexcept override { return std::nullopt; }
  std::optional<int32_t> eos_id() const noexcept override { return std::nullopt; }
};

TEST(StreamDecoder, ServesATokenizerWithoutAStreamOfItsOwn) {
  const PlainTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xC3), "");
  EXPECT_EQ(decoder.push(0xA9), "\u00E9");
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.finish(), "\xE4");
}

}  // namespace
}  // namespace kvlm
