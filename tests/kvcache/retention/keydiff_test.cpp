#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::DoubleNear;
using ::testing::ElementsAre;

/// Directions (0.6, 0.8), (1, 0), (0, -1): their mean points to (1.6, -0.2), of length sqrt(2.6).
const CacheShape kOneHead = {
    .layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 2, .rope_frequencies = {}};
const std::vector<float> kKeys = {3, 4, 1, 0, 0, -2};

TEST(KeyDiff, ScoresByTheCosineToTheMeanKey) {
  const auto rule = make_rule(retention::keydiff, {});
  EXPECT_TRUE(rule->needs().row_scores);
  EXPECT_FALSE(rule->needs().sees_queries());
  EXPECT_TRUE(rule->per_head());
  const double length = std::sqrt(2.6);
  EXPECT_THAT(row_scores(*rule, kOneHead, 3, kKeys),
              ElementsAre(DoubleNear(-0.8 / length, 1e-7), DoubleNear(-1.6 / length, 1e-7),
                          DoubleNear(-0.2 / length, 1e-7)));
}

TEST(KeyDiff, KeepsTheKeysThatPointElsewhere) {
  const auto rule = make_rule(retention::keydiff, {{"keep", "0.7"}, {"profile", "official"}});
  Prompt prompt;
  prompt.shape = kOneHead;
  prompt.rows = 3;
  prompt.row_scores = row_scores(*rule, kOneHead, 3, kKeys);
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 2)));
}

/// Twenty keys along one axis and one across: it stays, wherever it is and however long.
TEST(KeyDiff, KeepsTheOddOneOut) {
  const auto rule = make_rule(retention::keydiff, {{"keep", "0.1"}, {"profile", "official"}});
  for (const float length : {0.01f, 1.0f, 100.0f}) {
    for (int odd = 0; odd < 20; ++odd) {
      std::vector<float> keys;
      for (int j = 0; j < 21; ++j) {
        keys.push_back(j == odd ? 0 : static_cast<float>(j + 1));
        keys.push_back(j == odd ? length : 0);
      }
      Prompt prompt;
      prompt.shape = kOneHead;
      prompt.rows = 21;
      prompt.row_scores = row_scores(*rule, kOneHead, 21, keys);
      EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(odd, 20)));
    }
  }
}

}  // namespace
}  // namespace kvlm
