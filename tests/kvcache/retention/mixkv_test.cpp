#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr int kRows = 8;
const CacheShape kShape = {
    .layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 4, .rope_frequencies = {}};

/// Small exact numbers: entry (row, head, channel) of a side is ((a row + b head + c channel) mod m
/// - m / 2) / 4, plus `more`. (rows, heads, channels), or by heads first.
std::vector<float> numbers(int a, int b, int c, int m, float more, bool heads_first) {
  std::vector<float> made(static_cast<size_t>(kRows) * 2 * 4);
  for (int i = 0; i < kRows; ++i) {
    for (int h = 0; h < 2; ++h) {
      for (int d = 0; d < 4; ++d) {
        const int place = heads_first ? (h * kRows + i) * 4 + d : (i * 2 + h) * 4 + d;
        made[static_cast<size_t>(place)] =
            static_cast<float>((a * i + b * h + c * d) % m - m / 2) / 4 + more;
      }
    }
  }
  return made;
}

/// Attention of the last `window` rows, summed: (heads, rows).
std::vector<double> sums(const std::vector<float>& q, const std::vector<float>& k, int window) {
  std::vector<double> all(static_cast<size_t>(2 * kRows));
  for (int h = 0; h < 2; ++h) {
    for (int i = kRows - window; i < kRows; ++i) {
      std::vector<double> weights;
      double sum = 0;
      for (int j = 0; j <= i; ++j) {
        double product = 0;
        for (int d = 0; d < 4; ++d) {
          product += static_cast<double>(q[static_cast<size_t>((h * kRows + i) * 4 + d)]) *
                     static_cast<double>(k[static_cast<size_t>((h * kRows + j) * 4 + d)]);
        }
        weights.push_back(std::exp(product / 2));
        sum += weights.back();
      }
      for (int j = 0; j <= i; ++j) {
        all[static_cast<size_t>(h * kRows + j)] += weights[static_cast<size_t>(j)] / sum;
      }
    }
  }
  return all;
}

Prompt prompt_of_numbers(const Retention& rule, float more = 1) {
  const std::vector<float> keys = numbers(5, 4, 3, 13, more, true);
  Prompt prompt;
  prompt.shape = kShape;
  prompt.rows = kRows;
  prompt.importance = sums(numbers(7, 3, 5, 11, 0, true), keys, 2);
  prompt.row_scores = row_scores(rule, kShape, kRows, keys, numbers(4, 5, 2, 7, 0, true));
  return prompt;
}

/// docs/formulas.md, "Worked examples": the numbers come from a numpy model of the formulas.
TEST(MixKv, EqualsTheWorkedExample) {
  const Options options = {{"window", "2"}, {"kernel", "3"}, {"keep", "0.625"}};
  const auto rule = make_rule(retention::mixkv, options);
  EXPECT_TRUE(rule->per_head());
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kLast);
  const Prompt prompt = prompt_of_numbers(*rule);
  const std::vector<std::vector<double>> attention = {
      {.072541, .113158, .125413, .119268, .128892, .091621},
      {.101075, .142885, .132218, .137721, .123858, .079728}};
  const std::vector<std::vector<double>> expected = {
      {.299579, .080438, .233780, .108307, .170671, .134872},
      {.179722, .167703, .217795, .099573, .379165, .040814}};
  const std::vector<double> similarity = {.421173, .488091};
  for (size_t h = 0; h < 2; ++h) {
    const std::span<const double> own = std::span(prompt.row_scores).subspan(h * kRows, kRows);
    EXPECT_NEAR(own.back(), 1 - similarity[h], 1e-6);
    double mean = 0;
    for (const double a : attention[h]) mean += a / 6;
    std::vector<double> found;
    for (size_t j = 0; j < 6; ++j) {
      found.push_back((1 - similarity[h]) * (attention[h][j] + mean * own[j]));
    }
    EXPECT_THAT(found, Pointwise(DoubleNear(2e-6), expected[h]));
  }
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots,
              ElementsAre(ElementsAre(0, 2, 4, 6, 7), ElementsAre(0, 2, 4, 6, 7)));
  // By attention alone, as SnapKV does, others stay.
  const auto snapkv = make_rule(retention::snapkv, options);
  EXPECT_THAT(testing::select(*snapkv, prompt)[0].slots,
              ElementsAre(ElementsAre(2, 3, 4, 6, 7), ElementsAre(1, 2, 3, 6, 7)));
}

/// Keys that point everywhere have no similarity, so that the score is attention plus the value's.
TEST(MixKv, IsImportanceAloneIfKeysAreUnlike) {
  const auto rule = make_rule(retention::mixkv, {{"window", "2"}, {"kernel", "3"}});
  const Prompt prompt = prompt_of_numbers(*rule, 0);
  EXPECT_EQ(prompt.row_scores[kRows - 1], 1);
  EXPECT_EQ(prompt.row_scores[2 * kRows - 1], 1);
  for (size_t h = 0; h < 2; ++h) {
    const std::span<const double> own = std::span(prompt.row_scores).subspan(h * kRows, 6);
    double mean = 0;
    for (const double x : own) mean += x / 6;
    EXPECT_NEAR(mean, 1, 1e-6);
  }
}

/// Keys in one direction: diversity is 0, whatever its weight; the attention and values decide.
TEST(MixKv, ParallelKeysAndEqualValuesLeaveSnapKvsOrder) {
  for (const char* mode : {"headwise", "mean"}) {
    const Options options = {{"window", "2"}, {"kernel", "3"}, {"keep", "0.625"}};
    Options mixed = options;
    mixed.emplace_back("mode", mode);
    const auto rule = make_rule(retention::mixkv, mixed);
    Prompt prompt = prompt_of_numbers(*rule);
    prompt.row_scores = row_scores(*rule, kShape, kRows, std::vector<float>(2 * kRows * 4, 2.0f),
                                   std::vector<float>(2 * kRows * 4, 1.0f));
    for (const double x : prompt.row_scores) EXPECT_TRUE(std::isfinite(x));
    EXPECT_EQ(testing::select(*rule, prompt)[0].slots,
              testing::select(*make_rule(retention::snapkv, options), prompt)[0].slots);
  }
}

/// One set for all heads: the sum of what they would score, by the mean attention.
TEST(MixKv, HeadsThatShareASetAddTheirScores) {
  const auto rule = make_rule(
      retention::mixkv, {{"window", "1"}, {"kernel", "1"}, {"keep", "0.5"}, {"head_shared", "on"}});
  Prompt prompt = prompt_of({{1, 1, 1, 1}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {1, 1, 1, 1, 1, 1, 1, 1};
  prompt.row_scores = {0, 3, 0, .5, 2, 0, 0, .9};  // 0.5 * 3 < 0.9 * 2
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 3)));
}

TEST(MixKv, KeepsShortPromptsWhole) {
  const auto rule = make_rule(retention::mixkv, {{"keep", "0.1"}, {"window", "8"}});
  for (const int rows : {1, 5, 8}) {
    EXPECT_EQ(testing::select(*rule, random_prompt(1, 2, rows, 1))[0].kept(), rows);
  }
}

}  // namespace
}  // namespace kvlm
