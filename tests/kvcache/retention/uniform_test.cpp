#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;

TEST(Uniform, KeepsEquallyManyRowsInEveryLayer) {
  for (const auto& [keep, n, rows] :
       {std::tuple("0.5", 101, 50), {"0.5", 103, 52}, {"0.2", 624, 125}, {"0.1", 15, 3}}) {
    const auto rule = make_rule(retention::uniform, {{"keep", keep}});
    EXPECT_THAT(kept(testing::select(*rule, random_prompt(5, 2, n, 1))), Each(rows));
  }
}

TEST(Uniform, KeepsTheMostAttendedRowsAndBothEnds) {
  const auto rule = make_rule(retention::uniform, {{"keep", "0.5"}});
  const auto selections =
      testing::select(*rule, prompt_of({{0, 5, 1, 4, 3, 2, 9, 0}, {0, 1, 2, 3, 3, 2, 1, 0}}));
  EXPECT_THAT(selections[0].slots, ElementsAre(ElementsAre(0, 1, 6, 7)));
  EXPECT_THAT(selections[1].slots, ElementsAre(ElementsAre(0, 3, 4, 7)));
  EXPECT_EQ(selections[0].forget, .5);
}

TEST(Uniform, AveragesItsHeads) {
  Prompt prompt = prompt_of({{0, 8, 0, 0, 3, 0}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {0, 8, 0, 0, 6, 0,   // head 0 likes 1
                       0, 0, 0, 9, 6, 0};  // head 1 likes 3; both together like 4
  const auto rule = make_rule(retention::uniform, {{"keep", "0.5"}});
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots, ElementsAre(ElementsAre(0, 4, 5)));
}

TEST(Uniform, EvictsAsItsOptionsSay) {
  const auto first = [](const Options& options, bool quantized) {
    const auto rule = make_rule(retention::uniform, options, {.with_quantizer = quantized});
    return first_removals(DecodingLayer(*rule, 100, 50, .5), 1)[0].second;
  };
  EXPECT_EQ(first({}, false), 25);
  EXPECT_EQ(first({}, true), 27);
  EXPECT_EQ(first({{"evict", "fixed_index"}}, true), 25);
  EXPECT_EQ(first({{"profile", "paper"}}, false), 27);
  EXPECT_EQ(first({{"profile", "official"}}, true), 25);
  EXPECT_EQ(first({{"distance", "10"}}, false), 40);
}

}  // namespace
}  // namespace kvlm
