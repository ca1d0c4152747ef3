#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;

std::vector<int> budgets(int layers, int n, Options options, const std::vector<int>& pairs = {}) {
  const auto rule = make_rule(retention::pyramidinfer, std::move(options));
  return kept(testing::select(*rule, random_prompt(layers, 1, n, 1), pairs));
}

/// 1 + floor(share N) rows, where the share is at most half of keep.
TEST(PyramidInfer, WatchesTheRecentShareOfThePrompt) {
  const auto needs = [](const char* keep, const char* recent) {
    return make_rule(retention::pyramidinfer, {{"keep", keep}, {"recent", recent}})->needs();
  };
  EXPECT_EQ(needs("0.5", "0.2").rows, ImportanceNeeds::Rows::kLast);
  EXPECT_EQ(needs("0.5", "0.2").last_of(100), 21);
  EXPECT_EQ(needs("0.5", "0.2").last_of(599), 120);  // 119.8
  EXPECT_EQ(needs("0.5", "0.2").last_of(4), 1);
  EXPECT_EQ(needs("0.3", "0.2").last_of(100), 16);
  EXPECT_EQ(needs("0.5", "0").last_of(100), 1);
  EXPECT_EQ(needs("0.5", "0.2").newest_weight, 1.2f);
  EXPECT_EQ(needs("0.5", "0.2").decode_weights, ImportanceNeeds::DecodeWeights::kOfStep);
}

/// N = 100, L = 4, keep 0.5: 21 recent rows a layer leave 116 for the context of 79. The cosine's
/// factors are 1, .985355 and .95, shares 1, 1, .985355 and .936088: 29.58, 29.58, 29.15 and 27.69
/// rows. Rounded down, two are left, for the first two layers.
TEST(PyramidInfer, EqualsTheWorkedBudgets) {
  EXPECT_THAT(budgets(4, 100, {{"keep", "0.5"}}), ElementsAre(51, 51, 50, 48));
  // Shares 1, 1/2, 1/4, 1/8: 61.87, 30.93, 15.47 and 7.73 rows, three of them left over.
  const Options halves = {{"schedule", "geometric"}, {"decay", "0.5"}};
  const auto with = [&](Options more) {
    more.insert(more.end(), halves.begin(), halves.end());
    return more;
  };
  EXPECT_THAT(budgets(4, 100, with({{"keep", "0.5"}})), ElementsAre(83, 52, 37, 28));
  // The first layers have all 79 of their context; 78 rows are left for 1/4 and 1/8.
  EXPECT_THAT(budgets(4, 100, with({{"keep", "0.8"}})), ElementsAre(100, 100, 73, 47));
  // 16 recent rows leave 56 of 84. The last layer keeps four sinks, not 3.7; 52 rows for the
  // others: 29.71, 14.86 and 7.43.
  EXPECT_THAT(budgets(4, 100, with({{"keep", "0.3"}})), ElementsAre(46, 31, 23, 20));
  // At least 10 rows of the context in the last two: 36 for the others, 24 and 12.
  EXPECT_THAT(budgets(4, 100, with({{"keep", "0.3"}, {"least", "10"}})),
              ElementsAre(40, 28, 26, 26));
  // More than there is room for: 64 rows of the context in every layer.
  EXPECT_THAT(budgets(4, 100, {{"keep", "0.5"}, {"profile", "official"}}), Each(85));
  EXPECT_THAT(budgets(4, 100, {{"keep", "0.5"}, {"decay", "1"}}), Each(50));
}

/// The published code with its decay of 0.9 over 32 layers and 10000 rows holds 10000, 10000, 9998,
/// 9990, .. 8101 (layer 16) .. 3769 rows, 0.76659 on average, rounding down layer by layer. At
/// keep=0.7671 the first two layers are full and p is 1.0001 (worked apart): ten rows away at most.
TEST(PyramidInfer, HasTheLengthsOfThePublishedCodeAtItsBudget) {
  const std::vector<int> rows = budgets(32, 10000, {{"keep", "0.7671"}});
  const std::pair<size_t, int> published[] = {{0, 10000}, {1, 10000}, {2, 9998},
                                              {3, 9990},  {16, 8101}, {31, 3769}};
  for (const auto& [layer, length] : published) EXPECT_NEAR(rows[layer], length, 10) << layer;
  EXPECT_THAT(std::vector<int>(rows.begin(), rows.begin() + 4),
              ElementsAre(10000, 10000, 10000, 9992));
  EXPECT_EQ(rows[16], 8108);
  EXPECT_EQ(rows[31], 3775);
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0), 245472);
}

TEST(PyramidInfer, GivesAPairTheMeanOfItsBudgets) {
  // 83, 52, 37, 28 alone: 37 and 28 make 32.5.
  EXPECT_THAT(
      budgets(4, 100, {{"keep", "0.5"}, {"schedule", "geometric"}, {"decay", "0.5"}}, {0, 1, 2, 2}),
      ElementsAre(83, 52, 32, 32));
}

/// Ten rows, three of them recent; 10 kept in all, of the context 3 and 1. The last layer looks at
/// rows 1 and 6 most, but those are gone.
TEST(PyramidInfer, ChoosesAmongWhatTheLayerBeforeKept) {
  const auto rule =
      make_rule(retention::pyramidinfer,
                {{"keep", "0.5"}, {"schedule", "geometric"}, {"decay", "0.5"}, {"sinks", "0"}});
  const Prompt prompt = prompt_of({{5, 0, 7, 1, 0, 6, 1, 9, 9, 9}, {2, 9, 1, 0, 0, 3, 9, 0, 0, 0}});
  const auto selections = testing::select(*rule, prompt);
  EXPECT_THAT(selections[0].slots.at(0), ElementsAre(0, 2, 5, 7, 8, 9));
  EXPECT_THAT(selections[1].slots.at(0), ElementsAre(5, 7, 8, 9));
  EXPECT_DOUBLE_EQ(selections[1].forget, 0.6);
  EXPECT_TRUE(rule->joint());
  EXPECT_FALSE(rule->per_head());
}

TEST(PyramidInfer, KeepsTheSinksWhateverTheyGet) {
  const auto rule =
      make_rule(retention::pyramidinfer,
                {{"keep", "0.5"}, {"schedule", "geometric"}, {"decay", "0.5"}, {"sinks", "1"}});
  const Prompt prompt = prompt_of({{0, 4, 7, 1, 0, 6, 1, 9, 9, 9}, {0, 9, 1, 0, 0, 3, 9, 0, 0, 0}});
  const auto selections = testing::select(*rule, prompt);
  EXPECT_THAT(selections[0].slots.at(0), ElementsAre(0, 2, 5, 7, 8, 9));
  EXPECT_THAT(selections[1].slots.at(0), ElementsAre(0, 7, 8, 9));
}

/// Six rows stay, the first of them a sink, three of ten are recent: in decode the last three slots
/// stay, the sink does, and the row goes that the new one looks at least.
TEST(PyramidInfer, DropsWhatTheNewRowLooksAtLeastBeforeTheWindow) {
  const auto rule = make_rule(retention::pyramidinfer, {{"keep", "0.5"}, {"sinks", "1"}});
  DecodingLayer layer(*rule, 10, 6, 0.4);
  layer.weights() = {0, .3f, .1f, .2f, 0, 0};  // then the newest row
  EXPECT_EQ(layer.step(0), 2);                 // slots 1 to 3 may go, 4, 5 and the newest not
  EXPECT_THAT(layer.labels(), ElementsAre(0, 1, 3, 4, 5, 6));
  layer.weights() = {0, .3f, .2f, .2f, 0, 0};
  EXPECT_EQ(layer.step(0), 4);  // ties: the later
  layer.weights() = {0, .3f, .2f, .1f, 0, 0};
  EXPECT_EQ(layer.step(0), 5);  // the window moves on: row 5 has left it
  EXPECT_EQ(layer.peak(), 7);
}

TEST(PyramidInfer, LeavesThePromptAloneIfAsked) {
  const auto rule = make_rule(retention::pyramidinfer, {{"keep", "0.5"}, {"evict", "none"}});
  EXPECT_EQ(rule->needs().decode_weights, ImportanceNeeds::DecodeWeights::kNone);
  EXPECT_EQ(DecodingLayer(*rule, 10, 6, 0.4).step(), -1);
  EXPECT_FALSE(rule->evicts());
}

}  // namespace
}  // namespace kvlm
