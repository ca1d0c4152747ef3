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

/// The gates of models.md 12.4, all tiles in one piece and tile by tile.
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
    const ShuffleProjector projector(24, 48, 2, /*columns_first=*/false, weights, prefix);
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

INSTANTIATE_TEST_SUITE_P(, TowerGolden, testing::ValuesIn(towers()),
                         [](const auto& test) { return test.param.folder; });

}  // namespace
}  // namespace kvlm
