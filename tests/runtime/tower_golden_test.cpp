// Towers of families whose rooms are still to come, tap by tap against transformers: weights and
// pixels are those of the family's golden folder.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/loading/weight_names.h"
#include "tests/runtime/golden.h"
#include "vision/intern_vit.h"
#include "vision/qwen_vit.h"
#include "vision/shuffle_projector.h"
#include "vision/siglip_vit.h"

namespace kvlm {
namespace {

constexpr int kPatch = 7;
constexpr const char* kPrefix = "model.vision_tower.";

struct TowerCase {
  std::string folder;
  std::function<std::unique_ptr<VisionEncoder>(WeightMap& weights, size_t workspace_bytes)> make;
};

std::vector<TowerCase> towers() {
  const auto intern = [](VitConfig::Norm norm, bool biases, bool norms) {
    return [=](WeightMap& weights, size_t workspace_bytes) {
      InternVitConfig config;
      config.hidden = 24;
      config.intermediate = 32;
      config.layers = 2;
      config.heads = 2;
      config.image_size = 28;
      config.patch_size = kPatch;
      config.norm = norm;
      config.qkv_bias = biases;
      config.qk_norm = norms;
      return make_intern_vit(config, weights, kPrefix, workspace_bytes);
    };
  };
  const auto siglip = [](WeightMap& weights, size_t workspace_bytes) {
    SiglipConfig config;
    config.hidden = 24;
    config.intermediate = 32;
    config.layers = 2;
    config.heads = 2;
    config.image_size = 30;
    config.patch_size = kPatch;
    return make_siglip_vit(config, weights, kPrefix, workspace_bytes);
  };
  return {{"internvl", intern(VitConfig::Norm::kLayer, true, false)},
          {"internvl_26b", intern(VitConfig::Norm::kRms, false, true)},
          {"llava_onevision", siglip}};
}

class TowerGolden : public testing::TestWithParam<TowerCase> {};

/// All tiles in one piece and tile by tile.
TEST_P(TowerGolden, EveryTapEqualsTheReference) {
  const std::filesystem::path folder = test::golden_root() / GetParam().folder;
  const test::GoldenTensors tensors(folder / "golden.safetensors");
  const std::string pixels = "case0.pixel_values.torchvision";
  const auto tiles = static_cast<size_t>(tensors.shape(pixels)[0]);
  const int grid = static_cast<int>(tensors.shape(pixels)[2]) / kPatch;
  std::vector<float> rows = test::patches_of_pixels(tensors, pixels, kPatch);
  VisualPatches picture{
      Tensor(DType::kF32, {std::ssize(rows) / (3 * kPatch * kPatch), 3 * kPatch * kPatch}),
      std::vector<PatchGrid>(tiles, {1, grid, grid})};
  std::copy(rows.begin(), rows.end(), picture.rows.as<float>());

  for (const size_t workspace_bytes : {size_t{0}, size_t{1} << 30}) {
    Checkpoint checkpoint(folder);
    WeightMap weights = checkpoint.take_weights();
    weights.rename(&canonical_llava_name);
    ThreadPool pool(2);
    Stream stream(pool);
    const auto tower = GetParam().make(weights, workspace_bytes);
    for (const std::string& left : weights.remaining()) {
      EXPECT_FALSE(left.starts_with(kPrefix)) << left << " was not taken";
    }
    std::map<std::string, std::vector<float>> taps;
    const VisualPatches* pictures[] = {&picture};
    const Tensor features =
        tower->encode(pictures, stream, [&](std::string_view name, ConstTensorView view) {
          std::vector<float>& all = taps[std::string(name)];
          all.insert(all.end(), view.as<float>(), view.as<float>() + view.elements());
        });
    taps["vision.selected"] = {features.as<float>(),
                               features.as<float>() + features.shape().elements()};
    for (const char* tap : {"vision.patch_embed", "vision.embeddings", "vision.layer.0",
                            "vision.layer.1", "vision.selected"}) {
      const std::vector<float> expected = tensors.floats(std::string("case0.") + tap);
      const std::vector<float>& ours = taps[tap];
      ASSERT_EQ(ours.size(), expected.size()) << tap;
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(ours[i], expected[i], 5e-5f * std::max(1.0f, std::abs(expected[i])))
            << "first tap that differs: " << tap << ", element " << i;
      }
    }
  }
}

/// Tiles of the reference's tower through our projector.
TEST(ShuffleProjector, EqualsTheReference) {
  for (const char* name : {"internvl", "internvl_26b"}) {
    const std::filesystem::path folder = test::golden_root() / name;
    const test::GoldenTensors tensors(folder / "golden.safetensors");
    Checkpoint checkpoint(folder);
    WeightMap weights = checkpoint.take_weights();
    weights.rename(&canonical_llava_name);
    const std::string prefix = "model.multi_modal_projector.";
    ShuffleProjector projector(24, 48, 2, /*columns_first=*/false, weights, prefix);
    for (const std::string& left : weights.remaining()) {
      EXPECT_FALSE(left.starts_with(prefix)) << left << " was not taken";
    }
    const std::vector<int64_t> shape = tensors.shape("case0.vision.selected");
    std::vector<float> selected = tensors.floats("case0.vision.selected");
    const std::vector<PatchGrid> grids(static_cast<size_t>(shape[0]), {1, 4, 4});
    ThreadPool pool(1);
    Stream stream(pool);
    const Tensor out = projector.project(
        TensorView(selected.data(), DType::kF32, {shape[0] * shape[1], shape[2]}), grids, stream);
    const std::vector<float> expected = tensors.floats("case0.projector_out");
    ASSERT_EQ(out.shape().elements(), std::ssize(expected));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(out.as<float>()[i], expected[i], 1e-4f * std::max(1.0f, std::abs(expected[i])))
          << name << ", element " << i;
    }
  }
}

struct QwenCase {
  std::string folder;
  std::string prefix;
  QwenVitConfig config;
  std::string pictures;  ///< the case with two pictures of different size
};

std::vector<QwenCase> qwen_towers() {
  QwenVitConfig small;
  small.hidden = 24;
  small.layers = 2;
  small.heads = 2;
  small.patch_size = 4;
  small.out = 48;
  QwenCase qwen2{"qwen2_vl", "visual.", small, "case1"};
  qwen2.config.intermediate = 48;
  QwenCase qwen25{"qwen2_5_vl", "visual.", small, "case2"};
  qwen25.config.intermediate = 32;
  qwen25.config.layers = 3;
  qwen25.config.activation = Activation::kSilu;
  qwen25.config.rms_norm = qwen25.config.gated_mlp = true;
  qwen25.config.window = 2;
  qwen25.config.full_attention = {1};
  QwenCase qwen3{"qwen3_vl", "model.visual.", small, "case2"};
  qwen3.config.intermediate = 32;
  qwen3.config.layers = 4;
  qwen3.config.activation = Activation::kGeluTanh;
  qwen3.config.patch_bias = qwen3.config.linear_names = true;
  qwen3.config.position_side = 6;
  qwen3.config.deepstack = {0, 2};
  return {qwen2, qwen25, qwen3};
}

void expect_near(std::span<const float> ours, const std::vector<float>& expected, float gate,
                 const std::string& what) {
  ASSERT_EQ(ours.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(ours[i], expected[i], gate * std::max(1.0f, std::abs(expected[i])))
        << "first that differs: " << what << ", element " << i;
  }
}

std::span<const float> values(const Tensor& tensor) {
  return {tensor.as<float>(), static_cast<size_t>(tensor.shape().elements())};
}

class QwenTower : public testing::TestWithParam<QwenCase> {
 protected:
  std::unique_ptr<QwenVit> tower(size_t workspace_bytes) {
    Checkpoint checkpoint(folder_);
    WeightMap weights = checkpoint.take_weights();
    auto made =
        std::make_unique<QwenVit>(GetParam().config, weights, GetParam().prefix, workspace_bytes);
    for (const std::string& left : weights.remaining()) {
      EXPECT_FALSE(left.starts_with(GetParam().prefix)) << left << " was not taken";
    }
    return made;
  }
  /// Pictures or a clip of a case, from normalised rows that lie one after the other.
  std::vector<VisualPatches> pictures(const std::string& grid_name,
                                      const std::vector<float>& rows) {
    const std::vector<int64_t> grids = tensors_.integers(grid_name);
    std::vector<VisualPatches> made;
    auto from = rows.begin();
    for (size_t i = 0; i + 2 < grids.size(); i += 3) {
      const PatchGrid grid{static_cast<int>(grids[i]), static_cast<int>(grids[i + 1]),
                           static_cast<int>(grids[i + 2])};
      made.push_back({Tensor(DType::kF32, {grid.patches(), kColumns}), {grid}});
      const auto count = static_cast<std::ptrdiff_t>(grid.patches() * kColumns);
      std::copy(from, from + count, made.back().rows.as<float>());
      from += count;
    }
    EXPECT_TRUE(from == rows.end());
    return made;
  }
  /// Bytes of patches as the family's image processor normalises them.
  std::vector<float> normalised(const std::string& name) {
    const bool half = GetParam().folder == "qwen3_vl";
    const double mean[] = {0.48145466, 0.4578275, 0.40821073};
    const double deviation[] = {0.26862954, 0.26130258, 0.27577711};
    std::vector<float> rows;
    for (const uint8_t byte : tensors_.bytes(name)) {
      const size_t channel = rows.size() % kColumns / (kColumns / 3);
      rows.push_back(static_cast<float>((byte / 255.0 - (half ? 0.5 : mean[channel])) /
                                        (half ? 0.5 : deviation[channel])));
    }
    return rows;
  }

  static constexpr int64_t kColumns = 96;
  const std::filesystem::path folder_ = test::golden_root() / GetParam().folder;
  test::GoldenTensors tensors_{folder_ / "golden.safetensors"};
  ThreadPool pool_{2};
  Stream stream_{pool_};
};

TEST_P(QwenTower, EveryTapEqualsTheReference) {
  const auto made =
      pictures("case0.image_grid_thw", tensors_.floats("case0.pixel_values.torchvision"));
  std::map<std::string, std::vector<float>> taps;
  const VisualPatches* picture[] = {&made[0]};
  const QwenFeatures features =
      tower(0)->encode(picture, stream_, [&](std::string_view name, ConstTensorView view) {
        taps[std::string(name)].assign(view.as<float>(), view.as<float>() + view.elements());
      });
  std::vector<std::string> names = {"vision.patch_embed"};
  for (int i = 0; i < GetParam().config.layers; ++i) {
    names.push_back("vision.layer." + std::to_string(i));
  }
  names.emplace_back("vision.selected");
  for (const std::string& name : names) {
    expect_near(taps[name], tensors_.floats("case0." + name), 5e-5f, name);
  }
  expect_near(values(features.rows), tensors_.floats("case0.projector_out"), 1e-4f,
              "projector_out");
  for (size_t i = 0; i < features.deepstack.size(); ++i) {
    const std::string name = "deepstack." + std::to_string(i);
    expect_near(values(features.deepstack[i]), tensors_.floats("case0." + name), 1e-4f, name);
  }
}

/// Pictures of different sizes, one by one and together, and a clip.
TEST_P(QwenTower, PicturesAndFramesEqualTheReference) {
  const std::string video = GetParam().folder == "qwen2_vl" ? "case2" : "case3";
  const std::string two = GetParam().pictures;
  const std::pair<std::vector<VisualPatches>, std::string> inputs[] = {
      {pictures(two + ".image_grid_thw", normalised(two + ".patches_u8.torchvision")), two},
      {pictures(video + ".video_grid_thw", normalised(video + ".video.patches_u8.torchvision")),
       video + ".video"}};
  for (const auto& [made, name] : inputs) {
    std::vector<const VisualPatches*> batch;
    for (const VisualPatches& picture : made) batch.push_back(&picture);
    for (const size_t workspace_bytes : {size_t{0}, size_t{1} << 30}) {
      const QwenFeatures features = tower(workspace_bytes)->encode(batch, stream_, {});
      expect_near(values(features.rows), tensors_.floats(name + ".projector_out"), 1e-4f, name);
      for (size_t i = 0; i < features.deepstack.size(); ++i) {
        const std::string deep = name + ".deepstack." + std::to_string(i);
        expect_near(values(features.deepstack[i]), tensors_.floats(deep), 1e-4f, deep);
      }
    }
  }
}

TEST_P(QwenTower, RefusesPatchesThatItDoesNotTake) {
  const auto made = tower(0);
  const auto refused = [&](const PatchGrid& grid, const Shape& rows) {
    const VisualPatches picture{Tensor(DType::kF32, rows), {grid}};
    const VisualPatches* batch[] = {&picture};
    EXPECT_THROW(made->encode(batch, stream_, {}), Error);
  };
  refused({1, 3, 4}, {12, kColumns});  // no whole cells
  refused({1, 4, 4}, {12, kColumns});
  refused({1, 4, 4}, {16, kColumns - 1});
}

INSTANTIATE_TEST_SUITE_P(, QwenTower, testing::ValuesIn(qwen_towers()),
                         [](const auto& test) { return test.param.folder; });

INSTANTIATE_TEST_SUITE_P(, TowerGolden, testing::ValuesIn(towers()),
                         [](const auto& test) { return test.param.folder; });

}  // namespace
}  // namespace kvlm
