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

Tensor random_pixels(int size, unsigned seed = 3) {
  Tensor pixels(DType::kF32, {3, size, size});
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < pixels.shape().elements(); ++i) pixels.as<float>()[i] = normal(rng);
  return pixels;
}

/// Hidden states 0 to layers of a CLIP tower (Radford et al. 2021) in scalar double, class token
/// first.
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

/// Pixels (3, size, size) as a tower of 4 x 4 patches takes them.
VisualPatches cut(const Tensor& pixels) {
  constexpr int64_t kPatch = 4;
  const int64_t size = pixels.shape()[1];
  const int64_t grid = size / kPatch;
  VisualPatches picture{Tensor(DType::kF32, {grid * grid, 3 * kPatch * kPatch}),
                        {{1, static_cast<int>(grid), static_cast<int>(grid)}}};
  float* to = picture.rows.as<float>();
  for (int64_t patch = 0; patch < grid * grid; ++patch) {
    for (int64_t i = 0; i < 3 * kPatch * kPatch; ++i) {
      const int64_t channel = i / (kPatch * kPatch);
      const int64_t y = patch / grid * kPatch + i / kPatch % kPatch;
      const int64_t x = patch % grid * kPatch + i % kPatch;
      *to++ = pixels.as<float>()[(channel * size + y) * size + x];
    }
  }
  return picture;
}

class Tower {
 public:
  Tower(const ClipConfig& config, WeightMap weights, int threads = 1, size_t workspace_bytes = 0)
      : pool_(threads),
        stream_(pool_),
        encoder_(make_clip_vit(config, weights, kPrefix, workspace_bytes)) {
    remaining_ = weights.remaining();
  }
  VisionEncoder& operator*() { return *encoder_; }
  const std::vector<std::string>& remaining() const { return remaining_; }
  std::vector<float> encode(const Tensor& pixels, const VisionTap& tap = {}) {
    const VisualPatches picture = cut(pixels);
    return encode({&picture}, tap);
  }
  std::vector<float> encode(const std::vector<const VisualPatches*>& pictures,
                            const VisionTap& tap = {}) {
    const Tensor features = encoder_->encode(pictures, stream_, tap);
    int64_t rows = 0;
    for (const VisualPatches* picture : pictures) {
      for (const PatchGrid& grid : picture->grids) rows += encoder_->tokens(grid);
    }
    EXPECT_EQ(features.shape(), Shape({rows, encoder_->width()}));
    return {features.as<float>(), features.as<float>() + features.shape().elements()};
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
  EXPECT_EQ((*tower).tokens({1, 3, 3}), class_token ? 10 : 9);
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

/// Pictures of one tile and of several, in one piece and in pieces of every size.
TEST(ClipVit, CompanyChangesNoBit) {
  for (const bool class_token : {false, true}) {
    ClipConfig config = small_config();
    config.feature_layers = {-2, 1};
    config.keep_class_token = class_token;
    const RandomWeights weights = make_weights(config);
    std::vector<VisualPatches> pictures;
    std::vector<float> expected;
    for (unsigned seed = 1; seed <= 5; ++seed) {
      pictures.push_back(cut(random_pixels(13, seed)));
      const std::vector<float> alone = Tower(config, weights.map()).encode(random_pixels(13, seed));
      expected.insert(expected.end(), alone.begin(), alone.end());
    }
    VisualPatches tiles{Tensor(DType::kF32, {18, 48}), {{1, 3, 3}, {1, 3, 3}}};
    for (int64_t i = 0; i < 9 * 48; ++i) {
      tiles.rows.as<float>()[i] = pictures[1].rows.as<float>()[i];
      tiles.rows.as<float>()[9 * 48 + i] = pictures[2].rows.as<float>()[i];
    }
    const std::vector<const VisualPatches*> batch = {&pictures[0], &tiles, &pictures[3],
                                                     &pictures[4]};
    Tower one_by_one(config, weights.map(), 2, tower_workspace_bytes({}));
    EXPECT_EQ(one_by_one.encode(batch), expected);
    EXPECT_EQ(one_by_one.encode(batch), expected) << "again";
    for (const size_t workspace : {size_t{15'000}, size_t{25'000}, size_t{1} << 20}) {
      Tower tower(config, weights.map(), 2, workspace);
      const std::vector<float> together = tower.encode(batch);
      ASSERT_EQ(together.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(together[i], expected[i], 1e-5f) << workspace;
      }
    }
  }
}

/// What bytes mean is looked up on the way, with nothing lost.
TEST(ClipVit, BytesAreWhatTheirTableSays) {
  const ClipConfig config = small_config();
  Tower tower(config, make_weights(config).map());
  constexpr int64_t kTiles = 3;
  VisualPatches bytes{Tensor(DType::kU8, {kTiles * 9, 48}),
                      {{1, 3, 3}, {1, 3, 3}, {1, 3, 3}},
                      Tensor(DType::kF32, {3, 256})};
  for (int64_t i = 0; i < kTiles * 9 * 48; ++i) {
    bytes.rows.as<uint8_t>()[i] = static_cast<uint8_t>(i * 37 + i / 256);
  }
  for (int64_t i = 0; i < 3 * 256; ++i) {
    bytes.values.as<float>()[i] = static_cast<float>(i % 256) / 77.0f - static_cast<float>(i / 256);
  }
  const VisualPatches floats{patch_values(bytes), bytes.grids};
  EXPECT_EQ(tower.encode({&bytes, &floats}), tower.encode({&floats, &bytes}));
  EXPECT_EQ(tower.encode({&bytes}), tower.encode({&floats}));
}

TEST(ClipVit, WorkspacesAreBounded) {
  const ClipConfig config = small_config();
  const VisualPatches picture = cut(random_pixels(13));
  const std::vector<const VisualPatches*> batch(50, &picture);
  // Rows of a tile in f32: x, normed, and q, k and v, in whose place the narrower inside of the MLP
  // comes later. Before them its patches.
  const size_t tile = sizeof(float) * (10 * (5 * 24) + 9 * 48);
  const auto widest = [&](size_t bytes) {
    Tower tower(config, make_weights(config).map(), 1, bytes);
    int64_t rows = 0;
    tower.encode(batch, [&](std::string_view name, ConstTensorView view) {
      if (name == "vision.layer.0") rows = std::max(rows, view.shape()[0]);
    });
    return rows / 10;
  };
  EXPECT_EQ(widest(0), 1);
  EXPECT_EQ(widest(tile), 1);
  EXPECT_EQ(widest(7 * tile + 1), 7);
  EXPECT_EQ(widest(100 * tile), 50);
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
    tower.encode(random_pixels(16));
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("3 x 3 patches"), HasSubstr("1 slices of 4 x 4"),
                                    HasSubstr("preprocessor_config.json")));
  }
  VisualPatches narrow = cut(random_pixels(13));
  narrow.rows = Tensor(DType::kF32, {9, 47});
  EXPECT_THROW(tower.encode({&narrow}), Error);
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
  const size_t tables = 24 * 3 * 4 * 4 + 24 + 10 * 24;  // patches, class token, positions
  const size_t norms = 3 * 2 * 24;
  EXPECT_EQ((*Tower(config, make_weights(config).map())).weight_bytes(),
            4 * (matrices + biases + tables + norms));
}

}  // namespace
}  // namespace kvlm
