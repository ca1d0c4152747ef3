#include "runtime/loading/quantization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Method = QuantizationConfig::Method;

std::optional<QuantizationConfig> parse(const json& config, const json& files = {}) {
  return read_quantization("FOLDER", config, [&](const std::string& file) {
    return files.is_object() && files.contains(file) ? files.at(file) : json();
  });
}

QuantizationConfig quantized(const json& quantization) {
  return *parse({{"quantization_config", quantization}});
}

std::string refusal(const json& quantization) {
  return test::error_of([&] { quantized(quantization); }).what();
}

/// A configuration of compressed-tensors as llm-compressor writes it, with changes.
json compressed(const json& weights = {}, const json& group = {}, const json& top = {}) {
  json config = json::parse(R"({
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "global_compression_ratio": null, "kv_cache_scheme": null,
    "sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"],
    "config_groups": {"group_0": {
      "targets": ["Linear"], "input_activations": null, "output_activations": null,
      "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
                  "group_size": 128, "dynamic": false, "actorder": "static"}}}})");
  if (weights.is_object()) config["config_groups"]["group_0"]["weights"].update(weights);
  if (group.is_object()) config["config_groups"]["group_0"].update(group);
  if (top.is_object()) config.update(top);
  return config;
}

TEST(Quantization, OfNothingIsNone) {
  EXPECT_FALSE(parse(json::object()));
  EXPECT_FALSE(parse({{"quantization_config", nullptr}}));
  EXPECT_FALSE(parse({{"quantization_config", compressed({}, {}, {{"format", "dense"}})}}));
  EXPECT_FALSE(
      parse({{"quantization_config", compressed({}, {}, {{"quantization_status", "frozen"}})}}));
}

TEST(Quantization, CompressedTensors) {
  const QuantizationConfig w4 = quantized(compressed());
  EXPECT_EQ(w4.method, Method::kPacked);
  EXPECT_EQ(w4.schemes[0].bits, 4);
  EXPECT_EQ(w4.schemes[0].group, 128);
  EXPECT_FALSE(w4.schemes[0].zeros);
  EXPECT_TRUE(w4.warnings.empty());
  EXPECT_TRUE(quantized(compressed({{"symmetric", false}})).schemes[0].zeros);
  // What is absent or null: the package's defaults.
  const json short_weights = {{"num_bits", 8},
                              {"group_size", nullptr},
                              {"strategy", nullptr},
                              {"actorder", nullptr},
                              {"symmetric", nullptr}};
  const QuantizationConfig w8 = quantized(compressed(short_weights));
  EXPECT_EQ(w8.schemes[0].bits, 8);
  EXPECT_EQ(w8.schemes[0].group, 0);
  const QuantizationConfig w8a8 =
      quantized(compressed({{"num_bits", 8}, {"strategy", "channel"}, {"group_size", nullptr}},
                           {{"format", "int-quantized"}}));
  EXPECT_EQ(w8a8.method, Method::kInt);
  const QuantizationConfig fp8 =
      quantized(compressed({{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}},
                           {{"format", "float-quantized"}}));
  EXPECT_EQ(fp8.method, Method::kFloat);
  const QuantizationConfig warned =
      quantized(compressed({}, {}, {{"kv_cache_scheme", {{"num_bits", 8}}}}));
  ASSERT_EQ(warned.warnings.size(), 1u);
  EXPECT_THAT(warned.warnings[0], HasSubstr("--kv decides"));
}

TEST(Quantization, CompressedTensorsThatAreNotRead) {
  for (const auto& [config, what] : std::initializer_list<std::pair<json, const char*>>{
           {compressed({{"num_bits", 3}}), "weights.num_bits is 3; 4 and 8 are"},
           {compressed({{"type", "float"}}), "weights.type is float"},
           {compressed({{"dynamic", true}}), "weights.dynamic is true"},
           {compressed({{"group_size", 48}}), "group_size is 48"},
           {compressed({{"strategy", "tensor_group"}}), "weights.strategy is tensor_group"},
           {compressed({{"strategy", "block"}, {"block_structure", {64, 64}}}),
            "block_structure is [64,64]"},
           {compressed({{"actorder", "group"}}), "columns are reordered (g_idx)"},
           {compressed({{"actorder", true}}), "columns are reordered (g_idx)"},
           {compressed({}, {{"format", "nvfp4-pack-quantized"}}), "nvfp4-pack-quantized"},
           {compressed({}, {{"output_activations", {{"num_bits", 8}}}}), "output_activations"},
           {compressed({}, {}, {{"sparsity_config", {{"format", "sparse"}}}}), "sparsity_config"},
           {compressed({}, {}, {{"transform_config", {{"a", 1}}}}), "transform_config"},
           {compressed({}, {}, {{"config_groups", json::object()}}), "has no config_groups"}}) {
    EXPECT_THAT(refusal(config), AllOf(HasSubstr("FOLDER: config.json: quantization_config"),
                                       HasSubstr(what), HasSubstr("use the 16-bit checkpoint")));
  }
}

TEST(Quantization, Awq) {
  const json published = {
      {"bits", 4},         {"group_size", 128},  {"quant_method", "awq"},
      {"version", "gemm"}, {"zero_point", true}, {"modules_to_not_convert", {"visual"}}};
  const QuantizationConfig config = quantized(published);
  EXPECT_EQ(config.method, Method::kAwq);
  EXPECT_EQ(config.schemes[0].group, 128);
  EXPECT_TRUE(config.schemes[0].zeros);
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, json>>{
           {"bits", 3}, {"version", "gemv"}, {"zero_point", false}, {"group_size", 100}}) {
    json changed = published;
    changed[key] = value;
    EXPECT_THAT(refusal(changed), HasSubstr(key));
  }
  // Where the quantizer wrote a file of its own.
  const auto file =
      parse(json::object(),
            {{"quant_config.json",
              {{"w_bit", 4}, {"q_group_size", 64}, {"version", "GEMM"}, {"zero_point", true}}}});
  EXPECT_EQ(file->method, Method::kAwq);
  EXPECT_EQ(file->schemes[0].group, 64);
}

TEST(Quantization, Gptq) {
  const json published = {{"bits", 4},         {"damp_percent", 0.1},    {"dataset", nullptr},
                          {"desc_act", false}, {"group_size", 128},      {"quant_method", "gptq"},
                          {"sym", true},       {"true_sequential", true}};
  const QuantizationConfig config = quantized(published);
  EXPECT_EQ(config.method, Method::kGptq);
  EXPECT_TRUE(config.stored_zeros_are_one_less);
  EXPECT_FALSE(config.schemes[0].zeros);
  json second = published;
  second["checkpoint_format"] = "gptq_v2";
  EXPECT_FALSE(quantized(second).stored_zeros_are_one_less);
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, json>>{
           {"bits", 2}, {"checkpoint_format", "marlin"}, {"group_size", 1024}}) {
    json changed = published;
    changed[key] = value;
    EXPECT_THAT(refusal(changed), HasSubstr(key));
  }
  EXPECT_EQ(parse(json::object(), {{"quantize_config.json", {{"bits", 8}}}})->schemes[0].bits, 8);
}

TEST(Quantization, FineGrainedFp8) {
  const json published = {{"quant_method", "fp8"},
                          {"activation_scheme", "dynamic"},
                          {"fmt", "e4m3"},
                          {"weight_block_size", {128, 128}}};
  EXPECT_EQ(quantized(published).method, Method::kFloat);
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, json>>{
           {"fmt", "e5m2"}, {"weight_block_size", {64, 64}}, {"scale_fmt", "ue8m0"}}) {
    json changed = published;
    changed[key] = value;
    EXPECT_THAT(refusal(changed), HasSubstr(key));
  }
}

TEST(Quantization, OtherMethodsAreNamed) {
  for (const char* method :
       {"hqq", "aqlm", "quip", "eetq", "quanto", "torchao", "vptq", "spqr", "higgs", "fp_quant",
        "bitnet", "fbgemm_fp8", "mxfp4", "modelopt", "quark", "auto-round", "never heard of"}) {
    EXPECT_THAT(refusal({{"quant_method", method}}),
                AllOf(HasSubstr(method), HasSubstr("with --weights int4")));
  }
  EXPECT_THAT(refusal({{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}}),
              HasSubstr("bitsandbytes (NF4)"));
  EXPECT_THAT(refusal({{"load_in_8bit", true}}), HasSubstr("bitsandbytes (int8)"));
  EXPECT_THAT(refusal("x\x1b[2J"), HasSubstr("is not an object"));
  EXPECT_THAT(refusal({{"quant_method", "a\x1b[2J"}}), HasSubstr("a\\x1b[2J"));
  EXPECT_THAT(test::error_of([&] {
                parse(json::object(),
                      {{"hf_quant_config.json", {{"quantization", {{"quant_algo", "FP8"}}}}}});
              }).what(),
              HasSubstr("modelopt"));
}

TEST(Quantization, OfThePartsOfAModel) {
  const json awq = {{"quant_method", "awq"}, {"bits", 4}};
  for (const char* part : {"text_config", "llm_config", "vision_config"}) {
    EXPECT_THAT(parse({{part, {{"quantization_config", awq}}}})->where,
                HasSubstr(std::string(part) + ".quantization_config"));
  }
  EXPECT_TRUE(
      parse({{"quantization_config", awq}, {"text_config", {{"quantization_config", awq}}}}));
  const json other = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}};
  EXPECT_THAT(
      test::error_of([&] {
        parse({{"quantization_config", awq}, {"llm_config", {{"quantization_config", other}}}});
      }).what(),
      HasSubstr("llm_config.quantization_config differ"));
}

}  // namespace
}  // namespace kvlm
