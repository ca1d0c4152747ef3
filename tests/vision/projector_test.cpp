#include "vision/projector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "tests/reference/dense.h"
#include "tests/reference/random_weights.h"

namespace kvlm {
namespace {

using reference::RandomWeights;
using reference::Row;
using testing::HasSubstr;

constexpr int kIn = 10;
constexpr int kOut = 14;
constexpr const char* kPrefix = "model.multi_modal_projector.";

RandomWeights make_weights(DType dtype, bool bias) {
  RandomWeights weights(dtype);
  const std::string prefix = kPrefix;
  weights.matrix(prefix + "linear_1.weight", {kOut, kIn});
  weights.matrix(prefix + "linear_2.weight", {kOut, kOut});
  if (bias) {
    weights.vector(prefix + "linear_1.bias", kOut, 0.3f);
    weights.vector(prefix + "linear_2.bias", kOut, 0.3f);
  }
  return weights;
}

Tensor random_features(int rows) {
  Tensor features(DType::kF32, {rows, kIn});
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  for (int i = 0; i < rows * kIn; ++i) features.as<float>()[i] = normal(rng);
  return features;
}

TEST(MlpProjector, EqualsTheScalarReference) {
  ThreadPool pool(1);
  Stream stream(pool);
  const std::string prefix = kPrefix;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool bias : {true, false}) {
      for (const Activation activation : {Activation::kGelu, Activation::kQuickGelu}) {
        const RandomWeights weights = make_weights(dtype, bias);
        const auto make = [&] {
          WeightMap map = weights.map();
          MlpProjector projector(kIn, kOut, activation, bias, map, prefix);
          EXPECT_TRUE(map.remaining().empty());
          return projector;  // outlives the map
        };
        MlpProjector projector = make();
        EXPECT_EQ(projector.weight_bytes(), dtype_bytes(dtype) * (kOut * kIn + kOut * kOut));
        for (const int rows : {1, 16, 17, 40, 3}) {  // at last fewer than it has kept room for
          const Tensor features = random_features(rows);
          const Tensor out = projector.project(features, stream);
          ASSERT_EQ(out.shape(), Shape({rows, kOut}));
          for (int row = 0; row < rows; ++row) {
            const float* x = features.as<float>() + row * kIn;
            Row inner = reference::linear(Row(x, x + kIn), weights[prefix + "linear_1.weight"],
                                          weights.find(prefix + "linear_1.bias"));
            for (double& value : inner) {
              value = activation == Activation::kGelu ? reference::gelu(value)
                                                      : reference::quick_gelu(value);
            }
            const Row expected = reference::linear(inner, weights[prefix + "linear_2.weight"],
                                                   weights.find(prefix + "linear_2.bias"));
            for (int i = 0; i < kOut; ++i) {
              ASSERT_NEAR(static_cast<double>(out.as<float>()[row * kOut + i]),
                          expected[static_cast<size_t>(i)], 1e-5);
            }
          }
        }
      }
    }
  }
}

TEST(MlpProjector, NamesAMissingTensor) {
  for (const char* name :
       {"linear_1.weight", "linear_2.weight", "linear_1.bias", "linear_2.bias"}) {
    RandomWeights weights = make_weights(DType::kF32, true);
    weights.remove(std::string(kPrefix) + name);
    WeightMap map = weights.map();
    try {
      const MlpProjector projector(kIn, kOut, Activation::kGelu, true, map, kPrefix);
      ADD_FAILURE() << "expected an Error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      EXPECT_THAT(error.what(), HasSubstr(name));
    }
  }
}

}  // namespace
}  // namespace kvlm
