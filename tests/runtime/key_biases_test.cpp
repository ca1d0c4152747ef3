#include "runtime/key_biases.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kLayers = 2;
constexpr int kHeadDim = 64;
constexpr int kKvHeads = 2;
constexpr int kHidden = 16;

std::shared_ptr<Tensor> filled(const Shape& shape, float value) {
  auto tensor = std::make_shared<Tensor>(DType::kF32, shape);
  for (int64_t i = 0; i < shape.elements(); ++i) tensor->as<float>()[i] = value;
  return tensor;
}

/// Rows of 16 weights of 0.5 after a norm of 0.25: a spread of 0.5 a channel.
WeightMap weights_with(float bias, const std::string& prefix = "model.language_model.") {
  WeightMap weights;
  const auto add = [&](const std::string& name, const std::shared_ptr<Tensor>& tensor) {
    weights.add(name, std::as_const(*tensor).view(), tensor);
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string name = fmt::format("{}layers.{}.", prefix, layer);
    add(name + "self_attn.k_proj.weight", filled({kKvHeads * kHeadDim, kHidden}, 0.5F));
    add(name + "input_layernorm.weight", filled({kHidden}, 0.25F));
    const auto biases = filled({kKvHeads * kHeadDim}, 0.1F);
    if (layer == 1) biases->as<float>()[kHeadDim + 31] = bias;
    add(name + "self_attn.k_proj.bias", biases);
  }
  return weights;
}

std::string warning(const WeightMap& weights, const std::string& spec) {
  CacheShape shape;
  shape.layers = kLayers;
  shape.q_heads = 4;
  shape.kv_heads = kKvHeads;
  shape.head_dim = kHeadDim;
  return loud_key_bias(weights, *plan_cache(parse_spec(spec), shape));
}

/// 400 is 800 spreads: more than 2.5 * 15, and of 8 bits more than 2.5 * 255.
TEST(LoudKeyBias, OfPoliciesThatGiveAKeyOneScale) {
  const WeightMap loud = weights_with(-400);
  for (const char* spec : {"int4", "int8", "nf4", "head_quantile", "head_quantile,bits=4",
                           "snapkv,keep=0.5 + int4", "head_quantile,bits=2 + int4,scope=text"}) {
    EXPECT_THAT(warning(loud, spec),
                AllOf(HasSubstr("in 1 of 2 layers a bias of k_proj is too large"),
                      HasSubstr("layer 1: 400, 800 times the spread"), HasSubstr("such as kivi")))
        << spec;
  }
  for (const char* spec : {"f16", "f32", "kivi", "calibquant", "head_quantile,group_axes=channel",
                           "head_quantile,key_bits=16", "snapkv,keep=0.5"}) {
    EXPECT_EQ(warning(loud, spec), "") << spec;
  }
}

/// The limit of 4 bits: 37.5 spreads of 0.5.
TEST(LoudKeyBias, BeginsWhereAStepIsTwoAndAHalfSpreads) {
  EXPECT_EQ(warning(weights_with(18.7F), "int4"), "");
  EXPECT_NE(warning(weights_with(18.8F), "int4"), "");
  EXPECT_EQ(warning(weights_with(300), "int8"), "");
  EXPECT_NE(warning(weights_with(330), "int8"), "");
  EXPECT_EQ(warning(weights_with(100), "int4,rotate=hadamard"), "");
}

TEST(LoudKeyBias, IsOfTheDecoderWhateverItIsCalled) {
  EXPECT_NE(warning(weights_with(400, "model."), "int4"), "");
  EXPECT_NE(warning(weights_with(400, "language_model.model."), "int4"), "");
  EXPECT_EQ(warning(weights_with(400, "vision_tower.vision_model.encoder."), "int4"), "");
  EXPECT_EQ(warning(WeightMap(), "int4"), "");
}

}  // namespace
}  // namespace kvlm
