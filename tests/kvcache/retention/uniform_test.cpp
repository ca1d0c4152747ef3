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
  const auto rule =
      make_rule(retention::uniform, {{"keep", "0.5"}, {"last", "1"}, {"score", "sums"}});
  const auto selections =
      testing::select(*rule, prompt_of({{0, 5, 1, 4, 3, 2, 9, 0}, {0, 1, 2, 3, 3, 2, 1, 0}}));
  EXPECT_THAT(selections[0].slots, ElementsAre(ElementsAre(0, 1, 6, 7)));
  EXPECT_THAT(selections[1].slots, ElementsAre(ElementsAre(0, 3, 4, 7)));
  EXPECT_EQ(selections[0].forget, .5);
}

/// Rows 0..7 with the same mean attention have falling sums: by sums the first go first to safety.
TEST(Uniform, FavoursEarlyRowsOnlyAsPublished) {
  std::vector<double> sums;
  for (int j = 0; j < 8; ++j) sums.push_back((j == 5 ? 1.1 : 1) * (8 - j));
  const auto slots = [&](const char* score) {
    const auto rule = make_rule(
        retention::uniform, {{"keep", "0.375"}, {"last", "1"}, {"score", score}, {"sinks", "1"}});
    return testing::select(*rule, prompt_of({sums}))[0].slots[0];
  };
  EXPECT_THAT(slots("means"), ElementsAre(0, 5, 7));
  EXPECT_THAT(slots("sums"), ElementsAre(0, 1, 7));
}

TEST(Uniform, KeepsTheTailInHalfOfItsRowsAtMost) {
  const Prompt prompt = random_prompt(1, 1, 200, 3);
  const auto tail = [&](const char* keep, const char* last) {
    const auto rule = make_rule(retention::uniform, {{"keep", keep}, {"last", last}});
    const std::vector<int32_t> slots = testing::select(*rule, prompt)[0].slots[0];
    int rows = 0;
    while (slots[slots.size() - 1 - static_cast<size_t>(rows)] == 199 - rows) ++rows;
    return rows;
  };
  EXPECT_GE(tail("0.5", "16"), 16);
  EXPECT_GE(tail("0.1", "16"), 10);
  EXPECT_LT(tail("0.1", "900"), 20);
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
  EXPECT_EQ(first({}, false), 50 - 16 - 1);  // the last of equal scores before the tail
  EXPECT_EQ(first({}, true), 27);
  EXPECT_EQ(first({{"evict", "score"}}, true), 33);
  EXPECT_EQ(first({{"evict", "window"}}, false), 27);
  EXPECT_EQ(first({{"evict", "fixed_index"}}, true), 25);
  EXPECT_EQ(first({{"profile", "paper"}}, false), 27);
  EXPECT_EQ(first({{"profile", "official"}}, true), 25);
  EXPECT_EQ(first({{"evict", "fixed_index"}, {"distance", "10"}}, false), 40);
}

}  // namespace
}  // namespace kvlm
