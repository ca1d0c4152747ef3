#include "kvcache/retention/common.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tests/kvcache/retention/rules.h"

namespace kvlm::retention {
namespace {

using kvlm::testing::Prompt;
using ::testing::ElementsAre;

// Column sums of rows [1], [.25, .75], [.2, .3, .5] (docs/formulas.md, "Worked examples").
const std::vector<double> kColumnSums = {1.45, 1.05, .5};

TEST(KeepBest, IsByScoreThenByIndex) {
  const std::vector<double> few = {1, 3, 2, 3, 1};
  EXPECT_THAT(keep_best(few, 1, 0, 0), ElementsAre(1));
  EXPECT_THAT(keep_best(few, 3, 0, 0), ElementsAre(1, 2, 3));
  EXPECT_THAT(keep_best(few, 4, 0, 0), ElementsAre(0, 1, 2, 3));
  std::mt19937 rng(1);
  std::vector<double> scores;
  for (int i = 0; i < 500; ++i) scores.push_back(static_cast<double>(rng() % 20));
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  for (size_t kept = 0; kept <= scores.size(); ++kept) {
    std::vector<int32_t> best(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept));
    std::sort(best.begin(), best.end());
    EXPECT_EQ(keep_best(scores, static_cast<int>(kept), 0, 0), best);
  }
}

/// Heads and layers count alike whatever the size of their numbers, and keep their signs.
TEST(UnitRowScores, AverageListsOfOneMagnitude) {
  Prompt prompt;
  prompt.shape = {.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 1, .rope_frequencies = {}};
  prompt.rows = 3;
  prompt.row_scores = {-3, 0, 3, 100, 100, 400, 0, 0, 0, std::nan(""), -1, 5};
  const Unit first{{0}, {0}};
  const Unit both{{0, 1}, {0, 1}};
  // Mean magnitudes: 2, 200, none, and 2 with the missing entry as the least, -1, of its list.
  EXPECT_THAT(unit_row_scores(prompt.view(), first, 0), ElementsAre(-1.5, 0, 1.5));
  EXPECT_THAT(unit_row_scores(prompt.view(), first, -1), ElementsAre(-0.5, 0.25, 1.75));
  EXPECT_THAT(unit_row_scores(prompt.view(), both, 1), ElementsAre(0, 0, 2.25));
  EXPECT_THAT(unit_row_scores(prompt.view(), both, -1), ElementsAre(-0.375, 0, 1.5));
}

TEST(KeepBest, KeepsTheTopOfTheWorkedExample) {
  EXPECT_THAT(keep_best(kColumnSums, 2, 0, 0), ElementsAre(0, 1));
  const std::vector<double> means = {1.45 / 3, 1.05 / 2, .5};
  EXPECT_NEAR(means[0], .48333, 1e-5);
  EXPECT_NEAR(means[1], .525, 1e-12);
  EXPECT_THAT(keep_best(means, 2, 0, 0), ElementsAre(1, 2));
}

TEST(KeepBest, ProtectsBothEnds) {
  const std::vector<double> scores = {0, 9, 8, 7, 9, 0, 0};
  EXPECT_THAT(keep_best(scores, 3, 1, 1), ElementsAre(0, 1, 6));
  EXPECT_THAT(keep_best(scores, 4, 1, 1), ElementsAre(0, 1, 4, 6));
  EXPECT_THAT(keep_best(scores, 5, 0, 2), ElementsAre(1, 2, 4, 5, 6));
  // More protected rows than room: the newest first.
  EXPECT_THAT(keep_best(scores, 2, 4, 1), ElementsAre(0, 6));
  EXPECT_THAT(keep_best(scores, 2, 1, 3), ElementsAre(5, 6));
  EXPECT_THAT(keep_best(scores, 9, 1, 1), ElementsAre(0, 1, 2, 3, 4, 5, 6));
}

TEST(Pooled, EqualsTheWorkedExample) {
  const std::vector<double> got = pooled(std::vector<double>{.1, .5, 0, .2, .1, .1}, 5);
  const std::vector<double> want = {.12, .16, .18, .18, .08, .08};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12);
  EXPECT_THAT(pooled(std::vector<double>{3, 1, 2}, 1), ElementsAre(3, 1, 2));
  EXPECT_THAT(pooled(std::vector<double>{5, 10}, 5), ElementsAre(3, 3));
  EXPECT_TRUE(pooled({}, 5).empty());
}

TEST(Rows, RoundAsTheSpecSays) {
  EXPECT_EQ(rounded_rows(.5, 5), 2);  // ties to even
  EXPECT_EQ(rounded_rows(.5, 7), 4);
  EXPECT_EQ(floored_rows(.29, 100), 29);  // 28.999999999999996 in f64
  EXPECT_EQ(floored_rows(.6, 10), 6);
  EXPECT_EQ(floored_rows(.5, 7), 3);
  EXPECT_EQ(total_rows(.6, 2, 5), 6);
}

TEST(Units, JoinLayersOfAPairWhereverTheyAre) {
  const testing::Prompt prompt = testing::random_prompt(5, 2, 4, 1);
  const std::vector<Unit> units = units_of(prompt.view(), std::vector<int>{7, 3, 7, 1, 3});
  ASSERT_EQ(units.size(), 3u);
  EXPECT_THAT(units[0].layers, ElementsAre(0, 2));
  EXPECT_THAT(units[1].layers, ElementsAre(1, 4));
  EXPECT_THAT(units[2].layers, ElementsAre(3));
  EXPECT_EQ(units_of(prompt.view(), {}).size(), 5u);
  // A layer alone: its scores are the first of its view.
  const std::vector<Unit> one = units_of(prompt.view(3), {});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_THAT(one[0].layers, ElementsAre(3));
  EXPECT_THAT(one[0].rows, ElementsAre(0));
}

TEST(Units, SumNormalisedScores) {
  // The second layer's sums are larger; normalised, both count alike.
  const testing::Prompt prompt = testing::prompt_of({{3, 1, 0, 0}, {0, 100, 100, 200}});
  const Unit both{{0, 1}, {0, 1}};
  const std::vector<double> scores = unit_scores(prompt.view(), both);
  const std::vector<double> want = {.375, .25, .125, .25};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(scores[i], want[i], 1e-12);
}

/// Column sums of the rows [1], [.25 .75], [.2 .3 .5] (docs/formulas.md, "Worked examples"): by
/// means the ranking changes.
TEST(Units, DivideByTheRowsThatSee) {
  const testing::Prompt prompt = testing::prompt_of({{1.45, 1.05, .5}});
  const Unit unit{{0}, {0}};
  const std::vector<double> sums = unit_scores(prompt.view(), unit, Score::kSums);
  const std::vector<double> means = unit_scores(prompt.view(), unit, Score::kMeans);
  const std::vector<double> want = {1.45 / 3, 1.05 / 2, .5};
  for (size_t j = 0; j < 3; ++j) {
    EXPECT_NEAR(sums[j], prompt.importance[j] / 3, 1e-12);
    EXPECT_NEAR(means[j], want[j] / (want[0] + want[1] + want[2]), 1e-12);
  }
}

TEST(PlaceEviction, FixedIndexRemovesWhatWasLastInThePrompt) {
  const auto rule = testing::make_rule(uniform, {{"evict", "fixed_index"}});
  // N = 100, forgetting half: kept 50, index 25.
  const testing::DecodingLayer start(*rule, 100, 50, .5);
  EXPECT_THAT(testing::first_removals(start, 3),
              ElementsAre(std::pair(2, 25), std::pair(4, 26), std::pair(6, 27)));
  testing::DecodingLayer layer = start;
  int removed = -1;
  for (int t = 1; t <= 120; ++t) removed = layer.step();
  EXPECT_EQ(removed, 50 + 35 - 1);  // g35
  EXPECT_EQ(layer.age(removed), 85);
  EXPECT_EQ(layer.rows(), 110);
}

TEST(PlaceEviction, SlidingKeepsItsDistance) {
  const auto rule = testing::make_rule(uniform, {{"evict", "sliding"}});
  const testing::DecodingLayer start(*rule, 100, 50, .5);
  EXPECT_THAT(testing::first_removals(start, 3),
              ElementsAre(std::pair(2, 27), std::pair(4, 29), std::pair(6, 31)));
  testing::DecodingLayer layer = start;
  int removed = -1;
  for (int t = 1; t <= 120; ++t) {
    removed = layer.step();
    if (layer.last_slot() >= 0) {
      EXPECT_EQ(layer.last_slot(), layer.rows() + 1 - 25);
    }
  }
  EXPECT_EQ(removed, 50 + 96 - 1);  // g96
  EXPECT_EQ(layer.age(removed), 24);
  EXPECT_EQ(layer.rows(), 110);
}

TEST(PlaceEviction, ForgivesRoundingOfAWholeBudget) {
  // 1 - .7 is above .3 in f64: a budget of 30 rows would be 30 + 4e-15.
  const auto seventy = testing::make_rule(uniform, {{"evict", "fixed_index"}});
  testing::DecodingLayer layer(*seventy, 90, 27, .7);
  for (int t = 1, rows = 27; t <= 300; ++t) {
    ++rows;
    if (10 * rows - 3 * (90 + t) >= 10) --rows;  // in whole numbers
    layer.step();
    ASSERT_EQ(layer.rows(), rows) << t;
  }
}

TEST(PlaceEviction, FollowsTheBudgetOfTheWorkedExample) {
  for (const char* evict : {"score", "window", "fixed_index", "sliding"}) {
    const auto rule = testing::make_rule(uniform, {{"evict", evict}});
    std::vector<int> steps;
    for (const auto& [step, label] :
         testing::first_removals(testing::DecodingLayer(*rule, 624, 125, .8), 6)) {
      steps.push_back(step);
    }
    EXPECT_THAT(steps, ElementsAre(1, 3, 4, 5, 6, 8)) << evict;
  }
}

TEST(PlaceEviction, StaysBelowTheBudgetPlusOne) {
  for (const double forget : {.05, .3, .5, .77, .9}) {
    for (const int n : {10, 77, 100, 624}) {
      const int kept = n - rounded_rows(forget, n);
      for (const char* evict : {"score", "window", "fixed_index", "sliding"}) {
        const auto rule = testing::make_rule(uniform, {{"evict", evict}, {"sinks", "0"}});
        testing::DecodingLayer layer(*rule, n, kept, forget);
        for (int t = 1; t <= 300; ++t) {
          layer.step();
          EXPECT_LT(layer.rows(), std::max<double>(kept, (n + t) * (1 - forget)) + 1);
        }
      }
    }
  }
}

TEST(PlaceEviction, HalvesTheIndexOfAShortLayerAndSparesSinks) {
  // Three rows kept: index 3 - 25 falls back to 1.
  const auto one = testing::make_rule(uniform, {{"sinks", "1"}, {"evict", "fixed_index"}});
  testing::DecodingLayer layer(*one, 100, 3, .99);
  EXPECT_EQ(layer.step(), 1);
  EXPECT_EQ(layer.last_slot(), 1);
  EXPECT_EQ(layer.rows(), 3);
  // Twenty rows kept: half of them, whichever index it would be.
  for (const char* evict : {"fixed_index", "sliding"}) {
    const auto half = testing::make_rule(uniform, {{"evict", evict}});
    testing::DecodingLayer short_layer(*half, 100, 20, .8);
    while (short_layer.step() < 0) {
    }
    EXPECT_EQ(short_layer.last_slot(), 10) << evict;
  }
  // Six rows kept with four sinks: index 3 is a sink, 4 goes.
  const auto four = testing::make_rule(uniform, {{"sinks", "4"}, {"evict", "fixed_index"}});
  testing::DecodingLayer sinks(*four, 100, 6, .95);
  EXPECT_EQ(sinks.step(), 4);
}

/// Rows 0 and 1 are sinks, 7, 8 and 9 the tail: the others go by their scores, ties the newer one;
/// then the generated rows, the oldest that is within the distance.
TEST(PlaceEviction, ByScoreSparesBothEnds) {
  const auto rule = testing::make_rule(
      uniform, {{"evict", "score"}, {"sinks", "2"}, {"last", "3"}, {"distance", "4"}});
  testing::DecodingLayer layer(*rule, 1000, 10, .999);
  layer.scores() = {0, 0, 5, 3, 4, 3, 7, 0, 0, 0};
  std::vector<int> gone;
  for (int t = 1; t <= 9; ++t) gone.push_back(layer.step());
  EXPECT_THAT(gone, ElementsAre(5, 3, 4, 2, 6, 12, 13, 14, 15));
  EXPECT_THAT(layer.labels(), ElementsAre(0, 1, 7, 8, 9, 10, 11, 16, 17, 18));
}

/// With nothing but sinks and the tail beside the newest row, a sink's neighbour goes: the newest
/// row stays in any case.
TEST(PlaceEviction, KeepsTheNewestRowWhereEverythingIsProtected) {
  const auto rule = testing::make_rule(uniform, {{"evict", "score"}, {"sinks", "5"}});
  testing::DecodingLayer layer(*rule, 1000, 7, .999);
  for (int t = 1; t <= 30; ++t) {
    EXPECT_NE(layer.step(), 7 + t - 1);
    EXPECT_THAT(std::span(layer.labels()).first(5), ElementsAre(0, 1, 2, 3, 4));
  }
}

/// What a quantizer may have packed, further than the distance from the end, stays.
TEST(PlaceEviction, WindowSkipsTheTail) {
  const auto rule =
      testing::make_rule(uniform, {{"last", "3"}, {"distance", "5"}}, {.with_quantizer = true});
  testing::DecodingLayer layer(*rule, 1000, 10, .999);
  std::vector<int> gone;
  for (int t = 1; t <= 6; ++t) gone.push_back(layer.step());
  EXPECT_THAT(gone, ElementsAre(6, 10, 11, 12, 13, 14));
}

TEST(PlaceEviction, EvictsNothingIfNone) {
  const auto rule = testing::make_rule(uniform, {{"evict", "none"}});
  testing::DecodingLayer layer(*rule, 100, 10, .9);
  for (int t = 1; t <= 50; ++t) EXPECT_EQ(layer.step(), -1);
  EXPECT_EQ(rule->peak_rows(10, .9, 100, 150), 60);
}

}  // namespace
}  // namespace kvlm::retention
