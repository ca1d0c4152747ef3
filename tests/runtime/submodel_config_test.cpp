#include "runtime/submodel_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/base/error.h"
#include "tests/runtime/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::error_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

LlamaConfig llama(const json& text) {
  const json config = {{"text_config", text}};
  return parse_llama_config(ConfigReader(config, "config.json").object("text_config"));
}

ClipConfig clip(const json& config) {
  const ConfigReader reader(config, "config.json");
  return parse_clip_config(reader.object("vision_config"), reader);
}

PreprocessSpec preprocess_spec(const json& config, const LoadOptions& options = {}) {
  return parse_preprocess(ConfigReader(config, "preprocessor_config.json"), options);
}

template <class Parse>
std::string failure(Parse&& parse, ErrorCode code = ErrorCode::kCorruptFile) {
  const Error error = error_of(parse);
  EXPECT_EQ(error.code(), code) << error.what();
  return error.what();
}

std::string llama_failure(const json& text, ErrorCode code = ErrorCode::kCorruptFile) {
  return failure([&] { llama(text); }, code);
}

// --------------------------------------------------------------------------------- text defaults

/// models.md 2.3: what a hub file of 2024 leaves out is the class default.
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

/// models.md 2.2: rope_theta + rope_scaling {type | rope_type} before, rope_parameters now.
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

TEST(LlamaConfig, RefusesAnotherDecoder) {
  EXPECT_THAT(llama_failure({{"model_type", "qwen2"}}, ErrorCode::kUnsupported),
              AllOf(HasSubstr("config.json: text_config"), HasSubstr("\"qwen2\""),
                    HasSubstr("llama and mistral")));
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
  EXPECT_THAT(llama_failure({{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}),
              HasSubstr("partial_rotary_factor is 0.5"));
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

// ---------------------------------------------------------------------------------------- vision

TEST(ClipConfig, MissingVisionConfigIsTheTowerOfLlava) {
  for (const json& config : {json::object(), json{{"vision_config", nullptr}}}) {
    const ClipConfig tower = clip(config);
    EXPECT_EQ(tower.hidden, 1024);
    EXPECT_EQ(tower.intermediate, 4096);
    EXPECT_EQ(tower.layers, 24);
    EXPECT_EQ(tower.heads, 16);
    EXPECT_EQ(tower.image_size, 336);
    EXPECT_EQ(tower.patch_size, 14);
    EXPECT_EQ(tower.eps, 1e-5f);
    EXPECT_EQ(tower.activation, Activation::kQuickGelu);
    EXPECT_THAT(tower.feature_layers, ElementsAre(-2));
    EXPECT_FALSE(tower.keep_class_token);
  }
}

TEST(ClipConfig, MissingFieldsTakeTheClassDefaultsOfClip) {
  for (const json& vision : {json::object(), json{{"model_type", "clip_vision_model"}}}) {
    const ClipConfig tower = clip({{"vision_config", vision}});
    EXPECT_EQ(tower.hidden, 768);
    EXPECT_EQ(tower.intermediate, 3072);
    EXPECT_EQ(tower.layers, 12);
    EXPECT_EQ(tower.heads, 12);
    EXPECT_EQ(tower.image_size, 224);
    EXPECT_EQ(tower.patch_size, 32);
    EXPECT_EQ(tower.eps, 1e-5f);
    EXPECT_EQ(tower.activation, Activation::kQuickGelu);
  }
}

TEST(ClipConfig, ReadsWhatTheFileSays) {
  const ClipConfig tower = clip({{"vision_config",
                                  {{"hidden_size", 32},
                                   {"intermediate_size", 64},
                                   {"num_hidden_layers", 3},
                                   {"num_attention_heads", 2},
                                   {"image_size", 56},
                                   {"patch_size", 14},
                                   {"layer_norm_eps", 1e-6},
                                   {"hidden_act", "gelu"}}},
                                 {"vision_feature_layer", -1},
                                 {"vision_feature_select_strategy", "full"}});
  EXPECT_EQ(tower.hidden, 32);
  EXPECT_EQ(tower.intermediate, 64);
  EXPECT_EQ(tower.layers, 3);
  EXPECT_EQ(tower.heads, 2);
  EXPECT_EQ(tower.image_size, 56);
  EXPECT_EQ(tower.patch_size, 14);
  EXPECT_EQ(tower.eps, 1e-6f);
  EXPECT_EQ(tower.activation, Activation::kGelu);
  EXPECT_THAT(tower.feature_layers, ElementsAre(-1));
  EXPECT_TRUE(tower.keep_class_token);
}

TEST(ClipConfig, FeatureLayersMayBeAList) {
  EXPECT_THAT(clip({{"vision_feature_layer", {-2, -5, 3}}}).feature_layers, ElementsAre(-2, -5, 3));
  EXPECT_THAT(clip({{"vision_feature_layer", {7}}}).feature_layers, ElementsAre(7));
  for (const json& value :
       {json::array(), json::array({1.5}), json::array({"a"}), json::array({nullptr}), json("-2"),
        json(5000), json(-5000), json(1.5)}) {
    EXPECT_THAT(failure([&] {
                  clip({{"vision_feature_layer", value}});
                }),
                HasSubstr("vision_feature_layer"))
        << value;
  }
  // Far outside, it must not come back into range: the tower refuses it by its layers.
  const ClipConfig far = clip({{"vision_feature_layer", {int64_t{1} << 40, -(int64_t{1} << 40)}}});
  EXPECT_GT(far.feature_layers[0], 1024);
  EXPECT_LT(far.feature_layers[1], -1024);
}

TEST(ClipConfig, RefusesWhatNoTowerHas) {
  const auto vision_failure = [](const json& vision) {
    return failure([&] { clip({{"vision_config", vision}}); });
  };
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "image_size", "patch_size"}) {
    for (const json& value : {json(0), json(-14), json(int64_t{1} << 33), json("x"), json(2.5)}) {
      EXPECT_THAT(vision_failure({{key, value}}),
                  AllOf(HasSubstr("vision_config."), HasSubstr(key)))
          << value;
    }
  }
  EXPECT_THAT(vision_failure({{"hidden_size", 100}, {"num_attention_heads", 3}}),
              AllOf(HasSubstr("hidden_size is 100"), HasSubstr("num_attention_heads 3")));
  EXPECT_THAT(vision_failure({{"image_size", 28}, {"patch_size", 29}}),
              AllOf(HasSubstr("patch_size is 29"), HasSubstr("image_size 28")));
  EXPECT_THAT(vision_failure({{"hidden_act", "relu"}}), HasSubstr("\"relu\""));
  EXPECT_THAT(failure([] {
                clip({{"vision_feature_select_strategy", "some"}});
              }),
              AllOf(HasSubstr("\"some\""), HasSubstr("default or full")));
  EXPECT_THAT(failure(
                  [] {
                    clip({{"vision_config", {{"model_type", "siglip_vision_model"}}}});
                  },
                  ErrorCode::kUnsupported),
              AllOf(HasSubstr("siglip_vision_model"), HasSubstr("clip_vision_model")));
}

TEST(ParseActivation, KnowsEveryNameOfTheReference) {
  const auto parsed = [](const json& value) {
    const json object = {{"act", value}};
    return parse_activation(ConfigReader(object, "x.json"), "act", "gelu");
  };
  EXPECT_EQ(parsed("quick_gelu"), Activation::kQuickGelu);
  EXPECT_EQ(parsed("gelu"), Activation::kGelu);
  EXPECT_EQ(parsed("gelu_pytorch_tanh"), Activation::kGeluTanh);
  EXPECT_EQ(parsed("gelu_new"), Activation::kGeluTanh);
  EXPECT_EQ(parsed("silu"), Activation::kSilu);
  EXPECT_EQ(parsed("swish"), Activation::kSilu);
  EXPECT_EQ(parsed(nullptr), Activation::kGelu);
  EXPECT_THAT(failure([&] { parsed("GELU"); }),
              AllOf(HasSubstr("\"GELU\""), HasSubstr("quick_gelu")));
}

// ------------------------------------------------------------------------------------ preprocess

TEST(ParsePreprocess, MissingFieldsTakeTheClassDefaultsOfClip) {
  const PreprocessSpec spec = preprocess_spec(json::object());
  EXPECT_TRUE(spec.do_resize && spec.do_center_crop && spec.do_rescale && spec.do_normalize);
  EXPECT_FALSE(spec.do_pad);
  EXPECT_EQ(spec.shortest_edge, 224);
  EXPECT_EQ(spec.crop_height, 224);
  EXPECT_EQ(spec.crop_width, 224);
  EXPECT_EQ(spec.resample, Resample::kBicubic);
  EXPECT_EQ(spec.rescale_factor, 1.0 / 255);
  EXPECT_EQ(spec.mean[0], 0.48145466);
  EXPECT_EQ(spec.std[2], 0.27577711);
  EXPECT_EQ(spec.resize_backend, ResizeBackend::kTorchvision);
  EXPECT_EQ(spec.normalize_backend, NormalizeBackend::kTorchvision);
}

TEST(ParsePreprocess, TakesEverySpellingOfSizes) {
  EXPECT_EQ(preprocess_spec({{"size", 336}}).shortest_edge, 336);
  EXPECT_EQ(preprocess_spec({{"size", {{"shortest_edge", 336}}}}).shortest_edge, 336);
  const PreprocessSpec exact = preprocess_spec({{"size", {{"height", 30}, {"width", 40}}}});
  EXPECT_EQ(exact.shortest_edge, 0);
  EXPECT_EQ(exact.resize_height, 30);
  EXPECT_EQ(exact.resize_width, 40);
  EXPECT_EQ(preprocess_spec({{"crop_size", 336}}).crop_width, 336);
  const PreprocessSpec crop = preprocess_spec({{"crop_size", {{"height", 30}, {"width", 40}}}});
  EXPECT_EQ(crop.crop_height, 30);
  EXPECT_EQ(crop.crop_width, 40);
}

TEST(ParsePreprocess, OptionsChooseBackendAndPadding) {
  LoadOptions options;
  options.image_backend = ResizeBackend::kPil;
  EXPECT_EQ(preprocess_spec(json::object(), options).resize_backend, ResizeBackend::kPil);
  EXPECT_EQ(preprocess_spec(json::object(), options).normalize_backend, NormalizeBackend::kPil);
  EXPECT_TRUE(preprocess_spec({{"do_pad", true}}).do_pad);
  options.pad_to_square = false;
  EXPECT_FALSE(preprocess_spec({{"do_pad", true}}, options).do_pad);
  options.pad_to_square = true;
  EXPECT_TRUE(preprocess_spec(json::object(), options).do_pad);
}

TEST(ParsePreprocess, RefusesWhatCannotBeDone) {
  for (const auto& [config, word] : std::vector<std::pair<json, const char*>>{
           {{{"size", 0}}, "size is 0"},
           {{{"size", {{"shortest_edge", -3}}}}, "shortest_edge is -3"},
           {{{"size", {{"height", 30}}}}, "width is missing"},
           {{{"size", "big"}}, "size is \"big\""},
           {{{"size", {{"shortest_edge", 224}, {"longest_edge", 400}}}}, "longest_edge is 400"},
           {{{"size", {{"max_height", 224}, {"max_width", 400}}}}, "max_height is 224"},
           {{{"size", {{"shortest_edge", 1000000}}}}, "shortest_edge is 1000000"},
           {{{"crop_size", {{"height", 0}}}}, "height is 0"},
           {{{"resample", 9}}, "resample is 9"},
           {{{"rescale_factor", -1}}, "rescale_factor is -1"},
           {{{"image_mean", {0.5, 0.5}}}, "image_mean is a list"},
           {{{"image_mean", {0.5, 0.5, "x"}}}, "image_mean"},
           {{{"image_std", {0.5, 0.5, 0}}}, "image_std"},
           {{{"image_std", {0.5, 0.5, -0.5}}}, "positive"},
           {{{"do_resize", "yes"}}, "do_resize"}}) {
    EXPECT_THAT(failure([&config = config] { preprocess_spec(config); }),
                AllOf(HasSubstr("preprocessor_config.json"), HasSubstr(word)));
  }
}

/// What a file leaves out is different for each processor.
TEST(ParsePreprocess, KnowsTheProcessorsType) {
  for (const char* type : {"CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil",
                           "LlavaImageProcessor", "LlavaImageProcessorFast"}) {
    EXPECT_EQ(preprocess_spec({{"image_processor_type", type}}).mean[0], 0.48145466) << type;
  }
  EXPECT_NO_THROW(preprocess_spec({{"feature_extractor_type", "CLIPFeatureExtractor"}}));
  for (const json& config :
       std::vector<json>{{{"image_processor_type", "ConvNextImageProcessor"}},
                         {{"image_processor_type", "SiglipImageProcessor"}},
                         {{"image_processor_type", "ViTImageProcessorFast"}},
                         {{"image_processor_type", "\x1b[2J"}},
                         {{"feature_extractor_type", "ConvNextFeatureExtractor"}}}) {
    const std::string message = failure([&] { preprocess_spec(config); }, ErrorCode::kUnsupported);
    EXPECT_THAT(message, AllOf(HasSubstr("image_processor_type is \""),
                               HasSubstr("CLIPImageProcessor and LlavaImageProcessor")));
    EXPECT_EQ(message.find('\x1b'), std::string::npos);
  }
}

/// do_pad is a square before the resize for LLaVA's processor, padding after the crop for CLIP's.
TEST(ParsePreprocess, PaddingIsWhatTheProcessorMeans) {
  const auto pads = [](const char* type) {
    return preprocess_spec({{"do_pad", true}, {"image_processor_type", type}}).do_pad;
  };
  EXPECT_TRUE(pads("LlavaImageProcessor"));
  EXPECT_FALSE(pads("CLIPImageProcessor"));
  LoadOptions options;
  options.pad_to_square = true;
  EXPECT_TRUE(preprocess_spec({{"image_processor_type", "CLIPImageProcessor"}}, options).do_pad);
  EXPECT_THAT(failure([] {
                preprocess_spec({{"do_pad", true},
                                 {"image_processor_type", "CLIPImageProcessor"},
                                 {"pad_size", {{"height", 400}, {"width", 400}}}});
              }),
              HasSubstr("pad_size"));
}

TEST(ParsePreprocess, OneMeanIsThatOfAllChannels) {
  EXPECT_THAT(preprocess_spec({{"image_mean", 0.5}}).mean, ElementsAre(0.5, 0.5, 0.5));
  EXPECT_THAT(preprocess_spec({{"image_std", 1}}).std, ElementsAre(1, 1, 1));
  EXPECT_THAT(failure([] { preprocess_spec({{"image_std", 0}}); }), HasSubstr("image_std"));
}

// ------------------------------------------------------------------------------------ generation

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
  EXPECT_THAT(generation(json::object()).eos_ids, ElementsAre(2));
  for (const json& value : {json(-1), json("</s>"), json(1.5), json::array({2, -1}),
                            json::array({nullptr}), json(int64_t{1} << 40)}) {
    EXPECT_THAT(failure([&] {
                  generation({{"eos_token_id", value}});
                }),
                HasSubstr("eos_token_id"))
        << value;
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
