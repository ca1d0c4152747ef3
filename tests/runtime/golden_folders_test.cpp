// The golden folders of the families beside LLaVA-1.5 as data: what their manifests say is there.
// What a model computes from them is the business of its family's test.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/runtime/golden.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::GoldenTensors;

constexpr uintmax_t kFolderLimitBytes = 2u << 20;
constexpr uintmax_t kTotalLimitBytes = 9'000'000;

/// Folders whose manifest names a family.
std::vector<fs::path> family_folders() {
  std::vector<fs::path> folders = test::golden_folders();
  std::erase_if(folders, [](const fs::path& folder) {
    return !test::golden_manifest(folder).contains("family");
  });
  return folders;
}

uintmax_t size_of(const fs::path& folder) {
  uintmax_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) bytes += entry.file_size();
  }
  return bytes;
}

class GoldenFolder : public testing::TestWithParam<fs::path> {
 protected:
  const fs::path& folder() const { return GetParam(); }
  json manifest() const { return test::golden_manifest(folder()); }
  json cases() const { return manifest().at("cases"); }
  GoldenTensors tensors() const { return GoldenTensors(folder() / "golden.safetensors"); }
};

TEST_P(GoldenFolder, HoldsTheTensorsOfItsManifest) {
  std::map<std::string, json> found;
  const GoldenTensors file = tensors();
  for (const SafetensorsEntry& tensor : file.entries()) {
    found[tensor.name] = json::array({tensor.dtype, tensor.shape});
  }
  EXPECT_EQ(json(found), manifest().at("tensors"));
}

TEST_P(GoldenFolder, HoldsTheFilesOfACheckpoint) {
  for (const char* name : {"config.json", "generation_config.json", "preprocessor_config.json",
                           "model.safetensors", "tokenizer_config.json"}) {
    EXPECT_TRUE(fs::exists(folder() / name)) << name;
  }
  EXPECT_LT(size_of(folder()), kFolderLimitBytes);
}

TEST_P(GoldenFolder, PicturesAndFramesHaveTheSizesOfTheManifest) {
  const json all = cases();  // kept: a range does not extend the life of what it is a part of
  for (const json& entry : all) {
    const json& names = entry.at("images");
    ASSERT_EQ(names.size(), entry.at("image_sizes").size());
    for (size_t i = 0; i < names.size(); ++i) {
      const Image image = load_image(folder() / names[i].get<std::string>());
      EXPECT_EQ(json({image.height, image.width}), entry.at("image_sizes")[i]) << names[i];
    }
    for (const json& video : entry.at("videos")) {
      const fs::path frames = folder() / video.at("folder").get<std::string>();
      int count = 0;
      for (const auto& frame : fs::directory_iterator(frames)) {
        const Image image = load_image(frame.path());
        EXPECT_EQ(json({image.height, image.width}), video.at("size")) << frame.path();
        ++count;
      }
      EXPECT_EQ(count, video.at("frames").get<int>()) << frames;
      EXPECT_LT(video.at("taken").back().get<int>(), count);
    }
  }
}

/// Ids, positions and generated tokens fit together in every case.
TEST_P(GoldenFolder, CasesAreWhole) {
  const GoldenTensors file = tensors();
  std::set<std::string> kinds;
  const json all = cases();
  const bool qwen = manifest().at("family").get<std::string>().starts_with("qwen");
  for (const json& entry : all) {
    const std::string name = entry.at("name");
    SCOPED_TRACE(name);
    EXPECT_TRUE(kinds.insert(entry.at("kind")).second) << entry.at("kind");
    const std::vector<int64_t> ids = file.integers(name + ".input_ids");
    const auto rows = entry.at("prompt_tokens").get<int64_t>();
    EXPECT_EQ(std::ssize(ids), rows);
    const std::vector<int64_t> answer = file.integers(name + ".greedy_ids");
    const auto& ends = entry.at("eos_token_id");
    const bool ended = std::find(ends.begin(), ends.end(), json(answer.back())) != ends.end();
    EXPECT_EQ(ended, entry.at("stopped_by_eos").get<bool>());
    const auto most = entry.at("max_new_tokens").get<int64_t>();
    EXPECT_TRUE(ended || std::ssize(answer) == most) << std::ssize(answer);
    EXPECT_GT(entry.at("min_gap").get<double>(), 0.02);

    // The first step's logits name the first token, whatever a penalty made of them later.
    const std::vector<int64_t> shape = file.shape(name + ".greedy_logits");
    const std::vector<float> logits = file.floats(name + ".greedy_logits");
    const auto vocab = static_cast<std::ptrdiff_t>(shape.at(1));
    if (entry.at("repetition_penalty") == 1.0) {
      const auto best = std::max_element(logits.begin(), logits.begin() + vocab);
      EXPECT_EQ(best - logits.begin(), answer.front());
    }
    if (entry.contains("same_inputs_as")) continue;
    const std::vector<int64_t> positions = file.shape(name + ".position_ids");
    EXPECT_EQ(positions.at(1), rows);
    EXPECT_EQ(positions.at(0), qwen ? 3 : 1);
  }
  EXPECT_TRUE(kinds.contains("one_image"));
}

INSTANTIATE_TEST_SUITE_P(, GoldenFolder, testing::ValuesIn(family_folders()),
                         [](const auto& tested) { return tested.param.filename().string(); });

TEST(GoldenFolders, OfEveryFamilyAreHere) {
  std::map<std::string, int> found;
  uintmax_t bytes = 0;
  for (const fs::path& folder : family_folders()) {
    ++found[test::golden_manifest(folder).at("family")];
    bytes += size_of(folder);
  }
  const std::map<std::string, int> expected = {
      {"internvl", 5},   {"llava_interleave", 1}, {"llava_next", 2}, {"llava_onevision", 1},
      {"qwen2_5_vl", 1}, {"qwen2_vl", 2},         {"qwen3_vl", 1}};
  EXPECT_EQ(found, expected);
  EXPECT_LT(bytes, kTotalLimitBytes);
}

/// The same pictures, preprocessed by the original code and by the library, differ by a level.
TEST(GoldenFolders, OriginalInternVLSeesTheTilesOfTheLibrary) {
  const GoldenTensors library(test::golden_root() / "internvl" / "golden.safetensors");
  const GoldenTensors original(test::golden_root() / "internvl_original" / "golden.safetensors");
  EXPECT_EQ(library.integers("case0.num_patches"), original.integers("case0.num_patches"));
  EXPECT_EQ(library.integers("case0.num_patches"), (std::vector<int64_t>{3}));
}

}  // namespace
}  // namespace kvlm
