#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

/// What a selection makes of rows 1, 2, .. of one channel.
std::vector<float> merged(const Retention& rule, const LayerSelection& selection, int rows) {
  std::vector<float> x(static_cast<size_t>(rows));
  std::iota(x.begin(), x.end(), 1.0f);
  std::vector<float> keys(selection.slots[0].size());
  std::vector<float> values(selection.slots[0].size());
  ThreadPool pool(1);
  Stream stream(pool);
  merge_rows(rule.merge(),
             {x.data(), x.data(), rows, 1, selection.slots[0], keys.data(), values.data(),
              selection.lone_first, selection.lone_last},
             stream);
  EXPECT_EQ(keys, values);
  return keys;
}

/// Anchors are the most attended rows, and every row is averaged into the nearest: an example of
/// docs/formulas.md, "Worked examples", with importance that makes rows 0, 2 and 5 the anchors.
TEST(Elastic, AveragesRowsIntoTheNearestAnchor) {
  const auto rule = make_rule(retention::elastic, {{"keep", "0.5"}, {"sinks", "1"}, {"last", "1"}});
  const auto selection = testing::select(*rule, prompt_of({{3, 1, 5, 2, 0, 1}}))[0];
  ASSERT_THAT(selection.slots, ElementsAre(ElementsAre(0, 2, 5)));
  EXPECT_THAT(merged(*rule, selection, 6), ElementsAre(1.5f, 3.5f, 5.5f));
}

/// The published code's first and last row are no anchors: rows 1, 3 and 4 join row 2.
TEST(Elastic, LeavesTheEndsAloneAsPublished) {
  for (const char* profile : {"official", "paper"}) {
    const auto rule = make_rule(retention::elastic, {{"keep", "0.5"}, {"profile", profile}});
    const auto selection = testing::select(*rule, prompt_of({{3, 4, 5, 2, 0, 1}}))[0];
    ASSERT_THAT(selection.slots, ElementsAre(ElementsAre(0, 2, 5)));
    EXPECT_EQ(selection.lone_first, 1);
    EXPECT_EQ(selection.lone_last, 1);
    EXPECT_THAT(merged(*rule, selection, 6), ElementsAre(1, 3.5f, 6));
  }
}

/// Five rows stay: two sinks, the last two, one between. Rows 2, 3, 5, 6 and 7 join row 4.
TEST(Elastic, LeavesAsManyRowsAloneAsItProtects) {
  const auto rule = make_rule(
      retention::elastic,
      {{"keep", "0.5"}, {"anchors", "inner"}, {"sinks", "2"}, {"last", "9"}, {"score", "sums"}});
  const auto selection = testing::select(*rule, prompt_of({{0, 0, 1, 1, 7, 1, 1, 1, 0, 0}}))[0];
  ASSERT_THAT(selection.slots, ElementsAre(ElementsAre(0, 1, 4, 8, 9)));
  EXPECT_THAT(merged(*rule, selection, 10), ElementsAre(1, 2, 5.5f, 9, 10));
}

TEST(Elastic, EvictsAtAFixedIndexAsPublished) {
  for (const char* profile : {"official", "paper"}) {
    const auto rule = make_rule(retention::elastic, {{"profile", profile}});
    EXPECT_THAT(first_removals(DecodingLayer(*rule, 100, 50, .5), 3),
                ElementsAre(std::pair(2, 25), std::pair(4, 26), std::pair(6, 27)));
  }
}

}  // namespace
}  // namespace kvlm
