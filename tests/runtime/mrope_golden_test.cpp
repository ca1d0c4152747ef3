// Positions of three axes of whole prompts against transformers: the Qwen-VL golden folders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "llm/mrope_positions.h"
#include "tests/runtime/golden.h"

namespace kvlm {
namespace {

constexpr int kMerge = 2;

struct Family {
  std::string folder;
  double tokens_per_second;  ///< 0: a slice is one position
  bool frames_apart;         ///< every slice is a run of its own, with text between
};

class MropeGolden : public testing::TestWithParam<Family> {};

TEST_P(MropeGolden, PositionsEqualTheReference) {
  const Family& family = GetParam();
  const test::GoldenTensors tensors(test::golden_root() / family.folder / "golden.safetensors");
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : tensors.entries()) names.insert(entry.name);
  int compared = 0;
  for (int number = 0; names.contains("case" + std::to_string(number) + ".input_ids"); ++number) {
    const std::string name = "case" + std::to_string(number) + ".";
    if (!names.contains(name + "position_ids")) continue;
    const auto grids_of = [&](const std::string& kind) {
      const std::string grid = name + kind + "_grid_thw";
      return names.contains(grid) ? tensors.integers(grid) : std::vector<int64_t>();
    };
    // What the runs of tokens of the same type are (0 text, 1 pictures, 2 clips).
    std::vector<PositionSpan> visual[3];
    for (const int type : {1, 2}) {
      const std::vector<int64_t> grids = grids_of(type == 1 ? "image" : "video");
      for (size_t i = 0; i < grids.size(); i += 3) {
        const auto slices = static_cast<int>(grids[i]);
        const int height = static_cast<int>(grids[i + 1]) / kMerge;
        const int width = static_cast<int>(grids[i + 2]) / kMerge;
        const double seconds = names.contains(name + "second_per_grid_ts")
                                   ? tensors.floats(name + "second_per_grid_ts")[i / 3]
                                   : 1.0;
        if (family.frames_apart) {
          for (int slice = 0; slice < slices; ++slice)
            visual[type].push_back({0, {0}, height, width});
        } else {
          visual[type].push_back(
              {0,
               clip_times(
                   slices,
                   family.tokens_per_second > 0 && type == 2 ? family.tokens_per_second : 1.0,
                   family.tokens_per_second > 0 && type == 2 ? seconds : 1.0),
               height, width});
        }
      }
    }
    std::vector<PositionSpan> spans;
    const std::vector<int64_t> types = tensors.integers(name + "mm_token_type_ids");
    size_t next[3] = {};
    for (size_t row = 0; row < types.size();) {
      size_t end = row;
      while (end < types.size() && types[end] == types[row]) ++end;
      const auto type = static_cast<size_t>(types[row]);
      if (type == 0) {
        spans.push_back({static_cast<int64_t>(end - row), {}, 0, 0});
      } else {
        ASSERT_LT(next[type], visual[type].size()) << name;
        spans.push_back(visual[type][next[type]++]);
      }
      row = end;
    }
    const PromptPositions found = mrope_positions(spans, MropeRule::kTransformers5);
    const std::vector<int64_t> expected = tensors.integers(name + "position_ids");
    ASSERT_EQ(found.rows.size() * 3, expected.size()) << name;
    for (size_t row = 0; row < found.rows.size(); ++row) {
      EXPECT_EQ(found.rows[row].time, expected[row]) << name << row;
      EXPECT_EQ(found.rows[row].height, expected[found.rows.size() + row]) << name << row;
      EXPECT_EQ(found.rows[row].width, expected[2 * found.rows.size() + row]) << name << row;
    }
    if (names.contains(name + "rope_delta")) {
      EXPECT_EQ(found.next - std::ssize(found.rows), tensors.integers(name + "rope_delta")[0])
          << name;
    }
    ++compared;
  }
  EXPECT_GE(compared, 4);
}

INSTANTIATE_TEST_SUITE_P(, MropeGolden,
                         testing::Values(Family{"qwen2_vl", 0, false},
                                         Family{"qwen2_5_vl", 2, false},
                                         Family{"qwen3_vl", 0, true}),
                         [](const auto& test) { return test.param.folder; });

}  // namespace
}  // namespace kvlm
