#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

/// Two heads of four keys: norms 5, 1, 13, 2 and 3, 3, 0, 1.
const CacheShape kTwoHeads = {
    .layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 2, .rope_frequencies = {}};
const std::vector<float> kKeys = {3, 4, 1, 0, -5, 12, 0, -2,  //
                                  0, 3, 3, 0, 0,  0,  0, 1};

Prompt scored(const Retention& rule) {
  Prompt prompt;
  prompt.shape = kTwoHeads;
  prompt.rows = 4;
  prompt.row_scores = row_scores(rule, kTwoHeads, 4, kKeys);
  return prompt;
}

TEST(Knorm, ScoresByTheNormsOfKeys) {
  const auto rule = make_rule(retention::knorm, {});
  EXPECT_TRUE(rule->needs().row_scores);
  EXPECT_FALSE(rule->needs().sees_queries());
  EXPECT_TRUE(rule->per_head());
  EXPECT_THAT(row_scores(*rule, kTwoHeads, 4, kKeys), ElementsAre(-5, -1, -13, -2, -3, -3, 0, -1));
}

TEST(Knorm, KeepsTheShortestOfEachHead) {
  const auto rule = make_rule(retention::knorm, {{"keep", "0.75"}, {"profile", "official"}});
  const auto slots = testing::select(*rule, scored(*rule))[0].slots;
  EXPECT_THAT(slots.at(0), ElementsAre(0, 1, 3));
  EXPECT_THAT(slots.at(1), ElementsAre(0, 2, 3));  // of two that are alike, the earlier
}

/// In units of their means, 21/4 and 7/4: row 0 has 20/21 and 12/7, row 1 4/21 and 12/7, row 2
/// 52/21 and 0.
TEST(Knorm, HeadsThatShareCountAlike) {
  const auto rule = make_rule(retention::knorm,
                              {{"keep", "0.5"}, {"profile", "official"}, {"head_shared", "on"}});
  EXPECT_FALSE(rule->per_head());
  EXPECT_THAT(testing::select(*rule, scored(*rule))[0].slots, ElementsAre(ElementsAre(1, 3)));
}

TEST(Knorm, KeepsBothEndsByDefault) {
  const auto rule = make_rule(retention::knorm, {{"keep", "0.5"}});
  EXPECT_THAT(testing::select(*rule, scored(*rule))[0].slots.at(0), ElementsAre(0, 3));
  DecodeView view;
  view.rows = 30;
  view.prompt_rows = 4;
  view.step = 28;
  view.kept = 2;
  EXPECT_EQ(rule->evict(view), -1);
}

}  // namespace
}  // namespace kvlm
