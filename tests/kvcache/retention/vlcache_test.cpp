#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;

TEST(VlCache, WatchesTheTextAfterThePictures) {
  const auto rule = make_rule(retention::vlcache, {});
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kPostVision);
  EXPECT_TRUE(rule->needs().sparsity);
  EXPECT_TRUE(rule->joint());
  EXPECT_FALSE(rule->per_head());
}

TEST(VlCache, GivesDenseLayersMore) {
  const auto rule = make_rule(retention::vlcache, {{"keep", "0.25"}});
  Prompt prompt = random_prompt(4, 2, 100, 1);
  prompt.sparsity = {.2, .6, .8, .4};  // dense .8, .4, .2, .6 of 2
  EXPECT_THAT(kept(testing::select(*rule, prompt)), ElementsAre(40, 20, 10, 30));
  // Sparse to the last entry everywhere: all alike.
  prompt.sparsity = {1, 1, 1, 1};
  EXPECT_THAT(kept(testing::select(*rule, prompt)), Each(25));
}

TEST(VlCache, MeetsTheTotalWhereBudgetsAreCut) {
  Prompt prompt = random_prompt(4, 1, 100, 2);
  prompt.sparsity = {0, .99, .99, .99};  // the first layer wants 1.94 of its rows
  for (const char* keep : {"0.1", "0.5", "0.7"}) {
    const auto rule = make_rule(retention::vlcache, {{"keep", keep}});
    const std::vector<int> rows = kept(testing::select(*rule, prompt));
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0), std::lround(std::stod(keep) * 400));
    EXPECT_LE(rows[0], 100);
    for (const int m : rows) EXPECT_GE(m, 1);
  }
}

TEST(VlCache, KeepsATenthRecentRows) {
  // Twenty rows of falling score, ten kept in each layer: one recent, nine best.
  std::vector<double> falling;
  for (int j = 0; j < 20; ++j) falling.push_back(20 - j);
  const Prompt prompt = prompt_of({falling, falling});
  const auto rows = [&](const char* recent) {
    const auto rule =
        make_rule(retention::vlcache, {{"recent", recent}, {"last", "1"}, {"sinks", "0"}});
    return testing::select(*rule, prompt)[0].slots.at(0);
  };
  EXPECT_THAT(rows("0.1"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 19));
  EXPECT_THAT(rows("0.11"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 18, 19));
  EXPECT_THAT(rows("0"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 19));
  EXPECT_THAT(rows("1"), ElementsAre(10, 11, 12, 13, 14, 15, 16, 17, 18, 19));
}

}  // namespace
}  // namespace kvlm
