#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;

std::vector<int> budgets(int layers, int n, Options options, const std::vector<int>& pairs = {}) {
  const auto rule = make_rule(retention::pyramidkv, std::move(options));
  return kept(testing::select(*rule, random_prompt(layers, 1, n, 1), pairs));
}

TEST(PyramidKv, EqualsTheWorkedBudgets) {
  EXPECT_THAT(budgets(4, 4096, {{"keep", "0.5"}}), ElementsAre(3994, 2697, 1399, 102));
  EXPECT_THAT(budgets(5, 4000, {{"keep", "0.5"}}), ElementsAre(3900, 2950, 2000, 1050, 100));
  EXPECT_THAT(budgets(4, 1000, {{"keep", "0.5"}}), ElementsAre(936, 645, 355, 64));
  EXPECT_THAT(budgets(4, 1000, {{"keep", "0.2"}}), ElementsAre(200, 200, 200, 200));
  const std::vector<int> deep = budgets(32, 10000, {{"keep", "0.5"}});
  EXPECT_EQ(deep.front(), 9750);
  EXPECT_EQ(deep.back(), 250);
  EXPECT_EQ(std::accumulate(deep.begin(), deep.end(), 0), 160000);
}

TEST(PyramidKv, KeepsTheLineBelowTheWindowIfAsked) {
  // c = 200, 10 in the last layer and 390 in the first.
  const Options options = {{"keep", "0.2"}, {"no_floor", "on"}};
  EXPECT_THAT(budgets(4, 1000, options), ElementsAre(390, 263, 137, 10));
  // A window that is truncated keeps its newest rows.
  const auto rule = make_rule(retention::pyramidkv, options);
  const auto last = testing::select(*rule, random_prompt(4, 1, 1000, 1))[3].slots.at(0);
  EXPECT_THAT(last, ElementsAre(990, 991, 992, 993, 994, 995, 996, 997, 998, 999));
}

TEST(PyramidKv, RaisesEqualBudgetsToTheWindow) {
  EXPECT_THAT(budgets(4, 100, {{"keep", "0.3"}}), Each(64));
  EXPECT_THAT(budgets(4, 30, {{"keep", "0.3"}}), Each(30));
  EXPECT_THAT(budgets(1, 4096, {{"keep", "0.5"}}), ElementsAre(2048));
}

TEST(PyramidKv, GivesAPairTheMeanOfItsBudgets) {
  EXPECT_THAT(budgets(5, 4000, {{"keep", "0.5"}, {"head_shared", "on"}}, {0, 1, 1, 3, 3}),
              ElementsAre(3900, 2475, 2475, 575, 575));
}

TEST(PyramidKv, ForgetsWhatItsBudgetSays) {
  const auto rule = make_rule(retention::pyramidkv, {{"keep", "0.5"}, {"evict", "sliding"}});
  const auto selections = testing::select(*rule, random_prompt(4, 1, 1000, 1));
  EXPECT_DOUBLE_EQ(selections[0].forget, 1 - 936 / 1000.0);
  EXPECT_DOUBLE_EQ(selections[3].forget, 1 - 64 / 1000.0);
}

}  // namespace
}  // namespace kvlm
