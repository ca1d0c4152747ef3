#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Streaming, KeepsTheFirstAndTheNewestRows) {
  const auto rule = make_rule(retention::streaming, {{"keep", "0.6"}});
  const auto selections = testing::select(*rule, random_prompt(3, 2, 10, 1));
  ASSERT_EQ(selections.size(), 3u);
  for (const LayerSelection& selection : selections) {
    EXPECT_THAT(selection.slots, ElementsAre(ElementsAre(0, 1, 2, 3, 8, 9)));
  }
  EXPECT_TRUE(rule->same_in_all_layers());
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kNone);
}

TEST(Streaming, KeepsSinksAndOneRowOfAShortPrompt) {
  const auto rule = make_rule(retention::streaming, {{"keep", "0.1"}});
  EXPECT_THAT(testing::select(*rule, random_prompt(1, 1, 20, 1))[0].slots,
              ElementsAre(ElementsAre(0, 1, 2, 3, 19)));
  EXPECT_THAT(testing::select(*rule, random_prompt(1, 1, 3, 1))[0].slots,
              ElementsAre(ElementsAre(0, 1, 2)));
  // It grows to sinks + 1 rows, then slides.
  DecodingLayer layer(*rule, 3, 3, .9);
  EXPECT_EQ(layer.step(), -1);
  EXPECT_EQ(layer.step(), -1);
  EXPECT_EQ(layer.step(), 4);
  EXPECT_EQ(layer.step(), 5);
  EXPECT_EQ(layer.rows(), 5);
}

TEST(Streaming, SlidesAWindowOfConstantSize) {
  const auto rule = make_rule(retention::streaming, {{"keep", "0.6"}});
  DecodingLayer layer(*rule, 10, 6, .4);
  for (int t = 1; t <= 40; ++t) {
    layer.step();
    EXPECT_EQ(layer.last_slot(), 4);
    EXPECT_EQ(layer.rows(), 6);
  }
  EXPECT_THAT(layer.labels(), ElementsAre(0, 1, 2, 3, 6 + 38, 6 + 39));
}

TEST(Streaming, GrowsInProportionIfAsked) {
  const auto rule = make_rule(retention::streaming,
                              {{"keep", "0.5"}, {"sinks", "1"}, {"budget", "proportional"}});
  DecodingLayer layer(*rule, 11, 5, .5);
  for (int t = 1; t <= 60; ++t) {
    layer.step();
    EXPECT_EQ(layer.rows(), (11 + t) / 2);
    EXPECT_EQ(layer.labels()[0], 0);
  }
}

TEST(Streaming, RerotatesWhereKeysCanBeTurned) {
  CacheShape shape{
      .layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 4, .rope_frequencies = {1, .1f}};
  const Options on = {{"rerotate", "on"}};
  EXPECT_TRUE(make_rule(retention::streaming, on, {.shape = &shape})->rerotates());
  EXPECT_FALSE(make_rule(retention::streaming, {}, {.shape = &shape})->rerotates());
  const auto refusal = [&](const PolicyContext& context) -> std::string {
    try {
      make_rule(retention::streaming, on, context);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(refusal({.shape = &shape, .with_quantizer = true}), HasSubstr("packed keys"));
  shape.rope_frequencies.clear();
  EXPECT_THAT(refusal({.shape = &shape}), HasSubstr("positions that are single numbers"));
}

}  // namespace
}  // namespace kvlm
