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

/// Two of four rows, the last one among them: together heads look at row 2 most, apart at 0 and 1.
TEST(VlCache, HeadsChooseForThemselvesAsPublished) {
  Prompt prompt = prompt_of({{0, 0, 0, 0}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {0.6, 0,   0.3, 0.1,  //
                       0,   0.5, 0.4, 0.1};
  const auto slots = [&](const char* head_shared) {
    const auto rule =
        make_rule(retention::vlcache,
                  {{"head_shared", head_shared}, {"keep", "0.5"}, {"last", "1"}, {"sinks", "0"}});
    return testing::select(*rule, prompt)[0].slots;
  };
  EXPECT_THAT(slots("on"), ElementsAre(ElementsAre(2, 3)));
  EXPECT_THAT(slots("off"), ElementsAre(ElementsAre(0, 3), ElementsAre(1, 3)));
}

/// Algorithm 1 once, when the prompt has ended: by head, the last row alone protected.
TEST(VlCache, IsChosenOnceInThePaper) {
  for (const char* profile : {"paper", "official"}) {
    const auto rule = make_rule(retention::vlcache, {{"keep", "0.1"}, {"profile", profile}});
    EXPECT_TRUE(rule->per_head());
    EXPECT_FALSE(rule->evicts());
    EXPECT_EQ(DecodingLayer(*rule, 100, 10, 0.9).step(), -1);
    const Prompt prompt = prompt_of({{5, 9, 8, 7, 6, 5, 4, 3, 2, 0}});
    EXPECT_THAT(testing::select(*rule, prompt)[0].slots.at(0), ElementsAre(9));
  }
  EXPECT_TRUE(make_rule(retention::vlcache, {{"keep", "0.1"}})->evicts());
}

/// Both clips, then the total again: shares of r L are 3.88, .04, .04 and .04, a quarter of them
/// .97 and .01, ten rows of a thousand.
TEST(VlCache, ClipsBudgets) {
  Prompt prompt = random_prompt(4, 1, 1000, 2);
  prompt.sparsity = {.03, .99, .99, .99};
  EXPECT_THAT(kept(testing::select(*make_rule(retention::vlcache, {{"keep", "0.25"}}), prompt)),
              ElementsAre(970, 10, 10, 10));
}

}  // namespace
}  // namespace kvlm
