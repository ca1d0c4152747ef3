#include "tools/kv/value_survey.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::ElementsAre;

HeadRows rows(std::vector<float> keys, std::vector<float> values, std::vector<int16_t> tags) {
  HeadRows made;
  made.keys = std::move(keys);
  made.values = std::move(values);
  made.tags = std::move(tags);
  return made;
}

TEST(ValueCounts, FallIntoHalvesFromMinusTwenty) {
  ValueCounts counts;
  for (const float value : {-20.6f, -0.01f, 0.0f, 0.49f, 0.5f, 25.0f}) counts.add(value);
  EXPECT_EQ(counts.bins[0], 1);
  EXPECT_EQ(counts.bins[39], 1);
  EXPECT_EQ(counts.bins[40], 2);
  EXPECT_EQ(counts.bins[41], 1);
  EXPECT_EQ(counts.bins[79], 1);
  EXPECT_EQ(counts.count, 6);
  EXPECT_EQ(counts.low, -20.6f);
  EXPECT_EQ(counts.high, 25.0f);
}

/// Two rows of a picture and one of text, two channels. Codes of keys, by channel over the rows:
/// 0 1 3 and 0 2 3 (1.5 goes to even), then 3 2 0 and 0 2 3. Of values, by row: 0 3, 3 0 and 0 0
/// (an empty range), then 3 0, 3 0 and 0 3.
TEST(ValueSurvey, CodesOfNeighbouringLayersAreCompared) {
  ValueSurvey survey(2, 1, 2);
  const std::vector<int16_t> tags{0, 0, kTextRow};
  const HeadRows first = rows({0, 0, 1, 3, 3, 6}, {1, 2, 5, 4, 7, 7}, tags);
  const HeadRows second = rows({3, 0, 2, 3, 0, 6}, {2, 1, 9, 8, 1, 2}, tags);
  survey.add_layer(0, {&first, 1});
  survey.add_layer(1, {&second, 1});
  using enum ValueSurvey::Rows;
  EXPECT_THAT(survey.distances(0, KvSide::kKeys, kVisualRows), ElementsAre(2, 1, 0, 1));
  EXPECT_THAT(survey.distances(0, KvSide::kKeys, kTextRows), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(survey.distances(0, KvSide::kValues, kVisualRows), ElementsAre(2, 0, 0, 2));
  EXPECT_THAT(survey.distances(0, KvSide::kValues, kTextRows), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(survey.distances(1, KvSide::kKeys, kTextRows), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(survey.codes(0, KvSide::kKeys, kVisualRows), ElementsAre(2, 1, 1, 0));
  EXPECT_THAT(survey.codes(1, KvSide::kValues, kTextRows), ElementsAre(1, 0, 0, 1));
  EXPECT_EQ(survey.counts(0, KvSide::kKeys, kVisualRows, 0).count, 4);
  EXPECT_EQ(survey.counts(0, KvSide::kKeys, kVisualRows, 0).high, 3);
  EXPECT_EQ(survey.counts(1, KvSide::kValues, kTextRows, 0).low, 1);
  EXPECT_EQ(survey.counts(1, KvSide::kValues, kTextRows, 0).high, 2);
}

/// Mean magnitudes of four channels, of two KV heads: 2, 3, 4 and 21 of visual tokens.
TEST(ValueSurvey, TheLargestChannelIsComparedWithTheMedianOne) {
  ValueSurvey survey(1, 2, 2);
  const std::vector<int16_t> tags{0, 0, kTextRow};
  const HeadRows heads[] = {rows({1, 20, -3, -22, 0, 0}, std::vector<float>(6), tags),
                            rows({4, 3, 4, -3, 5, 0}, std::vector<float>(6), tags)};
  survey.add_layer(0, heads);
  EXPECT_DOUBLE_EQ(survey.outlier_ratio(0, KvSide::kKeys, ValueSurvey::kVisualRows), 7);
  EXPECT_DOUBLE_EQ(survey.outlier_ratio(0, KvSide::kKeys, ValueSurvey::kTextRows), 0);
  EXPECT_DOUBLE_EQ(survey.outlier_ratio(0, KvSide::kValues, ValueSurvey::kVisualRows), 0);
}

/// KIVI's groups: 33 rows of keys are a block of 32 and one of a row, whose range is empty.
TEST(ValueSurvey, KeysHaveBlocksOf32Rows) {
  ValueSurvey survey(2, 1, 1);
  std::vector<float> ramp;
  for (int i = 0; i < 33; ++i) ramp.push_back(static_cast<float>(i));
  const std::vector<int16_t> tags(33, kTextRow);
  const HeadRows rising = rows(ramp, ramp, tags);
  const HeadRows flat = rows(std::vector<float>(33), std::vector<float>(33), tags);
  survey.add_layer(0, {&rising, 1});
  survey.add_layer(1, {&flat, 1});
  // 0 to 31 in steps of 31 / 3: code 0 up to 5, 1 up to 15, 2 up to 25; row 32 is code 0.
  EXPECT_THAT(survey.distances(0, KvSide::kKeys, ValueSurvey::kTextRows),
              ElementsAre(7, 10, 10, 6));
}

TEST(ValueSurvey, NeedsAShape) { EXPECT_THROW(ValueSurvey(0, 1, 8), Error); }

}  // namespace
}  // namespace kvlm
