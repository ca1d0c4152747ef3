#include "vision/clip_vit.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
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
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kPrefix = "model.vision_tower.";

ClipConfig small_config() {
  ClipConfig config;
  config.hidden = 24;
  config.intermediate = 36;
  config.layers = 3;
  config.heads = 2;
  config.image_size = 13;  // a grid of 3 by 3; the last pixel of each axis belongs to no patch
  config.patch_size = 4;
  config.eps = 1e-2f;  // large enough to be missed if it is not there
  config.feature_layers = {-2};
  return config;
}

RandomWeights make_weights(const ClipConfig& config, DType dtype = DType::kF32) {
  RandomWeights weights(dtype);
  const std::string prefix = kPrefix;
  const int hidden = config.hidden;
  const int64_t grid = config.image_size / config.patch_size;
  weights.add(prefix + "embeddings.class_embedding", {hidden}, 0, 0.5f);
  weights.matrix(prefix + "embeddings.patch_embedding.weight",
                 {hidden, 3, config.patch_size, config.patch_size});
  weights.add(prefix + "embeddings.position_embedding.weight", {grid * grid + 1, hidden}, 0, 0.5f);
  const auto affine = [&](const std::string& name, int out, int in) {
    if (in > 0) {
      weights.matrix(name + ".weight", {out, in});
    } else {
      weights.vector(name + ".weight", out, 1);
    }
    weights.vector(name + ".bias", out, 0.1f);
  };
  affine(prefix + "pre_layrnorm", hidden, 0);
  for (int i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("{}encoder.layers.{}.", prefix, i);
    affine(layer + "layer_norm1", hidden, 0);
    affine(layer + "layer_norm2", hidden, 0);
    for (const char* name : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
      affine(layer + "self_attn." + name, hidden, hidden);
    }
    affine(layer + "mlp.fc1", config.intermediate, hidden);
    affine(layer + "mlp.fc2", hidden, config.intermediate);
  }
  return weights;
}

Tensor random_pixels(int size) {
  Tensor pixels(DType::kF32, {3, size, size});
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < pixels.shape().elements(); ++i) pixels.as<float>()[i] = normal(rng);
  return pixels;
}

/// Hidden states 0 to layers of models.md 5.1 in scalar double, class token first.
std::vector<std::vector<Row>> reference_states(const ClipConfig& config,
                                               const RandomWeights& weights, const Tensor& pixels) {
  const std::string prefix = kPrefix;
  const auto eps = static_cast<double>(config.eps);
  const int grid = config.image_size / config.patch_size;
  const auto hidden = static_cast<size_t>(config.hidden);
  const auto project = [&](const std::string& name, const Row& x) {
    return reference::linear(x, weights[name + ".weight"], weights[name + ".bias"]);
  };
  const auto norm = [&](const std::string& name, const Row& x) {
    return reference::layer_norm(x, weights[name + ".weight"], weights[name + ".bias"], eps);
  };
  const auto activate = [&](double x) {
    return config.activation == Activation::kQuickGelu ? reference::quick_gelu(x)
                                                       : reference::gelu(x);
  };
  std::vector<Row> x;
  const auto class_token = weights[prefix + "embeddings.class_embedding"];
  x.emplace_back(class_token.begin(), class_token.end());
  for (int row = 0; row < grid; ++row) {
    for (int column = 0; column < grid; ++column) {
      Row patch;
      for (int channel = 0; channel < 3; ++channel) {
        for (int dy = 0; dy < config.patch_size; ++dy) {
          for (int dx = 0; dx < config.patch_size; ++dx) {
            const int y = row * config.patch_size + dy;
            const int place = (channel * config.image_size + y) * config.image_size +
                              column * config.patch_size + dx;
            patch.push_back(static_cast<double>(pixels.as<float>()[place]));
          }
        }
      }
      x.push_back(
          reference::linear(patch, weights[prefix + "embeddings.patch_embedding.weight"], {}));
    }
  }
  const auto positions = weights[prefix + "embeddings.position_embedding.weight"];
  for (size_t row = 0; row < x.size(); ++row) {
    for (size_t i = 0; i < hidden; ++i)
      x[row][i] += static_cast<double>(positions[row * hidden + i]);
    x[row] = norm(prefix + "pre_layrnorm", x[row]);
  }
  std::vector<std::vector<Row>> states = {x};
  const size_t head_dim = hidden / static_cast<size_t>(config.heads);
  for (int index = 0; index < config.layers; ++index) {
    const std::string layer = fmt::format("{}encoder.layers.{}.", prefix, index);
    std::vector<Row> queries;
    std::vector<Row> keys;
    std::vector<Row> values;
    for (const Row& row : x) {
      const Row normed = norm(layer + "layer_norm1", row);
      queries.push_back(project(layer + "self_attn.q_proj", normed));
      keys.push_back(project(layer + "self_attn.k_proj", normed));
      values.push_back(project(layer + "self_attn.v_proj", normed));
    }
    for (size_t row = 0; row < x.size(); ++row) {
      Row attended;
      for (size_t head = 0; head < static_cast<size_t>(config.heads); ++head) {
        const Row out = reference::attend(queries[row], head * head_dim, keys, values,
                                          head * head_dim, x.size(), head_dim);
        attended.insert(attended.end(), out.begin(), out.end());
      }
      reference::add(x[row], project(layer + "self_attn.out_proj", attended));
      Row inner = project(layer + "mlp.fc1", norm(layer + "layer_norm2", x[row]));
      for (double& value : inner) value = activate(value);
      reference::add(x[row], project(layer + "mlp.fc2", inner));
    }
    states.push_back(x);
  }
  return states;
}

class Tower {
 public:
  Tower(const ClipConfig& config, WeightMap weights, int threads = 1)
      : pool_(threads), stream_(pool_), encoder_(make_clip_vit(config, weights, kPrefix)) {
    remaining_ = weights.remaining();
  }
  VisionEncoder& operator*() { return *encoder_; }
  const std::vector<std::string>& remaining() const { return remaining_; }
  std::vector<float> encode(const Tensor& pixels, const VisionTap& tap = {}) {
    const ConstTensorView features = encoder_->encode(pixels, stream_, tap);
    EXPECT_EQ(features.shape(), Shape({encoder_->tokens(), encoder_->width()}));
    return {features.as<float>(), features.as<float>() + features.elements()};
  }

 private:
  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<VisionEncoder> encoder_;
  std::vector<std::string> remaining_;
};

/// Columns of the wanted states side by side, with or without the class token's row.
void expect_features(const std::vector<float>& ours, const std::vector<std::vector<Row>>& states,
                     const std::vector<size_t>& wanted, bool class_token) {
  std::vector<double> expected;
  for (size_t row = class_token ? 0 : 1; row < states[0].size(); ++row) {
    for (const size_t state : wanted) {
      expected.insert(expected.end(), states[state][row].begin(), states[state][row].end());
    }
  }
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(ours[i]), expected[i], 2e-5) << "element " << i;
  }
}

struct Selection {
  std::vector<int> layers;
  std::vector<size_t> states;
};

class ClipSelection : public testing::TestWithParam<std::tuple<Selection, bool>> {};

TEST_P(ClipSelection, FeaturesEqualTheScalarReference) {
  const auto& [selection, class_token] = GetParam();
  ClipConfig config = small_config();
  config.feature_layers = selection.layers;
  config.keep_class_token = class_token;
  const RandomWeights weights = make_weights(config);
  Tower tower(config, weights.map());
  EXPECT_EQ((*tower).tokens(), class_token ? 10 : 9);
  EXPECT_EQ((*tower).width(), 24 * static_cast<int>(selection.layers.size()));
  const Tensor pixels = random_pixels(13);
  const auto states = reference_states(config, weights, pixels);
  expect_features(tower.encode(pixels), states, selection.states, class_token);
  expect_features(tower.encode(pixels), states, selection.states, class_token);  // and again
}

INSTANTIATE_TEST_SUITE_P(
    , ClipSelection,
    testing::Combine(testing::Values(Selection{{-2}, {2}}, Selection{{-1}, {3}},
                                     Selection{{2}, {2}}, Selection{{0}, {0}}, Selection{{-4}, {0}},
                                     Selection{{3}, {3}}, Selection{{-2, 1}, {2, 1}},
                                     Selection{{0, -1, -1}, {0, 3, 3}}),
                     testing::Bool()));

TEST(ClipVit, WeightsMayBeHalfAndTheActivationAnotherOne) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    ClipConfig config = small_config();
    config.activation = Activation::kGelu;
    const RandomWeights weights = make_weights(config, dtype);
    Tower tower(config, weights.map());
    const Tensor pixels = random_pixels(13);
    expect_features(tower.encode(pixels), reference_states(config, weights, pixels), {2}, false);
  }
}

TEST(ClipVit, ThreadsDoNotChangeOneBit) {
  const ClipConfig config = small_config();
  const RandomWeights weights = make_weights(config);
  const Tensor pixels = random_pixels(13);
  const std::vector<float> alone = Tower(config, weights.map()).encode(pixels);
  for (const int threads : {2, 3, 5}) {
    EXPECT_EQ(Tower(config, weights.map(), threads).encode(pixels), alone) << threads;
  }
}

TEST(ClipVit, LeavesLayersBeyondTheLastOneNeeded) {
  ClipConfig config = small_config();
  RandomWeights weights = make_weights(config);
  const auto left_for = [&](std::vector<int> layers) {
    config.feature_layers = std::move(layers);
    return Tower(config, weights.map()).remaining();
  };
  EXPECT_THAT(left_for({-1}), testing::IsEmpty());
  EXPECT_EQ(left_for({-2}).size(), 16u);
  EXPECT_THAT(left_for({-2}),
              testing::Each(testing::StartsWith("model.vision_tower.encoder.layers.2.")));
  EXPECT_EQ(left_for({0}).size(), 48u);
  EXPECT_THAT(left_for({0, -1}), testing::IsEmpty());
  // A checkpoint may lack what is not needed.
  for (const std::string& name : left_for({-2})) weights.remove(name);
  Tower tower(config, weights.map());
  EXPECT_EQ(tower.encode(random_pixels(13)).size(), 9u * 24);
}

TEST(ClipVit, TapsEveryStageInOrder) {
  const ClipConfig config = small_config();
  Tower tower(config, make_weights(config).map());
  std::vector<std::string> names;
  tower.encode(random_pixels(13), [&](std::string_view name, ConstTensorView view) {
    names.push_back(fmt::format("{} {}", name, view.shape().str()));
  });
  const auto shape = [](int64_t rows) { return Shape({rows, 24}).str(); };
  EXPECT_THAT(names, ElementsAre("vision.patch_embed " + shape(9), "vision.embeddings " + shape(10),
                                 "vision.pre_norm " + shape(10), "vision.layer.0 " + shape(10),
                                 "vision.layer.1 " + shape(10), "vision.selected " + shape(9)));
}

TEST(ClipVit, RefusesAPictureOfAnotherSize) {
  const ClipConfig config = small_config();
  Tower tower(config, make_weights(config).map());
  try {
    tower.encode(random_pixels(12));
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(Shape({3, 13, 13}).str()), HasSubstr(Shape({3, 12, 12}).str()),
                      HasSubstr("preprocessor_config.json")));
  }
}

TEST(ClipVit, RefusesAFeatureLayerOutsideTheTower) {
  for (const int layer : {4, -5, 1000}) {
    ClipConfig config = small_config();
    config.feature_layers = {-2, layer};
    try {
      Tower tower(config, make_weights(config).map());
      ADD_FAILURE() << "expected an Error for layer " << layer;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("vision_feature_layer"), HasSubstr(fmt::format("is {}", layer)),
                        HasSubstr("-4 to 3"), HasSubstr("3 layers")));
    }
  }
}

TEST(ClipVit, NamesAMissingOrMisshapenTensor) {
  ClipConfig config = small_config();
  RandomWeights missing = make_weights(config);
  missing.remove("model.vision_tower.pre_layrnorm.bias");
  try {
    Tower tower(config, missing.map());
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("model.vision_tower.pre_layrnorm.bias"));
  }
  const RandomWeights weights = make_weights(config);
  config.image_size = 17;
  try {
    Tower tower(config, weights.map());
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("position_embedding.weight"), HasSubstr("10"), HasSubstr("17")));
  }
}

TEST(ClipVit, CountsTheBytesOfItsWeights) {
  ClipConfig config = small_config();
  config.feature_layers = {1};
  const size_t matrices = 4 * 24 * 24 + 2 * 24 * 36;
  const size_t biases = 4 * 24 + 36 + 24;
  const size_t tables = 24 * 3 * 4 * 4 + 10 * 24;
  EXPECT_EQ((*Tower(config, make_weights(config).map())).weight_bytes(),
            4 * (matrices + biases + tables));
}

}  // namespace
}  // namespace kvlm
