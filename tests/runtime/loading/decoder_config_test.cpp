#include "runtime/loading/decoder_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
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

LlamaConfig llama(const json& text) {
  const json config = {{"text_config", text}};
  const ConfigReader reader = ConfigReader(config, "config.json").object("text_config");
  constexpr std::array kDecoders = {
      DecoderType::kLlama,   DecoderType::kMistral, DecoderType::kQwen2,    DecoderType::kQwen3,
      DecoderType::kQwen2Vl, DecoderType::kQwen3Vl, DecoderType::kInternLm2};
  return parse_decoder_config(reader, decoder_type(reader, kDecoders));
}

std::string llama_failure(const json& text, ErrorCode code = ErrorCode::kCorruptFile) {
  return failure([&] { llama(text); }, code);
}

// --------------------------------------------------------------------------------- text defaults

/// What a hub file of 2024 leaves out is the default of transformers' configuration class.
TEST(LlamaConfig, MissingFieldsTakeTheClassDefaultsOfLlama) {
  for (const json& text : {json::object(), json{{"model_type", "llama"}}}) {
    const LlamaConfig config = llama(text);
    EXPECT_EQ(config.vocab_size, 32000);
    EXPECT_EQ(config.hidden, 4096);
    EXPECT_EQ(config.intermediate, 11008);
    EXPECT_EQ(config.layers, 32);
    EXPECT_EQ(config.q_heads, 32);
    EXPECT_EQ(config.kv_heads, 32);
    EXPECT_EQ(config.head_dim, 128);
    EXPECT_EQ(config.max_positions, 2048);
    EXPECT_EQ(config.rms_eps, 1e-6f);
    EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias);
    EXPECT_FALSE(config.tie_embeddings);
    EXPECT_EQ(config.rope.type, RopeConfig::Type::kDefault);
    EXPECT_EQ(config.rope.theta, 1e4);
    EXPECT_EQ(config.rope.rotary_dim, 128);
    EXPECT_EQ(config.rope.max_positions, 2048);
  }
}

TEST(LlamaConfig, MissingFieldsTakeTheClassDefaultsOfMistral) {
  const LlamaConfig config = llama({{"model_type", "mistral"}});
  EXPECT_EQ(config.vocab_size, 32000);
  EXPECT_EQ(config.hidden, 4096);
  EXPECT_EQ(config.intermediate, 14336);
  EXPECT_EQ(config.layers, 32);
  EXPECT_EQ(config.q_heads, 32);
  EXPECT_EQ(config.kv_heads, 8);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.max_positions, 4096) << "of the sliding window";
  EXPECT_EQ(config.rope.max_positions, 131072);
  EXPECT_EQ(config.rms_eps, 1e-6f);
  EXPECT_FALSE(config.tie_embeddings);
  EXPECT_EQ(config.rope.theta, 1e4);
}

TEST(LlamaConfig, KvHeadsAndHeadDimFollowWhatIsGiven) {
  const LlamaConfig heads = llama({{"num_attention_heads", 40}, {"hidden_size", 5120}});
  EXPECT_EQ(heads.kv_heads, 40);
  EXPECT_EQ(heads.head_dim, 128);
  const LlamaConfig own =
      llama({{"hidden_size", 48}, {"num_attention_heads", 4}, {"head_dim", 16}});
  EXPECT_EQ(own.head_dim, 16);
  EXPECT_EQ(own.rope.rotary_dim, 16);
  // null is absent
  EXPECT_EQ(llama({{"head_dim", nullptr}, {"num_key_value_heads", nullptr}}).head_dim, 128);
}

TEST(LlamaConfig, ReadsWhatTheFileSays) {
  const LlamaConfig config = llama({{"vocab_size", 32064},
                                    {"hidden_size", 64},
                                    {"intermediate_size", 96},
                                    {"num_hidden_layers", 5},
                                    {"num_attention_heads", 8},
                                    {"num_key_value_heads", 2},
                                    {"max_position_embeddings", 4096},
                                    {"rms_norm_eps", 1e-5},
                                    {"attention_bias", true},
                                    {"mlp_bias", true},
                                    {"tie_word_embeddings", true},
                                    {"hidden_act", "silu"},
                                    {"rope_theta", 5e5}});
  EXPECT_EQ(config.vocab_size, 32064);
  EXPECT_EQ(config.hidden, 64);
  EXPECT_EQ(config.intermediate, 96);
  EXPECT_EQ(config.layers, 5);
  EXPECT_EQ(config.q_heads, 8);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.max_positions, 4096);
  EXPECT_EQ(config.rms_eps, 1e-5f);
  EXPECT_TRUE(config.qkv_bias && config.output_bias && config.mlp_bias && config.tie_embeddings);
  EXPECT_EQ(config.rope.theta, 5e5);
}

// ------------------------------------------------------------------------------------------ RoPE

/// transformers 4 writes rope_theta and rope_scaling {type | rope_type}, version 5 rope_parameters.
TEST(LlamaConfig, BothSpellingsOfRopeMeanTheSame) {
  for (const json& text : std::vector<json>{
           {{"rope_theta", 5e5}, {"rope_scaling", {{"type", "linear"}, {"factor", 2.5}}}},
           {{"rope_theta", 5e5}, {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.5}}}},
           {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2.5}, {"rope_theta", 5e5}}}},
           {{"rope_theta", 1e4},
            {"rope_parameters",
             {{"rope_type", "linear"}, {"factor", 2.5}, {"rope_theta", 5e5}}}}}) {
    const LlamaConfig config = llama(text);
    EXPECT_EQ(config.rope.type, RopeConfig::Type::kLinear) << text;
    EXPECT_EQ(config.rope.factor, 2.5) << text;
    EXPECT_EQ(config.rope.theta, 5e5) << text;
  }
  for (const json& text :
       std::vector<json>{{{"rope_scaling", nullptr}},
                         {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}}},
                         {{"rope_parameters", json::object()}}}) {
    EXPECT_EQ(llama(text).rope.type, RopeConfig::Type::kDefault) << text;
    EXPECT_EQ(llama(text).rope.theta, 1e4) << text;
  }
}

TEST(LlamaConfig, ReadsEveryRopeType) {
  const RopeConfig dynamic = llama({{"max_position_embeddings", 48},
                                    {"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}})
                                 .rope;
  EXPECT_EQ(dynamic.type, RopeConfig::Type::kDynamic);
  EXPECT_EQ(dynamic.factor, 2);
  EXPECT_EQ(dynamic.max_positions, 48);

  const RopeConfig llama3 = llama({{"rope_scaling",
                                    {{"rope_type", "llama3"},
                                     {"factor", 8.0},
                                     {"low_freq_factor", 1.5},
                                     {"high_freq_factor", 5.0},
                                     {"original_max_position_embeddings", 8192}}}})
                                .rope;
  EXPECT_EQ(llama3.type, RopeConfig::Type::kLlama3);
  EXPECT_EQ(llama3.factor, 8);
  EXPECT_EQ(llama3.low_freq_factor, 1.5);
  EXPECT_EQ(llama3.high_freq_factor, 5);
  EXPECT_EQ(llama3.original_max_positions, 8192);

  const RopeConfig yarn = llama({{"max_position_embeddings", 32768},
                                 {"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}})
                              .rope;
  EXPECT_EQ(yarn.type, RopeConfig::Type::kYarn);
  EXPECT_EQ(yarn.beta_fast, 32);
  EXPECT_EQ(yarn.beta_slow, 1);
  EXPECT_EQ(yarn.original_max_positions, 32768);
}

/// Linear and dynamic scaling leave max_position_embeddings at what was trained.
TEST(LlamaConfig, ContextReachesAsFarAsRopeWasScaled) {
  const auto context = [](const json& scaling) {
    return llama({{"max_position_embeddings", 100}, {"rope_scaling", scaling}}).max_positions;
  };
  EXPECT_EQ(context(nullptr), 100);
  EXPECT_EQ(context({{"type", "linear"}, {"factor", 2.5}}), 250);
  EXPECT_EQ(context({{"type", "dynamic"}, {"factor", 2.0}}), 200);
  EXPECT_EQ(context({{"type", "dynamic"}, {"factor", 0.5}}), 100);
  EXPECT_EQ(context({{"type", "yarn"}, {"factor", 4.0}}), 400);
  EXPECT_EQ(context({{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 25}}),
            100)
      << "max_position_embeddings is what was reached";
  EXPECT_EQ(context({{"type", "llama3"},
                     {"factor", 8},
                     {"low_freq_factor", 1},
                     {"high_freq_factor", 4},
                     {"original_max_position_embeddings", 50}}),
            100);
  EXPECT_EQ(context({{"type", "linear"}, {"factor", 1e6}}), 100'000'000);
}

TEST(LlamaConfig, RefusesRopeItDoesNotKnow) {
  EXPECT_THAT(
      llama_failure({{"rope_scaling", {{"rope_type", "longrope"}}}}, ErrorCode::kUnsupported),
      AllOf(HasSubstr("\"longrope\""), HasSubstr("rope_scaling"),
            HasSubstr("default, linear, dynamic, llama3 and yarn")));
  EXPECT_THAT(llama_failure({{"rope_parameters", {{"rope_type", 3}}}}),
              HasSubstr("rope_type is 3"));
  EXPECT_THAT(llama_failure({{"rope_scaling", "linear"}}),
              AllOf(HasSubstr("rope_scaling"), HasSubstr("an object")));
  EXPECT_THAT(llama_failure({{"rope_scaling", {{"type", "linear"}, {"factor", 0}}}}),
              HasSubstr("factor is 0"));
  EXPECT_THAT(llama_failure({{"rope_scaling", {{"type", "linear"}, {"factor", -2}}}}),
              HasSubstr("factor is -2"));
  EXPECT_THAT(llama_failure({{"rope_theta", 0}}), HasSubstr("rope_theta is 0"));
  EXPECT_THAT(llama_failure({{"rope_scaling", {{"type", "llama3"}, {"factor", 8}}}}),
              HasSubstr("low_freq_factor is missing"));
  for (const char* type : {"linear", "dynamic", "llama3", "yarn"}) {
    EXPECT_THAT(llama_failure({{"rope_scaling", {{"type", type}}}}),
                HasSubstr("factor is missing"));
  }
  EXPECT_THAT(llama_failure({{"rope_scaling",
                              {{"type", "llama3"},
                               {"factor", 8},
                               {"low_freq_factor", 4},
                               {"high_freq_factor", 4},
                               {"original_max_position_embeddings", 8192}}}}),
              HasSubstr("high_freq_factor"));
}

// ---------------------------------------------------------------------------------------- errors

TEST(LlamaConfig, RefusesADecoderThatTheFamilyHasNot) {
  const json config = {{"model_type", "qwen2"}};
  const ConfigReader reader(config, "config.json: text_config");
  constexpr std::array kTwo = {DecoderType::kLlama, DecoderType::kMistral};
  EXPECT_EQ(failure([&] { decoder_type(reader, kTwo); }, ErrorCode::kUnsupported),
            "config.json: text_config: model_type is \"qwen2\"; supported decoders of this family "
            "are llama, mistral");
  EXPECT_THAT(llama_failure({{"model_type", "qwen3_moe"}}, ErrorCode::kUnsupported),
              AllOf(HasSubstr("qwen3_moe"), HasSubstr("qwen2_5_vl_text")));
}

TEST(LlamaConfig, WithoutANameItIsTheFirstOfTheFamily) {
  const json config = json::object();
  const ConfigReader reader(config, "config.json: text_config");
  EXPECT_EQ(decoder_type(reader, std::array{DecoderType::kQwen2, DecoderType::kLlama}),
            DecoderType::kQwen2);
  EXPECT_EQ(decoder_type(reader, std::array{DecoderType::kLlama, DecoderType::kQwen2}),
            DecoderType::kLlama);
}

/// transformers 5.23.0: Qwen2Config(), Qwen3Config(), Qwen2VLTextConfig(), Qwen3VLTextConfig().
TEST(DecoderConfig, MissingFieldsTakeTheClassDefaultsOfQwen) {
  const LlamaConfig qwen2 = llama({{"model_type", "qwen2"}});
  EXPECT_EQ(qwen2.vocab_size, 151936);
  EXPECT_EQ(qwen2.hidden, 4096);
  EXPECT_EQ(qwen2.intermediate, 22016);
  EXPECT_EQ(qwen2.layers, 32);
  EXPECT_EQ(qwen2.q_heads, 32);
  EXPECT_EQ(qwen2.kv_heads, 32);
  EXPECT_EQ(qwen2.head_dim, 128);
  EXPECT_EQ(qwen2.max_positions, 32768);
  EXPECT_EQ(qwen2.rms_eps, 1e-6f);
  EXPECT_EQ(qwen2.rope.theta, 1e4);
  EXPECT_EQ(qwen2.rope.axes(), 1);
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_FALSE(qwen2.mlp_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  EXPECT_FALSE(qwen2.tie_embeddings);

  const LlamaConfig qwen3 = llama({{"model_type", "qwen3"}, {"hidden_size", 1024}});
  EXPECT_EQ(qwen3.head_dim, 128) << "not hidden / heads";
  EXPECT_EQ(qwen3.kv_heads, 32);
  EXPECT_EQ(qwen3.max_positions, 32768);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_EQ(qwen3.rope.theta, 1e4);

  for (const char* type : {"qwen2_vl_text", "qwen2_5_vl_text"}) {
    const LlamaConfig vl =
        llama({{"model_type", type},
               {"rope_scaling", {{"type", "mrope"}, {"mrope_section", {16, 24, 24}}}}});
    EXPECT_EQ(vl.vocab_size, 152064);
    EXPECT_EQ(vl.hidden, 8192);
    EXPECT_EQ(vl.intermediate, 29568);
    EXPECT_EQ(vl.layers, 80);
    EXPECT_EQ(vl.q_heads, 64);
    EXPECT_EQ(vl.kv_heads, 8);
    EXPECT_EQ(vl.head_dim, 128);
    EXPECT_EQ(vl.rms_eps, 1e-5f);
    EXPECT_EQ(vl.rope.theta, 1e6);
    EXPECT_EQ(vl.rope.type, RopeConfig::Type::kDefault);
    EXPECT_THAT(vl.rope.sections, ElementsAre(16, 24, 24));
    EXPECT_FALSE(vl.rope.interleaved);
    EXPECT_TRUE(vl.qkv_bias);
  }

  const LlamaConfig qwen3_vl = llama({{"model_type", "qwen3_vl_text"}});
  EXPECT_EQ(qwen3_vl.max_positions, 128000);
  EXPECT_EQ(qwen3_vl.rope.theta, 5e5);
  EXPECT_THAT(qwen3_vl.rope.sections, ElementsAre(24, 20, 20));
  EXPECT_TRUE(qwen3_vl.rope.interleaved);
  EXPECT_TRUE(qwen3_vl.qk_norm);
}

TEST(DecoderConfig, ReadsSectionsInEverySpelling) {
  const json sizes = {{"model_type", "qwen2_vl_text"},
                      {"hidden_size", 48},
                      {"num_attention_heads", 4},
                      {"num_key_value_heads", 2}};
  for (const json& scaling :
       {json{{"type", "mrope"}, {"mrope_section", {1, 2, 3}}},
        json{{"type", "default"}, {"rope_type", "default"}, {"mrope_section", {1, 2, 3}}}}) {
    json text = sizes;
    text["rope_scaling"] = scaling;
    EXPECT_THAT(llama(text).rope.sections, ElementsAre(1, 2, 3)) << scaling;
  }
  json text = sizes;
  text["rope_parameters"] = {
      {"rope_type", "default"}, {"mrope_section", {1, 2, 3}}, {"rope_theta", 1e5}};
  EXPECT_THAT(llama(text).rope.sections, ElementsAre(1, 2, 3));
  EXPECT_EQ(llama(text).rope.theta, 1e5);
  for (const json& wrong : {json(nullptr), json({1, 2}), json({1, 2, 4}), json({-1, 3, 4}),
                            json({1, 2, "3"}), json(6), json({1.0, 2, 3})}) {
    text["rope_parameters"]["mrope_section"] = wrong;
    EXPECT_THAT(llama_failure(text), HasSubstr("mrope_section")) << wrong;
  }
  // Sections mean nothing to a decoder of one axis, and then mrope is no type.
  EXPECT_THAT(llama_failure({{"model_type", "qwen2"}, {"rope_scaling", {{"type", "mrope"}}}},
                            ErrorCode::kUnsupported),
              HasSubstr("mrope"));
}

TEST(DecoderConfig, InternLm2HasNoBiases) {
  const LlamaConfig internlm2 = llama({{"model_type", "internlm2"}, {"bias", false}});
  EXPECT_EQ(internlm2.vocab_size, 103168);
  EXPECT_FALSE(internlm2.qkv_bias);
  EXPECT_THAT(llama_failure({{"model_type", "internlm2"}}), HasSubstr("bias"));
}

TEST(DecoderConfig, RefusesWindowsOfSomeLayers) {
  EXPECT_THAT(llama_failure({{"model_type", "qwen2"}, {"use_sliding_window", true}}),
              HasSubstr("use_sliding_window is true"));
}

TEST(LlamaConfig, RefusesHeadsThatDoNotDivide) {
  EXPECT_THAT(llama_failure({{"num_attention_heads", 32}, {"num_key_value_heads", 5}}),
              AllOf(HasSubstr("text_config.num_key_value_heads is 5"),
                    HasSubstr("a divisor of num_attention_heads 32")));
  EXPECT_THAT(llama_failure({{"num_attention_heads", 4}, {"num_key_value_heads", 8}}),
              HasSubstr("num_key_value_heads is 8"));
  EXPECT_THAT(llama_failure({{"hidden_size", 100}, {"num_attention_heads", 32}}),
              AllOf(HasSubstr("hidden_size is 100"), HasSubstr("multiple")));
  EXPECT_THAT(llama_failure({{"head_dim", 15}}), HasSubstr("head_dim is 15"));
  EXPECT_THAT(llama_failure({{"hidden_size", 12}, {"num_attention_heads", 4}}),
              HasSubstr("head_dim"))
      << "3 channels cannot be paired";
}

/// What fits into a window sees all of it; null, not absence, is no window.
TEST(LlamaConfig, ASlidingWindowLimitsTheContext) {
  const auto mistral = [](json text) {
    text["model_type"] = "mistral";
    return llama(text);
  };
  EXPECT_EQ(mistral({{"sliding_window", nullptr}}).max_positions, 131072);
  EXPECT_EQ(mistral({{"sliding_window", nullptr}}).sliding_window, 0);
  EXPECT_EQ(mistral(json::object()).max_positions, 4096) << "the default of the class";
  EXPECT_EQ(mistral(json::object()).sliding_window, 4096);
  EXPECT_EQ(mistral({{"sliding_window", 100}}).max_positions, 100);
  EXPECT_EQ(mistral({{"sliding_window", 4096}, {"max_position_embeddings", 2048}}).max_positions,
            2048);
  // Scaling lengthens the context, not the window.
  for (const json& scaling : std::vector<json>{{{"type", "linear"}, {"factor", 4}},
                                               {{"type", "dynamic"}, {"factor", 4}},
                                               {{"type", "yarn"}, {"factor", 4}}}) {
    const LlamaConfig config = mistral(
        {{"sliding_window", 4096}, {"max_position_embeddings", 4096}, {"rope_scaling", scaling}});
    EXPECT_EQ(config.max_positions, 4096) << scaling;
    EXPECT_EQ(config.rope.max_positions, 4096) << scaling;
  }
  EXPECT_THAT(llama_failure({{"model_type", "mistral"}, {"sliding_window", 0}}),
              HasSubstr("sliding_window is 0"));
  EXPECT_EQ(llama({{"sliding_window", 7}}).max_positions, 2048) << "no key of LLaMA";
}

/// transformers 5.23: _compute_yarn_parameters, standardize_rope_params.
TEST(LlamaConfig, ReadsYarnAsTheReference) {
  const auto yarn = [](json scaling, json text = json::object()) {
    scaling["type"] = "yarn";
    text["rope_scaling"] = scaling;
    return llama(text).rope;
  };
  EXPECT_DOUBLE_EQ(yarn({{"factor", 4}}).attention_factor, 0.1 * std::log(4.0) + 1);
  EXPECT_DOUBLE_EQ(yarn({{"factor", 0.5}}).attention_factor, 1);
  EXPECT_DOUBLE_EQ(yarn({{"factor", 4}, {"attention_factor", 0.7}}).attention_factor, 0.7);
  EXPECT_DOUBLE_EQ(yarn({{"factor", 4}, {"mscale", 0.5}, {"mscale_all_dim", 2}}).attention_factor,
                   (0.05 * std::log(4.0) + 1) / (0.2 * std::log(4.0) + 1));
  EXPECT_DOUBLE_EQ(yarn({{"factor", 4}, {"mscale", 0.5}}).attention_factor, 0.1 * std::log(4.0) + 1)
      << "both or none";
  EXPECT_TRUE(yarn({{"factor", 4}}).truncate);
  EXPECT_FALSE(yarn({{"factor", 4}, {"truncate", false}}).truncate);
  EXPECT_FALSE(yarn({{"factor", 4}, {"truncate", nullptr}}).truncate);
  EXPECT_EQ(yarn({{"factor", 4}, {"beta_fast", 0}, {"beta_slow", nullptr}}).beta_fast, 32);
  const RopeConfig ratio = yarn({{"factor", nullptr}, {"original_max_position_embeddings", 512}},
                                {{"max_position_embeddings", 2048}});
  EXPECT_EQ(ratio.factor, 4);
  const json beside = {{"original_max_position_embeddings", 256}};
  EXPECT_EQ(yarn({{"factor", 4}}, beside).original_max_positions, 256);
  EXPECT_EQ(yarn({{"factor", 4}, {"original_max_position_embeddings", 512}}, beside)
                .original_max_positions,
            256)
      << "the text's own key comes first";
  EXPECT_THAT(llama_failure({{"rope_scaling", {{"type", "yarn"}}}}),
              HasSubstr("factor is missing"));
}

TEST(LlamaConfig, RopeScalingComesBeforeRopeParameters) {
  const json parameters = {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 5e5}};
  const RopeConfig both = llama({{"rope_scaling", {{"type", "linear"}, {"factor", 3}}},
                                 {"rope_parameters", parameters}})
                              .rope;
  EXPECT_EQ(both.factor, 3);
  EXPECT_EQ(both.theta, 1e4);
  EXPECT_EQ(llama({{"rope_scaling", json::object()}, {"rope_parameters", parameters}}).rope.factor,
            2)
      << "an empty one is none";
  EXPECT_EQ(llama({{"rope_scaling", nullptr}, {"rope_parameters", parameters}}).rope.theta, 5e5);
}

/// The reference reads the key for scaled RoPE alone.
TEST(LlamaConfig, PartialRotaryFactorsOfTheDefaultRopeChangeNothing) {
  for (const json& text : {json{{"partial_rotary_factor", 0.5}},
                           json{{"rope_parameters", {{"partial_rotary_factor", 0.25}}}},
                           json{{"model_type", "qwen2"}, {"partial_rotary_factor", 0}}}) {
    const LlamaConfig config = llama(text);
    EXPECT_EQ(config.rope.rotary_dim, config.head_dim) << text;
  }
  EXPECT_THAT(
      llama_failure(
          {{"rope_scaling", {{"type", "linear"}, {"factor", 2}, {"partial_rotary_factor", 0.5}}}}),
      HasSubstr("partial_rotary_factor is 0.5"));
  EXPECT_THAT(llama_failure({{"partial_rotary_factor", "half"}}),
              HasSubstr("partial_rotary_factor"));
}

/// What nothing reads has to be what can be meant all the same.
TEST(LlamaConfig, RefusesOddUnusedValues) {
  const json words = json::array({"full_attention", "full_attention"});
  EXPECT_EQ(llama({{"num_hidden_layers", 2}, {"layer_types", words}}).layers, 2);
  EXPECT_EQ(llama({{"sliding_window", 4096}}).sliding_window, 0);
  for (const json& types :
       {json(7), json("full_attention"), json::array({1, 2}), json::object(),
        json::array({"full_attention", "x"}), json::array({"full_attention"})}) {
    EXPECT_THAT(llama_failure({{"num_hidden_layers", 2}, {"layer_types", types}}),
                HasSubstr("layer_types"))
        << types;
  }
  for (const json& window : {json::array({4096}), json(-1), json("4096"), json(1.5), json(true)}) {
    EXPECT_THAT(llama_failure({{"sliding_window", window}}), HasSubstr("sliding_window")) << window;
    EXPECT_THAT(llama_failure({{"model_type", "qwen2"}, {"sliding_window", window}}),
                HasSubstr("sliding_window"))
        << window;
  }
}

TEST(LlamaConfig, RefusesAnotherActivation) {
  EXPECT_THAT(llama_failure({{"hidden_act", "gelu"}}), AllOf(HasSubstr("gelu"), HasSubstr("silu")));
  EXPECT_THAT(llama_failure({{"hidden_act", "mystery"}}), HasSubstr("\"mystery\""));
}

/// Numbers that no model has are refused before anything is multiplied with them.
TEST(LlamaConfig, RefusesAbsurdNumbers) {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    for (const json& value :
         {json(0), json(-1), json(int64_t{1} << 40), json(1e300), json(1.5), json("many"),
          json(true), json::array({1}), json(18446744073709551615ull)}) {
      EXPECT_THAT(llama_failure({{key, value}}), AllOf(HasSubstr(key), HasSubstr("expected")))
          << value;
    }
  }
  for (const json& value : {json(-1e-6), json(2), json("small"), json(true)}) {
    EXPECT_THAT(llama_failure({{"rms_norm_eps", value}}), HasSubstr("rms_norm_eps"));
  }
  EXPECT_THAT(llama_failure({{"tie_word_embeddings", 1}}), HasSubstr("tie_word_embeddings is 1"));
  // Each in range, but not their product.
  EXPECT_THAT(llama_failure({{"num_attention_heads", 1 << 20}, {"head_dim", 4096}}),
              HasSubstr("head_dim"));
}

}  // namespace
}  // namespace kvlm
