#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SnapKv, WatchesTheWindow) {
  const auto rule = make_rule(retention::snapkv, {});
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kLast);
  EXPECT_EQ(rule->needs().last_rows, 64);
  EXPECT_TRUE(rule->per_head());
}

TEST(SnapKv, KeepsTheWindowAndThePooledBest) {
  // Pooled over 5: .12 .16 .18 .18 .08 .08 (docs/formulas.md, "Worked examples"). The window's
  // own sums do not spill over.
  const Prompt prompt = prompt_of({{.1, .5, 0, .2, .1, .1, 50, 60}});
  const auto rows = [&](const char* keep, const char* kernel) {
    const auto rule =
        make_rule(retention::snapkv, {{"keep", keep}, {"window", "2"}, {"kernel", kernel}});
    return testing::select(*rule, prompt)[0].slots.at(0);
  };
  EXPECT_THAT(rows("0.375", "5"), ElementsAre(2, 6, 7));
  EXPECT_THAT(rows("0.5", "5"), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(rows("0.625", "5"), ElementsAre(1, 2, 3, 6, 7));
  EXPECT_THAT(rows("0.875", "5"), ElementsAre(0, 1, 2, 3, 4, 6, 7));
  EXPECT_THAT(rows("0.375", "1"), ElementsAre(1, 6, 7));
}

TEST(SnapKv, RaisesTheBudgetToTheWindow) {
  const auto rule = make_rule(retention::snapkv, {{"keep", "0.1"}, {"window", "8"}});
  EXPECT_THAT(testing::select(*rule, random_prompt(1, 1, 20, 1))[0].slots.at(0),
              ElementsAre(12, 13, 14, 15, 16, 17, 18, 19));
  // A prompt no longer than the window stays whole.
  EXPECT_EQ(testing::select(*rule, random_prompt(1, 1, 8, 1))[0].kept(), 8);
  EXPECT_EQ(testing::select(*rule, random_prompt(1, 1, 5, 1))[0].kept(), 5);
}

TEST(SnapKv, ChoosesPerHeadUnlessShared) {
  Prompt prompt = prompt_of({{0, 0, 0, 0}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {5, 0, 3, 0,  //
                       0, 6, 4, 0};
  const Options options = {{"keep", "0.5"}, {"window", "1"}, {"kernel", "1"}};
  EXPECT_THAT(testing::select(*make_rule(retention::snapkv, options), prompt)[0].slots,
              ElementsAre(ElementsAre(0, 3), ElementsAre(1, 3)));
  Options shared = options;
  shared.emplace_back("head_shared", "on");
  EXPECT_THAT(testing::select(*make_rule(retention::snapkv, shared), prompt)[0].slots,
              ElementsAre(ElementsAre(2, 3)));
}

TEST(SnapKv, EvictsNothingUnlessAsked) {
  const auto rule = make_rule(retention::snapkv, {});
  DecodingLayer growing(*rule, 100, 64, .5);
  for (int t = 1; t <= 50; ++t) EXPECT_EQ(growing.step(), -1);
  const auto asked = make_rule(retention::snapkv, {{"evict", "fixed_index"}});
  EXPECT_THAT(first_removals(DecodingLayer(*asked, 100, 50, .5), 2),
              ElementsAre(std::pair(2, 25), std::pair(4, 26)));
}

TEST(SnapKv, EvictionSparesTheWindow) {
  const auto rule =
      make_rule(retention::snapkv,
                {{"keep", "0.5"}, {"window", "8"}, {"evict", "window"}, {"distance", "4"}});
  // 20 rows of the prompt are left, the last 8 of them the window, and 2 generated: the row at the
  // distance is the window's, so the oldest generated one goes.
  DecodeView view;
  view.rows = 22;
  view.kept = 20;
  view.prompt_rows = 40;
  view.forget = 0.5;
  view.step = 2;
  view.scored = 20;
  EXPECT_EQ(rule->evict(view), 20);
}

TEST(SnapKv, RefusesAnEvenKernel) {
  try {
    make_rule(retention::snapkv, {{"kernel", "4"}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("snapkv has kernel=4"));
  }
}

}  // namespace
}  // namespace kvlm
