#include "runtime/loading/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/loading/weight_names.h"
#include "tests/kernels/values.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::FileTensor;
using ::testing::HasSubstr;

constexpr int64_t kOut = 48;
constexpr int64_t kIn = 40;
constexpr int64_t kRank = 4;

class Lora : public ::testing::Test {
 protected:
  Lora() {
    config_ = {{"peft_type", "LORA"}, {"r", kRank}, {"lora_alpha", 6}};
    add("base_model.model.language_model.model.layers.0.self_attn.q_proj.");
  }
  void add(const std::string& prefix) {
    tensors_.push_back(test::file_tensor<float>(prefix + "lora_A.weight", {kRank, kIn}, a_));
    tensors_.push_back(test::file_tensor<bf16>(prefix + "lora_B.weight", {kOut, kRank}, b_));
  }
  /// The map of a model with one matrix, and the adapter in it.
  WeightMap loaded() {
    test::write_file(folder_ / "adapter_config.json", config_.dump());
    test::write_file(folder_ / "adapter_model.safetensors", test::safetensors(tensors_));
    WeightMap weights;
    weights.add("language_model.model.layers.0.self_attn.q_proj.weight", w_, nullptr);
    add_lora(weights, folder_.path());
    weights.rename(&canonical_llava_name);
    return weights;
  }
  std::string failure() {
    return test::error_of([&] {
             WeightMap weights = loaded();
             weights.take(kName, {kOut, kIn});
             refuse_leftovers(weights, {});
           })
        .what();
  }
  /// W + scale * B A in f32, as it is added.
  std::vector<float> sum(float scale) const {
    std::vector<float> values(static_cast<size_t>(kOut * kIn));
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t i = 0; i < kIn; ++i) {
        double delta = 0;
        for (int64_t k = 0; k < kRank; ++k) {
          const auto at = static_cast<size_t>(o * kRank + k);
          delta += double{to_float(to_bf16(b_[at]))} * a_[static_cast<size_t>(k * kIn + i)];
        }
        const float w = to_float(w_.as<f16>()[o * kIn + i]);
        values[static_cast<size_t>(o * kIn + i)] = static_cast<float>(w + scale * delta);
      }
    }
    return values;
  }

  static constexpr const char* kName = "model.language_model.layers.0.self_attn.q_proj.weight";
  test::TempFolder folder_;
  json config_;
  std::vector<FileTensor> tensors_;
  std::vector<float> a_ = testing::normal_values(kRank * kIn, 1);
  std::vector<float> b_ = testing::normal_values(kOut * kRank, 2);
  Tensor w_ = testing::normal_tensor(DType::kF16, {kOut, kIn}, 3);
};

TEST_F(Lora, IsAddedBeforeRounding) {
  const std::vector<float> want = sum(1.5f);
  WeightMap weights = loaded();
  const ConstTensorView view = weights.take(kName, {kOut, kIn});
  ASSERT_EQ(view.dtype(), DType::kF16);
  for (int64_t i = 0; i < view.elements(); ++i) {
    EXPECT_NEAR(to_float(view.as<f16>()[i]), want[static_cast<size_t>(i)], 4e-3) << i;
  }
  WeightMap wide = loaded();
  wide.convert(DType::kF32);
  const ConstTensorView floats = wide.take(kName, {kOut, kIn});
  for (int64_t i = 0; i < floats.elements(); ++i) {
    EXPECT_NEAR(floats.as<float>()[i], want[static_cast<size_t>(i)], 2e-6) << i;
  }
  refuse_leftovers(weights, {});
}

/// What the codes are made of is the sum in f32, not the sum in f16.
TEST_F(Lora, IsRoundedOnceToCodes) {
  WeightMap weights = loaded();
  weights.round({.decoder = WeightCode::kU8});
  const Weight w = weights.take_matrix(kName, {kOut, kIn}, MatrixUse::kDecoder);
  ASSERT_TRUE(w.is_quantized());
  EXPECT_EQ(w.dtype(), DType::kF16);
  QuantizedRows rows;
  rows.resize(w.quantized().format, kOut);
  read_rows(w.quantized(), 0, kOut, rows);
  const std::vector<float> want = sum(1.5f);
  std::vector<float> row(kIn);
  for (int64_t o = 0; o < kOut; ++o) {
    rows.widen(w.quantized().format, o, row.data());
    for (int64_t i = 0; i < kIn; ++i) {
      const float scale = rows.scales[static_cast<size_t>(o * 2 + i / 32)];
      EXPECT_NEAR(row[static_cast<size_t>(i)], want[static_cast<size_t>(o * kIn + i)],
                  0.51f * scale);
    }
  }
}

TEST_F(Lora, RankStabilizedScale) {
  config_["use_rslora"] = true;
  const std::vector<float> want = sum(3);
  WeightMap weights = loaded();
  weights.convert(DType::kF32);
  const ConstTensorView view = weights.take(kName, {kOut, kIn});
  for (int64_t i = 0; i < view.elements(); ++i) {
    EXPECT_NEAR(view.as<float>()[i], want[static_cast<size_t>(i)], 4e-6) << i;
  }
}

TEST_F(Lora, RefusesWhatItDoesNotMerge) {
  add("base_model.model.language_model.model.layers.7.self_attn.q_proj.");
  EXPECT_THAT(failure(), HasSubstr("no matrix model.language_model.layers.7.self_attn.q_proj"));
  tensors_.resize(2);
  tensors_.push_back(
      test::file_tensor<float>("base_model.model.lm_head.weight", {1, 1}, std::vector<float>{1}));
  EXPECT_THAT(failure(), HasSubstr("base_model.model.lm_head.weight is not lora_A or lora_B"));
  tensors_.resize(1);
  EXPECT_THAT(failure(), HasSubstr("not a pair of one rank"));
  tensors_.clear();
  add("base_model.model.language_model.model.layers.0.self_attn.q_proj.");
  w_ = testing::normal_tensor(DType::kF16, {kOut, 2 * kIn}, 3);
  EXPECT_THAT(test::error_of([&] {
                loaded().take(kName, {kOut, 2 * kIn});
              }).what(),
              HasSubstr("for a matrix (48, 40)"));
  for (const auto& [key, value] :
       std::initializer_list<std::pair<const char*, json>>{{"peft_type", "LOHA"},
                                                           {"use_dora", true},
                                                           {"bias", "all"},
                                                           {"lora_alpha", nullptr},
                                                           {"rank_pattern", {{"q_proj", 2}}},
                                                           {"fan_in_fan_out", true}}) {
    const json before = config_;
    config_[key] = value;
    EXPECT_THAT(failure(), HasSubstr(key));
    config_ = before;
  }
}

}  // namespace
}  // namespace kvlm
