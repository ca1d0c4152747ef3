#include "runtime/loading/generation_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

GenerationDefaults generation(const json& file, const json& model = json::object()) {
  return parse_generation(ConfigReader(file, "generation_config.json"),
                          ConfigReader(model, "config.json"));
}

TEST(ParseGeneration, EosComesFromTheFirstFileThatHasIt) {
  const json text = {{"text_config", {{"eos_token_id", 5}}}};
  const json model = {{"eos_token_id", {3, 4}}, {"text_config", {{"eos_token_id", 5}}}};
  EXPECT_THAT(generation({{"eos_token_id", {7, 8}}}, model).eos_ids, ElementsAre(7, 8));
  EXPECT_THAT(generation({{"eos_token_id", 7}}, model).eos_ids, ElementsAre(7));
  EXPECT_THAT(generation(json::object(), model).eos_ids, ElementsAre(3, 4));
  EXPECT_THAT(generation(json::object(), text).eos_ids, ElementsAre(5));
  EXPECT_THAT(generation(json::object()).eos_ids, testing::IsEmpty());
  for (const json& value : {json(-1), json("</s>"), json(1.5), json::array({2, -1}),
                            json::array({nullptr}), json(int64_t{1} << 40)}) {
    EXPECT_THAT(failure([&] {
                  generation({{"eos_token_id", value}});
                }),
                HasSubstr("eos_token_id"))
        << value;
    // Also where another file comes first.
    for (const json& unused :
         {json{{"eos_token_id", value}}, json{{"text_config", {{"eos_token_id", value}}}}}) {
      EXPECT_THAT(failure([&] {
                    generation({{"eos_token_id", 7}}, unused);
                  }),
                  HasSubstr("eos_token_id"))
          << unused;
    }
  }
}

TEST(ParseGeneration, SamplesOnlyIfTheFileSaysSo) {
  const json fields = {{"temperature", 0.2}, {"top_k", 20}, {"top_p", 0.8}};
  json sampling = fields;
  sampling["do_sample"] = true;
  EXPECT_EQ(generation(fields).sampling.temperature, 0) << "greedy";
  EXPECT_EQ(generation(sampling).sampling.temperature, 0.2);
  EXPECT_EQ(generation(sampling).sampling.top_k, 20);
  EXPECT_EQ(generation(sampling).sampling.top_p, 0.8);
  // The reference's own defaults.
  EXPECT_EQ(generation({{"do_sample", true}}).sampling.temperature, 1);
  EXPECT_EQ(generation({{"do_sample", true}}).sampling.top_k, 50);
  EXPECT_EQ(generation({{"do_sample", true}}).sampling.top_p, 1);
  // The penalty counts in greedy mode too.
  EXPECT_EQ(generation({{"repetition_penalty", 1.05}}).sampling.repetition_penalty, 1.05);
  EXPECT_EQ(generation(json::object()).sampling.repetition_penalty, 1);
  for (const auto& [key, value] : std::vector<std::pair<const char*, json>>{
           {"temperature", -1}, {"top_k", -5}, {"top_p", 1.5}, {"repetition_penalty", 0}}) {
    EXPECT_THAT(failure([&key = key, &value = value] {
                  generation({{"do_sample", true}, {key, value}});
                }),
                HasSubstr(key));
  }
}

TEST(ParseGeneration, ReadsTheRulesOfWhatMayComeNext) {
  const LogitRuleOptions rules = generation({{"eos_token_id", {7, 8}},
                                             {"min_new_tokens", 3},
                                             {"min_length", 20},
                                             {"suppress_tokens", {1, 2}},
                                             {"begin_suppress_tokens", 4},
                                             {"no_repeat_ngram_size", 2},
                                             {"bad_words_ids", {{5}, {6, 7}}},
                                             {"forced_eos_token_id", {8}}})
                                     .sampling.rules;
  EXPECT_EQ(rules.min_new_tokens, 3);
  EXPECT_EQ(rules.min_length, 20);
  EXPECT_THAT(rules.eos_ids, ElementsAre(7, 8));
  EXPECT_THAT(rules.suppress_tokens, ElementsAre(1, 2));
  EXPECT_THAT(rules.begin_suppress_tokens, ElementsAre(4));
  EXPECT_EQ(rules.no_repeat_ngram_size, 2);
  EXPECT_THAT(rules.bad_words, ElementsAre(ElementsAre(5), ElementsAre(6, 7)));
  EXPECT_EQ(rules.forced_eos_token, 8);
  EXPECT_TRUE(generation({{"eos_token_id", 7}, {"max_length", 9}}).sampling.rules.empty());
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, json>>{{"bad_words_ids", {5, 6}},
                                                 {"bad_words_ids", {{5}, json::array()}},
                                                 {"bad_words_ids", {{-1}}},
                                                 {"suppress_tokens", {"a"}},
                                                 {"min_new_tokens", -1},
                                                 {"no_repeat_ngram_size", 1.5},
                                                 {"forced_eos_token_id", {1, 2}}}) {
    EXPECT_THAT(failure([&key = key, &value = value] {
                  generation({{key, value}});
                }),
                HasSubstr(key))
        << value;
  }
}

TEST(ParseGeneration, RefusesByNameWhatWouldChangeTheAnswer) {
  for (const auto& [key, value, neutral] : std::vector<std::tuple<const char*, json, json>>{
           {"num_beams", 4, 1},
           {"num_beam_groups", 2, 1},
           {"num_return_sequences", 3, 1},
           {"encoder_repetition_penalty", 1.5, 1.0},
           {"encoder_no_repeat_ngram_size", 2, 0},
           {"guidance_scale", 1.5, nullptr},
           {"penalty_alpha", 0.6, nullptr},
           {"diversity_penalty", 0.5, 0.0},
           {"exponential_decay_length_penalty", {10, 1.1}, nullptr},
           {"sequence_bias", {{{1}, 2.0}}, nullptr},
           {"constraints", {1}, nullptr},
           {"force_words_ids", {{1}}, nullptr},
           {"watermarking_config", json::object(), nullptr},
           {"dola_layers", "low", nullptr},
           {"stop_strings", {"x"}, nullptr},
           {"max_time", 3, nullptr},
           {"token_healing", true, false},
           {"cache_implementation", "quantized", "static"}}) {
    const std::string message = failure(
        [&key = key, &value = value] {
          generation({{key, value}});
        },
        ErrorCode::kUnsupported);
    EXPECT_THAT(message, AllOf(HasSubstr("generation_config.json: "), HasSubstr(key),
                               HasSubstr("remove the key")));
    EXPECT_NO_THROW(generation({{key, neutral}})) << key;
  }
  // Only where tokens are drawn.
  for (const char* key : {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "min_p"}) {
    EXPECT_NO_THROW(generation({{key, 0.5}})) << key;
    EXPECT_THAT(failure(
                    [&] {
                      generation({{key, 0.5}, {"do_sample", true}});
                    },
                    ErrorCode::kUnsupported),
                HasSubstr(key));
  }
}

}  // namespace
}  // namespace kvlm
