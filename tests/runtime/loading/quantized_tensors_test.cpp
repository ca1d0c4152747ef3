#include "runtime/loading/quantized_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "kernels/base/thread_pool.h"
#include "kernels/quantized/round.h"
#include "tests/source_folder.h"

// The vectors of tests/runtime/data/weights were made by the packages that they name.
namespace kvlm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using json = nlohmann::json;
using Method = QuantizationConfig::Method;

json vectors(const std::string& name) {
  std::ifstream file(test::source_folder() / "tests/runtime/data/weights" / name);
  return json::parse(file);
}

/// Tensors of a file, from lists of numbers.
class Tensors {
 public:
  template <class T>
  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
    auto bytes = std::make_shared<std::vector<std::byte>>(values.size() * sizeof(T));
    std::memcpy(bytes->data(), values.data(), bytes->size());
    all[name] = {dtype, shape, bytes->data(), bytes->size(), bytes};
  }
  std::map<std::string, StoredTensor> all;
};

QuantizationConfig config_of(Method method, int bits, int64_t group, bool zeros) {
  QuantizationConfig config;
  config.method = method;
  config.where = "config.json: quantization_config";
  config.schemes.push_back({bits, group, zeros});
  return config;
}

/// The matrix m.weight as f32.
std::vector<float> widened(Tensors& tensors, const QuantizationConfig& config, const Shape& shape) {
  WeightMap weights;
  take_quantized(tensors.all, config, DType::kBF16, weights);
  EXPECT_TRUE(tensors.all.empty());
  weights.convert(DType::kF32);
  const ConstTensorView view = weights.take("m.weight", shape);
  return {view.as<float>(), view.as<float>() + view.elements()};
}

std::string failure(Tensors tensors, const std::optional<QuantizationConfig>& config) {
  try {
    WeightMap weights;
    take_quantized(tensors.all, config, DType::kBF16, weights);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// bf16 or f16 bits as floats.
float half_value(uint16_t bits, bool brain) {
  return brain ? to_float(bf16{bits}) : to_float(f16{bits});
}

Tensors packed_case(const json& one) {
  Tensors tensors;
  const auto shape = one.at("shape").get<std::vector<int64_t>>();
  const auto words = one.at("weight_packed").get<std::vector<uint32_t>>();
  const auto scales = one.at("weight_scale_bits").get<std::vector<uint16_t>>();
  const auto count = [](const auto& values) { return static_cast<int64_t>(values.size()); };
  tensors.add("m.weight_packed", "I32", {shape[0], count(words) / shape[0]}, words);
  tensors.add("m.weight_scale", one.at("scale_dtype") == "bfloat16" ? "BF16" : "F16",
              {shape[0], count(scales) / shape[0]}, scales);
  tensors.add("m.weight_shape", "I64", {2}, shape);
  if (one.contains("weight_zero_point_packed")) {
    const auto zeros = one.at("weight_zero_point_packed").get<std::vector<uint32_t>>();
    const int64_t groups = count(scales) / shape[0];
    tensors.add("m.weight_zero_point", "I32", {count(zeros) / groups, groups}, zeros);
  }
  return tensors;
}

QuantizationConfig packed_config(const json& one) {
  const json& args = one.at("args");
  return config_of(Method::kPacked, args.at("num_bits"), args.value("group_size", 0),
                   !args.at("symmetric"));
}

TEST(QuantizedTensors, CompressedTensorsPackQuantized) {
  int cases = 0;
  const json file = vectors("ct-pack.json");
  for (const json& one : file.at("cases")) {
    if (one.at("args").at("num_bits") == 3) continue;
    const auto shape = one.at("shape").get<std::vector<int64_t>>();
    Tensors tensors = packed_case(one);
    const std::vector<float> made = widened(tensors, packed_config(one), {shape[0], shape[1]});
    const bool brain = one.at("scale_dtype") == "bfloat16";
    const auto want = one.at("dequantized_bits").get<std::vector<uint16_t>>();
    for (size_t i = 0; i < want.size(); ++i) {
      // The package rounds the product to the type of the scale.
      const uint16_t bits = brain ? to_bf16(made[i]).bits : to_f16(made[i]).bits;
      ASSERT_EQ(half_value(bits, brain), half_value(want[i], brain)) << one.at("name") << i;
    }
    ++cases;
  }
  EXPECT_EQ(cases, 5);
}

TEST(QuantizedTensors, CodesThatCrossWordsAreRefused) {
  const json file = vectors("ct-pack.json");
  const json& one = file.at("cases").back();
  EXPECT_THAT(failure(packed_case(one), packed_config(one)), HasSubstr("in 4 or 8 bits"));
}

TEST(QuantizedTensors, CompressedTensorsInt8) {
  const json file = vectors("ct-int8.json");
  const auto shape = file.at("shape").get<std::vector<int64_t>>();
  Tensors tensors;
  tensors.add("m.weight", "I8", shape, file.at("weight").get<std::vector<int8_t>>());
  tensors.add("m.weight_scale", "BF16", {shape[0], 1},
              file.at("weight_scale_bf16_bits").get<std::vector<uint16_t>>());
  const std::vector<float> made =
      widened(tensors, config_of(Method::kInt, 8, 0, false), {shape[0], shape[1]});
  const auto want = file.at("dequantized_bf16_bits").get<std::vector<uint16_t>>();
  for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(to_bf16(made[i]).bits, want[i]) << i;
}

TEST(QuantizedTensors, Fp8ByChannelAndByTensor) {
  const json file = vectors("fp8.json");
  const auto values = file.at("e4m3fn_values_f32");
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(e4m3_value(static_cast<uint8_t>(code)), values[static_cast<size_t>(code)]) << code;
  }
  for (const json& one : file.at("compressed_tensors")) {
    const auto shape = one.at("shape").get<std::vector<int64_t>>();
    Tensors tensors;
    tensors.add("m.weight", "F8_E4M3", shape, one.at("bytes").get<std::vector<uint8_t>>());
    tensors.add("m.weight_scale", "F32", one.at("scale_shape").get<std::vector<int64_t>>(),
                one.at("scale_f32").get<std::vector<float>>());
    const std::vector<float> made =
        widened(tensors, config_of(Method::kFloat, 8, 0, false), {shape[0], shape[1]});
    const auto want = one.at("dequantized_f32").get<std::vector<float>>();
    const bool brain = one.at("dequantized_dtype") == "bfloat16";
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(brain ? to_float(to_bf16(made[i])) : made[i], want[i]) << i;
    }
  }
}

/// The blocks of 128 x 128 of fine-grained FP8, the last of them short.
TEST(QuantizedTensors, Fp8ByBlocks) {
  constexpr int64_t kOut = 130;
  constexpr int64_t kIn = 200;
  std::vector<uint8_t> codes(kOut * kIn);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 0x7f);
  const std::vector<float> scales{0.5f, 0.25f, 2, 4};
  Tensors tensors;
  tensors.add("m.weight", "F8_E4M3", {kOut, kIn}, codes);
  tensors.add("m.weight_scale_inv", "F32", {2, 2}, scales);
  const std::vector<float> made =
      widened(tensors, config_of(Method::kFloat, 8, 128, false), {kOut, kIn});
  for (size_t i = 0; i < codes.size(); ++i) {
    const size_t block = i / kIn / 128 * 2 + i % kIn / 128;
    ASSERT_EQ(made[i], e4m3_value(codes[i]) * scales[block]) << i;
  }
  codes[300] = 0xff;
  tensors.add("m.weight", "F8_E4M3", {kOut, kIn}, codes);
  tensors.add("m.weight_scale_inv", "F32", {2, 2}, scales);
  try {
    widened(tensors, config_of(Method::kFloat, 8, 128, false), {kOut, kIn});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("row 1, column 100"), HasSubstr("m.weight")));
  }
}

/// (in, out) f16 bits as (out, in) floats.
std::vector<float> turned(const json& bits, int64_t in, int64_t out) {
  std::vector<float> values;
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t i = 0; i < in; ++i) {
      values.push_back(to_float(f16{bits[static_cast<size_t>(i * out + o)].get<uint16_t>()}));
    }
  }
  return values;
}

void add_transposed(Tensors& tensors, const json& one, const char* zeros) {
  const auto words = [&](const char* key) { return one.at(key).get<std::vector<uint32_t>>(); };
  const auto shape = [&](const char* key) { return one.at(key).get<std::vector<int64_t>>(); };
  tensors.add("m.qweight", "I32", shape("qweight_shape"), words("qweight"));
  tensors.add("m.qzeros", "I32", shape("qzeros_shape"), words(zeros));
  tensors.add("m.scales", "F16", shape("scales_shape"),
              one.at("scales_f16_bits").get<std::vector<uint16_t>>());
}

TEST(QuantizedTensors, Awq) {
  const json file = vectors("awq.json");
  Tensors tensors;
  add_transposed(tensors, file, "qzeros");
  const std::vector<float> made = widened(tensors, config_of(Method::kAwq, 4, 16, true), {32, 32});
  const std::vector<float> want = turned(file.at("dequantized_in_out_f16_bits"), 32, 32);
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(to_float(to_f16(made[i])), want[i]) << i;
  }
}

TEST(QuantizedTensors, GptqInBothVersions) {
  const json file = vectors("gptq.json");
  for (const json& one : file.at("cases")) {
    for (const bool first : {true, false}) {
      Tensors tensors;
      add_transposed(tensors, one, first ? "qzeros_v1" : "qzeros_v2");
      tensors.add("m.g_idx", "I32", {32}, one.at("g_idx").get<std::vector<int32_t>>());
      QuantizationConfig config =
          config_of(Method::kGptq, one.at("bits"), 16, !one.at("sym").get<bool>());
      config.stored_zeros_are_one_less = first;
      if (one.at("desc_act")) {
        EXPECT_THAT(failure(tensors, config),
                    AllOf(HasSubstr("m.g_idx"), HasSubstr("desc_act false")));
        continue;
      }
      const std::vector<float> made = widened(tensors, config, {32, 32});
      const std::vector<float> want = turned(one.at("dequantized_in_out_f16_bits"), 32, 32);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_EQ(to_float(to_f16(made[i])), want[i]) << one.at("name") << i;
      }
      if (!one.at("sym")) continue;
      // Zeros of the other version are found out.
      Tensors other;
      add_transposed(other, one, first ? "qzeros_v2" : "qzeros_v1");
      EXPECT_THAT(failure(other, config), HasSubstr("the stored zeros do not fit format"));
    }
  }
}

TEST(QuantizedTensors, WhatDoesNotFitIsNamed) {
  const json file = vectors("ct-pack.json");
  const json& one = file.at("cases")[1];
  const QuantizationConfig config = packed_config(one);
  const auto without = [&](const std::string& name) {
    Tensors tensors = packed_case(one);
    tensors.all.erase(name);
    return failure(tensors, config);
  };
  EXPECT_THAT(without("m.weight_scale"), HasSubstr("m.weight_scale: is missing"));
  EXPECT_THAT(without("m.weight_shape"), HasSubstr("m.weight_shape: is missing"));
  EXPECT_THAT(without("m.weight_zero_point"), HasSubstr("does not say"));
  EXPECT_THAT(without("m.weight_packed"), HasSubstr("there is no tensor *.weight_packed"));
  const auto with_shape = [&](const std::string& name, const std::vector<int64_t>& shape) {
    Tensors tensors = packed_case(one);
    tensors.all.at(name).shape = shape;
    return failure(tensors, config);
  };
  EXPECT_THAT(with_shape("m.weight_scale", {10, 3}), HasSubstr("groups of one size"));
  EXPECT_THAT(with_shape("m.weight_scale", {5, 4}), HasSubstr("expected [10, 4]"));
  EXPECT_THAT(with_shape("m.weight_packed", {80}), HasSubstr("expected a matrix"));
  EXPECT_THAT(with_shape("m.weight_packed", {5, 16}), HasSubstr("no matrix of 10 x 64"));
  EXPECT_THAT(with_shape("m.weight_zero_point", {4, 1}), HasSubstr("expected [2, 2]"));
  for (const std::vector<int64_t>& dims :
       {std::vector<int64_t>{10, INT64_MAX}, {-1, 64}, {10, 0}, {INT64_MIN, INT64_MIN}}) {
    Tensors tensors = packed_case(one);
    tensors.add("m.weight_shape", "I64", {2}, dims);
    EXPECT_THAT(failure(tensors, config), HasSubstr("no matrix of"));
  }
  Tensors both = packed_case(one);
  both.add("m.weight", "BF16", {1}, std::vector<uint16_t>{0});
  EXPECT_THAT(failure(both, config), HasSubstr("m.weight: is there together with m.weight_packed"));
  EXPECT_THAT(failure(packed_case(one), std::nullopt), HasSubstr("no quantization_config"));
}

// --------------------------------------------------------------------------- rounding at load

TEST(RoundMatrix, EqualsItsVectors) {
  const json file = vectors("rtn.json");
  for (const json& one : file.at("cases")) {
    const auto bits = one.at("w_bf16_bits").get<std::vector<uint16_t>>();
    // Twice, and of the short group its 20 first: what follows counts as zeros.
    const bool is_short = one.at("name").get<std::string>().starts_with("short");
    const size_t used = is_short ? 20 : 32;
    const ConstTensorView view(bits.data(), DType::kBF16, {1, static_cast<int64_t>(used)});
    for (const WeightCode code : {WeightCode::kU4, WeightCode::kU8}) {
      const auto source = round_matrix("m", view, code, DType::kBF16);
      QuantizedRows rows;
      rows.resize(source->format(), 1);
      source->read(0, 1, rows);
      const bool four = code == WeightCode::kU4;
      const auto codes = one.at(four ? "int4_codes" : "int8_codes").get<std::vector<int>>();
      for (size_t i = 0; i < used; ++i) {
        EXPECT_EQ(rows.codes[i], codes[i] + (four ? 0 : 128)) << one.at("name") << i;
      }
      const uint16_t scale = one.at(four ? "int4_scale_f16_bits" : "int8_scale_f16_bits");
      EXPECT_EQ(to_f16(rows.scales[0]).bits, scale) << one.at("name");
    }
  }
}

TEST(RoundMatrix, RefusesWhatIsNotFinite) {
  std::vector<float> values(4 * 40, 1.0f);
  values[3 * 40 + 37] = INFINITY;
  const auto source =
      round_matrix("m.weight", {values.data(), DType::kF32, {4, 40}}, WeightCode::kU4, DType::kF16);
  QuantizedRows rows;
  rows.resize(source->format(), 4);
  source->read(0, 3, rows);
  try {
    source->read(0, 4, rows);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("m.weight"), HasSubstr("row 3, column 37")));
  }
}

}  // namespace
}  // namespace kvlm
