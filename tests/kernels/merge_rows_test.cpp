#include "kernels/merge_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;

/// Rows in, merged rows out.
void merge(MergeRule rule, const std::vector<int32_t>& kept, int rows, int dim,
           std::vector<float>& keys, std::vector<float>& values, int lone_first = 0,
           int lone_last = 0) {
  ThreadPool pool(1);
  Stream stream(pool);
  std::vector<float> merged_keys(kept.size() * static_cast<size_t>(dim));
  std::vector<float> merged_values(merged_keys.size());
  merge_rows(rule,
             {keys.data(), values.data(), rows, dim, kept, merged_keys.data(), merged_values.data(),
              lone_first, lone_last},
             stream);
  keys = merged_keys;
  values = merged_values;
}

TEST(MergeRows, EqualsTheWorkedExample) {
  // Rows 0..5 of values 1..6, kept 0, 2 and 5: groups {0, 1}, {2, 3}, {5, 4}.
  std::vector<float> keys = {1, 2, 3, 4, 5, 6};
  std::vector<float> values = {10, 20, 30, 40, 50, 60};
  merge(MergeRule::kPosition, {0, 2, 5}, 6, 1, keys, values);
  EXPECT_THAT(keys, ElementsAre(1.5f, 3.5f, 5.5f));
  EXPECT_THAT(values, ElementsAre(15, 35, 55));
}

/// Rows 0 and 5 are alone, so that 1, 3 and 4 join row 2; with nothing between them none joins.
TEST(MergeRows, LeavesBothEndsAloneIfAsked) {
  std::vector<float> keys = {1, 2, 3, 4, 5, 6};
  std::vector<float> values = {10, 20, 30, 40, 50, 60};
  merge(MergeRule::kPosition, {0, 2, 5}, 6, 1, keys, values, 1, 1);
  EXPECT_THAT(keys, ElementsAre(1, 3.5f, 6));
  EXPECT_THAT(values, ElementsAre(10, 35, 60));
  keys = {1, 2, 3, 4, 5, 6};
  values = keys;
  merge(MergeRule::kPosition, {0, 1, 5}, 6, 1, keys, values, 2, 1);
  EXPECT_THAT(keys, ElementsAre(1, 2, 6));
  // Ends that do not begin or end with the rows: 0 and 1 join 3, 5 and 6 join 4.
  keys = {1, 2, 3, 4, 5, 6, 9};
  values = keys;
  merge(MergeRule::kPosition, {2, 3, 4, 5}, 7, 1, keys, values, 1, 1);
  EXPECT_THAT(keys, ElementsAre(3, 7 / 3.0f, 7, 6));
  EXPECT_THROW(merge(MergeRule::kPosition, {0, 1}, 2, 1, keys, values, 2, 1), Error);
  EXPECT_THROW(merge(MergeRule::kPosition, {0, 1}, 2, 1, keys, values, -1, 1), Error);
  EXPECT_THROW(merge(MergeRule::kFeature, {0, 1}, 2, 1, keys, values, 1, 0), Error);
}

TEST(MergeRows, JoinsRowsWhoseKeysAreAlike) {
  // Kept 0 points right, 3 up and is long. Row 1 points right, although its product with 3 is the
  // larger one; 2 points up, and 4, to the left, is nearest to up.
  std::vector<float> keys = {1, 0, 100, 3, -1, 8, 0, 50, -3, 1};
  std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  merge(MergeRule::kFeature, {0, 3}, 5, 2, keys, values);
  EXPECT_THAT(keys, ElementsAre(50.5f, 1.5f, -4 / 3.0f, 59 / 3.0f));
  EXPECT_THAT(values, ElementsAre(2, 3, 7, 8));  // values follow the keys
}

TEST(MergeRows, GivesTiesToTheEarlierRow) {
  std::vector<float> keys = {2, 4, 2};
  std::vector<float> values = {0, 6, 1};
  merge(MergeRule::kPosition, {0, 2}, 3, 1, keys, values);
  EXPECT_THAT(keys, ElementsAre(3, 2));
  EXPECT_THAT(values, ElementsAre(3, 1));
  keys = {2, 4, 2};
  values = {0, 6, 1};
  merge(MergeRule::kFeature, {0, 2}, 3, 1, keys, values);
  EXPECT_THAT(keys, ElementsAre(3, 2));
}

TEST(MergeRows, LeavesRowsAloneWhereNothingJoins) {
  const std::vector<float> rows = {.1f, .7f, -3, 1e-7f, 5, 6};
  for (const MergeRule rule : {MergeRule::kPosition, MergeRule::kFeature}) {
    std::vector<float> keys = rows;
    std::vector<float> values = rows;
    merge(rule, {0, 1, 2}, 3, 2, keys, values);
    EXPECT_EQ(keys, rows);
    EXPECT_EQ(values, rows);
  }
}

TEST(MergeRows, SurvivesKeysOfZeros) {
  std::vector<float> keys(8, 0.0f);
  std::vector<float> values = {1, 1, 2, 2, 3, 3, 4, 4};
  merge(MergeRule::kFeature, {1, 3}, 4, 2, keys, values);
  EXPECT_THAT(keys, ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(values, ElementsAre(2, 2, 4, 4));  // all cosines are 0: the earlier one
}

}  // namespace
}  // namespace kvlm
