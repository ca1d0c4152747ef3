#include "vision/frame_sampling.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tests/vision/test_videos.h"

namespace kvlm {
namespace {

using test::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

VideoInfo clip(int64_t frames, double fps) {
  return {.name = "clip.mp4",
          .format = "matroska",
          .frames = frames,
          .height = 2,
          .width = 3,
          .fps = fps};
}

using Rule = std::vector<int64_t> (*)(const VideoInfo&, const SamplingRequest&);

std::vector<int64_t> qwen2(const VideoInfo& info, const SamplingRequest& request) {
  return sample_frames_qwen2_vl(info, request, {});
}

std::vector<int64_t> qwen3(const VideoInfo& info, const SamplingRequest& request) {
  return sample_frames_qwen3_vl(info, request, {});
}

const std::map<std::string, Rule>& rules() {
  static const std::map<std::string, Rule> all = {{"default", sample_frames},
                                                  {"internvl", sample_frames_internvl},
                                                  {"original", sample_frames_internvl_original},
                                                  {"qwen2_vl", qwen2},
                                                  {"qwen3_vl", qwen3}};
  return all;
}

std::vector<std::string> golden_lines() {
  std::vector<std::string> lines;
  std::ifstream in(test::video_data() / "sampling.txt");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with('#')) lines.push_back(line);
  }
  EXPECT_GT(lines.size(), 100u);
  return lines;
}

TEST(FrameSampling, EqualsTransformers) {
  for (const std::string& line : golden_lines()) {
    SCOPED_TRACE(line);
    std::istringstream in(line);
    std::string rule;
    std::string colon;
    int64_t total = 0;
    double fps = 0;
    int64_t frames = 0;
    double wanted = 0;
    in >> rule >> total >> fps;
    if (rule == "times") continue;
    in >> frames >> wanted >> colon;
    SamplingRequest request;
    if (frames > 0) request.frames = frames;
    if (wanted > 0) request.fps = wanted;
    const auto sample = [&] { return rules().at(rule)(clip(total, fps), request); };
    if (line.ends_with("refused")) {
      if (frames > 1) continue;  // more than there are: RepeatFramesOfAShortVideo
      EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, sample), StartsWith("video clip.mp4 "));
      continue;
    }
    std::vector<int64_t> expected;
    for (int64_t number = 0; in >> number;) expected.push_back(number);
    EXPECT_EQ(sample(), expected);
  }
}

TEST(FrameSampling, TimesEqualTransformers) {
  int cases = 0;
  for (const std::string& line : golden_lines()) {
    std::istringstream in(line);
    std::string rule;
    std::string word;
    int64_t total = 0;
    double fps = 0;
    in >> rule >> total >> fps >> word;
    if (rule != "times") continue;
    std::vector<int64_t> frames;
    while (in >> word && word != ":") frames.push_back(std::stoll(word));
    std::vector<std::string> expected;
    while (in >> word) {
      word[word.find('_')] = ' ';
      expected.push_back(word);
    }
    std::vector<std::string> texts;
    for (const double time_s : temporal_patch_times_s(clip(total, fps), frames, 2)) {
      texts.push_back(timestamp_text(time_s));
    }
    EXPECT_EQ(texts, expected) << line;
    ++cases;
  }
  EXPECT_EQ(cases, 4);
  const std::vector<int64_t> frames = {0, 12, 24};
  EXPECT_THAT(temporal_patch_times_s(clip(48, 0), frames, 2), ElementsAre(0.25, 1.0));  // at 24
}

TEST(FrameSampling, WithoutARequestAFamilyTakesAllOrItsOwn) {
  for (const auto& [name, rule] : rules()) {
    EXPECT_THAT(rule(clip(6, 0), {}), ElementsAre(0, 1, 2, 3, 4, 5)) << name;
  }
  EXPECT_THAT(sample_frames_qwen3_vl(clip(48, 12), {}, {.default_fps = 2}),
              ElementsAre(0, 7, 13, 20, 27, 34, 40, 47));
  EXPECT_THAT(sample_frames_qwen2_vl(clip(50, 10), {}, {.default_fps = 1}),
              ElementsAre(0, 12, 25, 37));
  EXPECT_THAT(qwen2(clip(1, 25), {.fps = 2, .frames = {}}), ElementsAre(0));
  EXPECT_EQ(sample_frames_qwen3_vl(clip(5000, 30), {}, {}).size(), 768u);
}

TEST(FrameSampling, BoundsAreTheProcessors) {
  const QwenSampling sampling{.min_frames = 6, .max_frames = 11, .temporal_patch_size = 3};
  const SamplingRequest slow{.fps = 0.001, .frames = {}};
  const SamplingRequest fast{.fps = 100, .frames = {}};
  EXPECT_EQ(sample_frames_qwen2_vl(clip(100, 25), slow, sampling).size(), 6u);
  EXPECT_EQ(sample_frames_qwen2_vl(clip(100, 25), fast, sampling).size(), 9u);
  EXPECT_EQ(sample_frames_qwen3_vl(clip(100, 25), slow, sampling).size(), 6u);
  EXPECT_EQ(sample_frames_qwen3_vl(clip(100, 25), fast, sampling).size(), 11u);
  const std::vector<int64_t> frames = {0, 3, 6, 9};
  EXPECT_THAT(temporal_patch_times_s(clip(100, 1), frames, 3), ElementsAre(3.0, 9.0));
}

TEST(FrameSampling, LongVideosStayInside) {
  for (const auto& [name, rule] : rules()) {
    for (const int64_t total : {int64_t{215999}, int64_t{1} << 22}) {
      const auto frames = rule(clip(total, 60), {.fps = {}, .frames = 766});
      EXPECT_EQ(frames.size(), 766u) << name;
      EXPECT_TRUE(std::ranges::is_sorted(frames)) << name;
      EXPECT_GE(frames.front(), 0) << name;
      EXPECT_LT(frames.back(), total) << name;
    }
  }
}

TEST(FrameSampling, RepeatFramesOfAShortVideo) {
  const SamplingRequest six{.fps = {}, .frames = 6};
  EXPECT_THAT(sample_frames(clip(4, 25), six), ElementsAre(0, 0, 1, 2, 2, 3));
  EXPECT_THAT(sample_frames_internvl(clip(4, 25), six), ElementsAre(0, 1, 1, 2, 3, 3));
  EXPECT_THAT(sample_frames_internvl_original(clip(4, 25), six), ElementsAre(0, 0, 1, 2, 2, 2));
  EXPECT_THAT(qwen2(clip(4, 25), six), ElementsAre(0, 0, 1, 2, 2, 3));
  EXPECT_THAT(qwen3(clip(4, 25), six), ElementsAre(0, 1, 1, 2, 2, 3));
  for (const auto& [name, rule] : rules()) {
    for (int64_t total = 1; total < 40; ++total) {
      SCOPED_TRACE(fmt::format("{} of {}", name, total));
      const auto frames = rule(clip(total, 0), {.fps = {}, .frames = 32});
      EXPECT_EQ(frames.size(), 32u);
      EXPECT_TRUE(std::ranges::is_sorted(frames));
      EXPECT_GE(frames.front(), 0);
      EXPECT_LT(frames.back(), total);
    }
  }
}

TEST(FrameSampling, RequestsThatMakeNoSense) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const auto& [name, rule] : rules()) {
    SCOPED_TRACE(name);
    const auto message = [&](const SamplingRequest& request, double fps = 25) {
      return error_of(ErrorCode::kInvalidArgument, [&] { rule(clip(8, fps), request); });
    };
    EXPECT_THAT(message({.fps = 2, .frames = 4}),
                AllOf(HasSubstr("2 frames a second"), HasSubstr("4 frames"), HasSubstr("one")));
    for (const double fps : {0.0, -1.0, kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_THAT(message({.fps = fps, .frames = {}}), HasSubstr("give a rate above 0"));
    }
    for (const int64_t frames : {int64_t{0}, int64_t{-3}, int64_t{1} << 40}) {
      EXPECT_THAT(message({.fps = {}, .frames = frames}),
                  HasSubstr("give a number from 1 to 32768"));
    }
    if (name == "qwen3_vl") continue;
    EXPECT_THAT(message({.fps = 2, .frames = {}}, 0),
                AllOf(HasSubstr("has no frame rate"), HasSubstr("a number of frames instead")));
  }
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] { sample_frames(clip(8, 25), {.fps = 30, .frames = {}}); }),
              HasSubstr("has 25 frames a second, fewer than the requested 30"));
  EXPECT_THAT(
      error_of(ErrorCode::kInvalidArgument, [] { qwen2(clip(8, 25), {.fps = {}, .frames = 1}); }),
      HasSubstr("takes them in groups of 2"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] { sample_frames_internvl(clip(8, 25), {.fps = 0.5, .frames = {}}); }),
              HasSubstr("has 8 frames at 25 a second, and at 0.5 none is sampled"));
}

TEST(FrameSampling, TheRateOfWhatWasTaken) {
  EXPECT_DOUBLE_EQ(sampled_fps(clip(100, 25), 8), 2.0);
  EXPECT_DOUBLE_EQ(sampled_fps(clip(100, 0), 8), 24.0);
}

}  // namespace
}  // namespace kvlm
