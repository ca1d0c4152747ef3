#include "kvcache/retention/prefix_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace kvlm {
namespace {

using ::testing::ElementsAre;

const std::vector<double> kFirst = {.5, .3, .1, .06, .04};
const std::vector<double> kSecond = {.25, .22, .2, .18, .15};

std::vector<LayerDemand> demands_of(const std::vector<std::vector<double>>& scores) {
  std::vector<LayerDemand> demands;
  for (const auto& layer : scores) demands.push_back({lorenz_curve(layer)});
  return demands;
}

std::vector<std::vector<double>> random_scores(int layers, int n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> unit;
  std::vector<std::vector<double>> scores;
  for (int l = 0; l < layers; ++l) {
    const double width = 3 * unit(rng);
    scores.emplace_back();
    for (int j = 0; j < n; ++j) scores.back().push_back(std::exp(width * normal(rng)));
  }
  return scores;
}

int64_t sum_of(const std::vector<int>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

/// The smallest share that any layer holds.
double worst(const std::vector<LayerDemand>& demands, const std::vector<int>& rows) {
  double least = 1;
  for (size_t l = 0; l < rows.size(); ++l) {
    least = std::min(least, demands[l].curve[static_cast<size_t>(rows[l])]);
  }
  return least;
}

TEST(LorenzCurve, SumsTheBestRowsFirst) {
  const std::vector<double> curve = lorenz_curve(std::vector<double>{1, 3, 0, 4});
  ASSERT_EQ(curve.size(), 5u);
  for (const auto& [k, share] : {std::pair(0, 0.0), {1, .5}, {2, .875}, {3, 1.0}, {4, 1.0}}) {
    EXPECT_DOUBLE_EQ(curve[static_cast<size_t>(k)], share);
  }
  EXPECT_THAT(lorenz_curve(std::vector<double>{0, 0}), ElementsAre(0, .5, 1));
  EXPECT_THAT(lorenz_curve(std::vector<double>{std::nan(""), 2, -1}), ElementsAre(0, 1, 1, 1));
}

TEST(RowsForShare, EqualTheWorkedExample) {
  const std::vector<double> first = lorenz_curve(kFirst);
  const std::vector<double> second = lorenz_curve(kSecond);
  const auto rows = [&](double p) {
    return std::pair(rows_for_share(first, p), rows_for_share(second, p));
  };
  EXPECT_EQ(rows(.25), std::pair(1, 1));
  EXPECT_EQ(rows(.5), std::pair(1, 3));
  EXPECT_EQ(rows(.6), std::pair(2, 3));
  EXPECT_EQ(rows(.7), std::pair(2, 4));
  EXPECT_EQ(rows(.75), std::pair(2, 4));
  EXPECT_EQ(rows(.9), std::pair(3, 5));
  EXPECT_EQ(rows(.95), std::pair(4, 5));
  EXPECT_EQ(rows(1), std::pair(5, 5));
  EXPECT_EQ(rows(0), std::pair(0, 0));
}

TEST(RowsForShare, DoNotFallAsTheShareRises) {
  for (const auto& layer : random_scores(5, 200, 1)) {
    const std::vector<double> curve = lorenz_curve(layer);
    int last = 0;
    for (double p = 0; p <= 1; p += 1.0 / 512) {
      const int rows = rows_for_share(curve, p);
      EXPECT_GE(rows, last);
      last = rows;
    }
    EXPECT_LE(last, 200);
    EXPECT_EQ(rows_for_share(curve, curve[77]), 77);  // what a sum reached, a sum has reached
  }
}

TEST(Gini, EqualsTheWorkedExample) {
  EXPECT_NEAR(gini(lorenz_curve(kFirst)), .464, 1e-12);
  EXPECT_NEAR(gini(lorenz_curve(kSecond)), .096, 1e-12);
  EXPECT_NEAR(gini(lorenz_curve(std::vector<double>(50, 1.0))), 0, 1e-12);
}

TEST(FitGreedy, EqualsTheWorkedExamples) {
  const auto demands = demands_of({kFirst, kSecond});
  EXPECT_THAT(fit_greedy(demands, {.total = 6}), ElementsAre(2, 4));
  const auto ties = demands_of({{.4, .3, .2, .1}, {.4, .3, .2, .1}});
  EXPECT_THAT(fit_greedy(ties, {.total = 3}), ElementsAre(2, 1));
}

TEST(FitGreedy, MeetsTheTotalAndNoSplitIsFairer) {
  std::mt19937 rng(3);
  for (unsigned seed = 0; seed < 12; ++seed) {
    constexpr int kLayers = 6;
    constexpr int kRows = 37;
    const auto demands = demands_of(random_scores(kLayers, kRows, seed));
    for (const int64_t total : {6, 7, 23, 111, 200, 221, 222}) {
      const std::vector<int> rows = fit_greedy(demands, {.total = total, .least = 0});
      EXPECT_EQ(sum_of(rows), total);
      const double share = worst(demands, rows);
      for (int other = 0; other < 200; ++other) {
        std::vector<int> split(kLayers, 0);
        for (int64_t i = 0; i < total;) {
          const size_t l = rng() % kLayers;
          if (split[l] < kRows) ++split[l], ++i;
        }
        EXPECT_GE(share, worst(demands, split) - 1e-12);
      }
      std::vector<int> even(kLayers, static_cast<int>(total / kLayers));
      for (size_t l = 0; l < static_cast<size_t>(total % kLayers); ++l) ++even[l];
      EXPECT_GE(share, worst(demands, even) - 1e-12);
    }
  }
}

TEST(FitGreedy, SplitsAlikeLayersEvenly) {
  const auto scores = random_scores(1, 50, 9)[0];
  for (const int64_t total : {7, 100, 151, 199}) {
    const auto rows = fit_greedy(demands_of({scores, scores, scores, scores}), {.total = total});
    EXPECT_EQ(sum_of(rows), total);
    const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
    EXPECT_LE(*most - *least, 1);
  }
}

TEST(FitGreedy, KeepsTheLeastRowsOfEveryLayer) {
  // The second layer needs nearly all rows; the first holds everything in one.
  std::vector<double> peaked(20, 1e-9);
  peaked[4] = 1;
  const auto demands = demands_of({peaked, std::vector<double>(20, 1.0)});
  EXPECT_THAT(fit_greedy(demands, {.total = 12}), ElementsAre(1, 11));
  EXPECT_THAT(fit_greedy(demands, {.total = 12, .least = 3}), ElementsAre(3, 9));
  // The least rows alone exceed the total.
  EXPECT_THAT(fit_greedy(demands, {.total = 4, .least = 3}), ElementsAre(3, 3));
  EXPECT_THAT(fit_greedy(demands, {.total = 4, .least = 30}), ElementsAre(20, 20));
  // All rows.
  EXPECT_THAT(fit_greedy(demands, {.total = 40, .least = 3}), ElementsAre(20, 20));
}

TEST(FitGreedy, TakesWhatTheLeastRowsCostFromTheBestServed) {
  // Shares at the exact split of 14 rows: layer 0 has 1 row and nearly all; layers 1 and 2 have 8
  // and 5, layer 2 a little more of its attention.
  std::vector<double> peaked(20, 1e-9);
  peaked[0] = 1;
  std::vector<double> half(20, 0.05);
  for (size_t j = 0; j < 10; ++j) half[j] = 1;
  std::vector<double> quarter(20, 0.01);
  for (size_t j = 0; j < 6; ++j) quarter[j] = 1;
  const auto demands = demands_of({peaked, half, quarter});
  const std::vector<int> exact = fit_greedy(demands, {.total = 14});
  ASSERT_THAT(exact, ElementsAre(1, 8, 5));
  ASSERT_LT(demands[1].curve[8], demands[2].curve[5]);
  EXPECT_THAT(fit_greedy(demands, {.total = 14, .least = 2}), ElementsAre(2, 8, 4));
  // Ties are taken from the later layer.
  const auto ties = demands_of({peaked, half, half});
  ASSERT_THAT(fit_greedy(ties, {.total = 15}), ElementsAre(1, 7, 7));
  EXPECT_THAT(fit_greedy(ties, {.total = 15, .least = 2}), ElementsAre(2, 7, 6));
}

TEST(FitGreedy, CountsPairsTwice) {
  auto demands = demands_of(random_scores(3, 40, 5));
  demands[1].weight = 2;
  for (const int64_t total : {10, 81, 120, 160}) {
    const auto rows = fit_greedy(demands, {.total = total});
    EXPECT_EQ(rows[0] + 2 * rows[1] + rows[2], total);
  }
}

TEST(FitRescale, ScalesForgottenRowsToTheTotal) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    const auto demands = demands_of(random_scores(8, 300, seed));
    for (const int64_t total : {240, 1200, 2000, 2395}) {
      for (const int extra : {0, 2}) {
        const auto rows = fit_rescale(demands, {.total = total, .least = 3, .extra = extra});
        EXPECT_LE(sum_of(rows), total + 8);
        EXPECT_GE(sum_of(rows), total - 1) << "the sum of counts rounded down";
        for (const int m : rows) EXPECT_GE(m, 3);
      }
    }
  }
  // Forgotten rows of (1, 3): 6 of a wanted 4 are scaled to 4 * 4/6 = 2.67 and 2 * 4/6 = 1.33.
  const auto demands = demands_of({kFirst, kSecond});
  EXPECT_THAT(fit_rescale(demands, {.total = 6}), ElementsAre(3, 4));
}

TEST(FitRescale, StaysWithinItsBoundWhereTheLeastRowsAreMany) {
  const auto demands = demands_of(random_scores(8, 300, 4));
  for (const int least : {1, 40, 60, 100}) {
    const int64_t total = 480;
    const auto rows = fit_rescale(demands, {.total = total, .least = least});
    EXPECT_LE(sum_of(rows), std::max<int64_t>(total + 8, 8 * least)) << least;
    for (const int m : rows) EXPECT_GE(m, least);
  }
}

TEST(FitRescale, EndsOnTies) {
  const std::vector<double> even(64, 1.0);
  const auto rows =
      fit_rescale(demands_of(std::vector<std::vector<double>>(40, even)), {.total = 40 * 30 + 20});
  for (const int m : rows) EXPECT_NEAR(m, 30, 1);
}

TEST(Profile, IsTheMeanOfForgetRatios) {
  const std::vector<std::vector<double>> scores = {kFirst, kSecond};
  const std::vector<double> ratios = forget_ratios(scores, .6, 1);
  ASSERT_EQ(ratios.size(), 2u);
  EXPECT_DOUBLE_EQ(ratios[0], .6);  // R = (.4, .8)
  EXPECT_DOUBLE_EQ(ratios[1], 1 - .8);
  EXPECT_THAT(mean_ratios(std::vector<std::vector<double>>{{.25, .5}, {.75, 0}}),
              ElementsAre(.5, .25));
  EXPECT_TRUE(mean_ratios({}).empty());
}

/// Ratios 0.1, 0.2 and 0.6 about 0.3: squares 0.04, 0.01 and 0.09; distances from 0.3 and from
/// 0.25.
TEST(Spread, IsAboutTheMeanAndFromTheCenter) {
  const std::vector<std::vector<double>> prompts{{0.1, 0.5}, {0.2, 0.5}, {0.6, 0.5}};
  const RatioSpread own = spread_of_ratios(prompts, mean_ratios(prompts));
  EXPECT_NEAR(own.deviation[0], std::sqrt(0.14 / 3), 1e-12);
  EXPECT_NEAR(own.difference[0], 0.6 / 3, 1e-12);
  EXPECT_EQ(own.deviation[1], 0);
  EXPECT_EQ(own.difference[1], 0);
  const RatioSpread other = spread_of_ratios(prompts, std::vector<double>{0.25, 0.25});
  EXPECT_NEAR(other.deviation[0], own.deviation[0], 1e-12);
  EXPECT_NEAR(other.difference[0], (0.15 + 0.05 + 0.35) / 3, 1e-12);
  EXPECT_NEAR(other.difference[1], 0.25, 1e-12);
}

}  // namespace
}  // namespace kvlm
