#include "llm/mrope_positions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvlm {
namespace {

using testing::ElementsAre;

std::vector<int32_t> axis(const PromptPositions& positions, int32_t Position::*axis) {
  std::vector<int32_t> values;
  for (const Position& position : positions.rows) values.push_back(position.*axis);
  return values;
}

int32_t delta(const PromptPositions& positions) {
  return positions.next - static_cast<int32_t>(positions.rows.size());
}

/// Worked by hand: text 3, picture of 4 x 6 patches, text 2.
TEST(MropePositions, OfAPictureBetweenTexts) {
  const PositionSpan spans[] = {{3, {}, 0, 0}, {0, {0}, 2, 3}, {2, {}, 0, 0}};
  for (const MropeRule rule : {MropeRule::kTrained, MropeRule::kTransformers5}) {
    const PromptPositions found = mrope_positions(spans, rule);
    EXPECT_THAT(axis(found, &Position::time), ElementsAre(0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7));
    EXPECT_THAT(axis(found, &Position::height), ElementsAre(0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7));
    EXPECT_THAT(axis(found, &Position::width), ElementsAre(0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7));
    EXPECT_EQ(delta(found), -3);
  }
}

/// The same: text 2, clip of 3 slices of 4 x 4 patches, text 2.
TEST(MropePositions, OfAClipBetweenTexts) {
  struct Expected {
    std::vector<int32_t> times;
    MropeRule rule;
    std::vector<int32_t> time_axis;
    int32_t delta;
  };
  const Expected cases[] = {
      {{0, 2, 4}, MropeRule::kTransformers5, {0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 4, 5}, -10},
      {{0, 2, 4}, MropeRule::kTrained, {0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8}, -7},
      {{0, 0, 0}, MropeRule::kTransformers5, {0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 5}, -10},
      {{0, 0, 0}, MropeRule::kTrained, {0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 5}, -10},
      {{0, 1, 2}, MropeRule::kTransformers5, {0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5}, -10},
      {{0, 1, 2}, MropeRule::kTrained, {0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 6}, -9},
  };
  for (const Expected& expected : cases) {
    const PositionSpan spans[] = {{2, {}, 0, 0}, {0, expected.times, 2, 2}, {2, {}, 0, 0}};
    const PromptPositions found = mrope_positions(spans, expected.rule);
    EXPECT_EQ(axis(found, &Position::time), expected.time_axis);
    EXPECT_EQ(delta(found), expected.delta);
    const std::vector<int32_t> heights = axis(found, &Position::height);
    const std::vector<int32_t> widths = axis(found, &Position::width);
    for (size_t slice = 0; slice < 3; ++slice) {
      const auto at = static_cast<std::ptrdiff_t>(2 + 4 * slice);
      EXPECT_THAT(std::vector<int32_t>(heights.begin() + at, heights.begin() + at + 4),
                  ElementsAre(2, 2, 3, 3));
      EXPECT_THAT(std::vector<int32_t>(widths.begin() + at, widths.begin() + at + 4),
                  ElementsAre(2, 3, 2, 3));
    }
  }
}

/// Worked by hand: text 1, video of 5 slices of 1 x 2 cells, text 1, image of 2 x 2 cells, text 1.
TEST(MropePositions, OfTextAndAnImageAfterAVideoLongerThanWide) {
  const PositionSpan spans[] = {
      {1, {}, 0, 0}, {0, {0, 1, 2, 3, 4}, 1, 2}, {1, {}, 0, 0}, {0, {0}, 2, 2}, {1, {}, 0, 0}};
  const PromptPositions trained = mrope_positions(spans, MropeRule::kTrained);
  EXPECT_THAT(axis(trained, &Position::time),
              ElementsAre(0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 7, 7, 9));
  EXPECT_THAT(axis(trained, &Position::height),
              ElementsAre(0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6, 7, 7, 8, 8, 9));
  EXPECT_THAT(axis(trained, &Position::width),
              ElementsAre(0, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 6, 7, 8, 7, 8, 9));
  EXPECT_EQ(trained.next, 10);
  const PromptPositions reference = mrope_positions(spans, MropeRule::kTransformers5);
  EXPECT_THAT(axis(reference, &Position::time),
              ElementsAre(0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 3, 4, 4, 4, 4, 6));
  EXPECT_EQ(reference.next, 7);
}

TEST(MropePositions, OfTextAndOfNothing) {
  const PositionSpan text[] = {{3, {}, 0, 0}, {2, {}, 0, 0}};
  EXPECT_EQ(mrope_positions(text, MropeRule::kTransformers5).rows, following_positions(0, 5));
  EXPECT_EQ(mrope_positions(text, MropeRule::kTransformers5).next, 5);
  EXPECT_TRUE(mrope_positions({}, MropeRule::kTransformers5).rows.empty());
  EXPECT_EQ(mrope_positions({}, MropeRule::kTransformers5).next, 0);
}

TEST(ClipTimes, RoundEverySliceDown) {
  EXPECT_THAT(clip_times(3, 2, 1), ElementsAre(0, 2, 4));
  EXPECT_THAT(clip_times(3, 2, 0.8), ElementsAre(0, 1, 3));
  EXPECT_THAT(clip_times(4, 2, 0.5), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(clip_times(0, 2, 0.5), ElementsAre());
  // Pairs of 4 of 105 frames at 5 a second and of 12 of 33 at 5: in double, 20 and 10.
  EXPECT_THAT(clip_times(2, 2, 2 / (4 / 105.0 * 5)), ElementsAre(0, 21));
  EXPECT_THAT(clip_times(6, 2, 2 / (12 / 33.0 * 5)), ElementsAre(0, 2, 4, 6, 8, 11));
}

}  // namespace
}  // namespace kvlm
