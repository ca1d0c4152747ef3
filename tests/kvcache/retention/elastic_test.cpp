#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

/// Anchors are the most attended rows, and every row is averaged into the nearest: an example of
/// docs/arithmetic.md, "Worked examples", with importance that makes rows 0, 2 and 5 the anchors.
TEST(Elastic, AveragesRowsIntoTheNearestAnchor) {
  const auto rule = make_rule(retention::elastic, {{"keep", "0.5"}, {"sinks", "1"}, {"last", "1"}});
  const auto selection = testing::select(*rule, prompt_of({{3, 1, 5, 2, 0, 1}}))[0];
  ASSERT_THAT(selection.slots, ElementsAre(ElementsAre(0, 2, 5)));
  const std::vector<float> keys{1, 2, 3, 4, 5, 6};
  const std::vector<float> values{10, 20, 30, 40, 50, 60};
  std::vector<float> merged_keys(3);
  std::vector<float> merged_values(3);
  ThreadPool pool(1);
  Stream stream(pool);
  merge_rows(rule->merge(),
             {keys.data(), values.data(), 6, 1, selection.slots[0], merged_keys.data(),
              merged_values.data()},
             stream);
  EXPECT_THAT(merged_keys, ElementsAre(1.5f, 3.5f, 5.5f));
  EXPECT_THAT(merged_values, ElementsAre(15, 35, 55));
}

TEST(Elastic, EvictsAtAFixedIndexAsPublished) {
  const auto rule = make_rule(retention::elastic, {{"profile", "official"}});
  EXPECT_THAT(first_removals(DecodingLayer(*rule, 100, 50, .5), 3),
              ElementsAre(std::pair(2, 25), std::pair(4, 26), std::pair(6, 27)));
}

}  // namespace
}  // namespace kvlm
