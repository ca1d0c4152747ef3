#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::DoubleNear;
using ::testing::ElementsAre;

CacheShape one_head(std::vector<float> frequencies = {}) {
  return {.layers = 1,
          .q_heads = 1,
          .kv_heads = 1,
          .head_dim = 2,
          .rope_frequencies = std::move(frequencies)};
}

/// Queries (1, 0) and (3, 0) vary by 1 about (2, 0): keys (0, 1) and (1, 0) can expect exp(0) and
/// exp(2 + 1/2). Values are 5 and 2 long.
class ExpectedAttentionRule : public ::testing::Test {
 protected:
  static std::vector<double> scores(Options options) {
    options.emplace_back("sinks", "0");
    return row_scores(*make_rule(retention::expected_attention, options), one_head(), 2,
                      {0, 1, 1, 0}, {3, 4, 0, -2}, {1, 0, 3, 0});
  }
  static double share(double x) { return 1 / (1 + std::exp(-x)); }
};

TEST_F(ExpectedAttentionRule, WatchesQueriesAndRows) {
  const auto rule = make_rule(retention::expected_attention, {});
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kNone);
  EXPECT_TRUE(rule->needs().row_scores);
  EXPECT_TRUE(rule->needs().sees_queries());
  EXPECT_TRUE(rule->per_head());
}

TEST_F(ExpectedAttentionRule, ScoresByExpectedAttentionAndTheNormOfValues) {
  EXPECT_THAT(scores({}),
              ElementsAre(DoubleNear(5 * share(-2.5), 1e-6), DoubleNear(2 * share(2.5), 1e-6)));
  EXPECT_THAT(scores({{"epsilon", "0.5"}}), ElementsAre(DoubleNear(5 * share(-2.5) + 2.5, 1e-6),
                                                        DoubleNear(2 * share(2.5) + 1, 1e-6)));
  EXPECT_THAT(scores({{"values", "off"}, {"covariance", "off"}}),
              ElementsAre(DoubleNear(share(-2), 1e-6), DoubleNear(share(2), 1e-6)));
}

/// A quarter turn a position: the query of row 1 was (3, 0) before RoPE, and the one position
/// behind the prompt is half a turn away, so that the mean becomes (-2, 0).
TEST_F(ExpectedAttentionRule, TurnsQueriesToPositionsBehindThePrompt) {
  const auto rule = make_rule(retention::expected_attention,
                              {{"sinks", "0"}, {"future", "1"}, {"values", "off"}});
  const auto found = row_scores(*rule, one_head({std::numbers::pi_v<float> / 2}), 2, {0, 1, 1, 0},
                                {1, 0, 1, 0}, {1, 0, 0, 3});
  EXPECT_THAT(found, ElementsAre(DoubleNear(share(1.5), 1e-6), DoubleNear(share(-1.5), 1e-6)));
}

/// The first row's query is left out, and its row stays although it can expect nothing.
TEST_F(ExpectedAttentionRule, SparesSinks) {
  const auto rule =
      make_rule(retention::expected_attention, {{"sinks", "1"}, {"keep", "0.75"}, {"last", "1"}});
  Prompt prompt;
  prompt.shape = one_head();
  prompt.rows = 4;
  // Of the last three queries the mean is (2, 0), and they vary by 2/3: exp(7/3) is more than 1.
  prompt.row_scores = row_scores(*rule, prompt.shape, 4, {0, 0, 0, 1, 1, 0, 0, 1},
                                 {0, 0, 1, 0, 1, 0, 1, 0}, {90, 8, 1, 0, 3, 0, 2, 0});
  const double sum = 2 + std::exp(7.0 / 3);
  EXPECT_THAT(prompt.row_scores,
              ElementsAre(0, DoubleNear(1 / sum, 1e-6), DoubleNear(std::exp(7.0 / 3) / sum, 1e-6),
                          DoubleNear(1 / sum, 1e-6)));
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 2, 3)));
}

/// A prompt that is all sinks is scored by its last query alone, and stays whole.
TEST_F(ExpectedAttentionRule, ShortPromptsStay) {
  const auto rule = make_rule(retention::expected_attention, {});
  Prompt prompt;
  prompt.shape = one_head();
  prompt.rows = 3;
  prompt.row_scores = row_scores(*rule, prompt.shape, 3, {0, 0, 0, 1, 1, 0}, {0, 0, 1, 0, 1, 0},
                                 {90, 8, 1, 0, 3, 0});
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 1, 2)));
}

}  // namespace
}  // namespace kvlm
