#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

TEST(H2o, KeepsHalfRecentHalfHeavyRows) {
  // The 3 x 3 example of docs/formulas.md, "Worked examples", two of three rows kept: one recent,
  // one heavy.
  const Prompt prompt = prompt_of({{1.45, 1.05, .5}});
  const auto rule = make_rule(retention::h2o, {{"keep", "0.67"}});
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 2)));
  const auto colmean = make_rule(retention::h2o, {{"keep", "0.67"}, {"colmean", "on"}});
  EXPECT_THAT(testing::select(*colmean, prompt)[0].slots, ElementsAre(ElementsAre(1, 2)));
}

TEST(H2o, RoundsTheRecentHalfUp) {
  const Prompt prompt = prompt_of({{9, 8, 7, 6, 5, 4, 3, 2, 1, 0}});
  for (const auto& [keep, slots] : {std::pair("0.5", std::vector<int32_t>{0, 1, 7, 8, 9}),
                                    {"0.4", {0, 1, 8, 9}},
                                    {"0.1", {9}}}) {
    const auto rule = make_rule(retention::h2o, {{"keep", keep}});
    EXPECT_EQ(testing::select(*rule, prompt)[0].slots.at(0), slots) << keep;
  }
}

TEST(H2o, ChoosesPerHeadUnlessShared) {
  Prompt prompt = prompt_of({{0, 0, 0, 0, 0, 0}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {0, 8, 0, 5, 0, 0,  //
                       0, 0, 9, 6, 0, 0};
  const auto rule = make_rule(retention::h2o, {{"keep", "0.34"}});
  EXPECT_TRUE(rule->per_head());
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots,
              ElementsAre(ElementsAre(1, 5), ElementsAre(2, 5)));
  const auto shared = make_rule(retention::h2o, {{"keep", "0.34"}, {"head_shared", "on"}});
  EXPECT_FALSE(shared->per_head());
  EXPECT_THAT(testing::select(*shared, prompt)[0].slots, ElementsAre(ElementsAre(3, 5)));
}

TEST(H2o, EvictsTheLightestRowThatIsNotRecent) {
  const auto rule = make_rule(retention::h2o, {{"keep", "0.4"}});
  EXPECT_EQ(rule->needs().decode_weights, ImportanceNeeds::DecodeWeights::kSummed);
  DecodingLayer layer(*rule, 10, 4, .6);  // two recent
  layer.weights() = {3, 1, .5f, .1f};
  // Labels 0 1 2 3 and the new 4: 3 and 4 are recent, 2 is the lightest of the others.
  EXPECT_EQ(layer.step(.01f), 2);
  // 0 1 3 4 5: 4 and 5 are recent, 3 with .1 goes.
  EXPECT_EQ(layer.step(7), 3);
  // 0 1 4 5 6: 4 with .01 goes, however light 6 is.
  EXPECT_EQ(layer.step(0), 4);
  EXPECT_THAT(layer.labels(), ElementsAre(0, 1, 5, 6));
  // Ties: the newest of the lightest.
  layer.weights() = {1, 1, 1, 1};
  EXPECT_EQ(layer.step(1), 5);
  EXPECT_EQ(layer.rows(), 4);
}

TEST(H2o, EvictsNothingIfPrefillOnly) {
  for (const char* option : {"prefill_only", "colmean"}) {
    const auto rule = make_rule(retention::h2o, {{"keep", "0.4"}, {option, "on"}});
    EXPECT_EQ(rule->needs().decode_weights, ImportanceNeeds::DecodeWeights::kNone);
    DecodingLayer layer(*rule, 10, 4, .6);
    for (int t = 1; t <= 20; ++t) EXPECT_EQ(layer.step(), -1);
    EXPECT_EQ(rule->peak_rows(4, .6, 10, 30), 24);
  }
}

}  // namespace
}  // namespace kvlm
