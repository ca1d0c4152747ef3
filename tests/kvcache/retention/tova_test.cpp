#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

TEST(Tova, WatchesTheLastRow) {
  const auto rule = make_rule(retention::tova, {});
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kLast);
  EXPECT_EQ(rule->needs().last_rows, 1);
  EXPECT_FALSE(rule->per_head());
}

TEST(Tova, KeepsWhatTheLastRowLooksAt) {
  const Prompt prompt = prompt_of({{.1, .3, .05, .2, .25, .1}, {.3, .1, .1, .1, .1, .3}});
  const auto selections = testing::select(
      *make_rule(retention::tova, {{"keep", "0.5"}, {"profile", "official"}}), prompt);
  EXPECT_THAT(selections[0].slots.at(0), ElementsAre(1, 4, 5));
  EXPECT_THAT(selections[1].slots.at(0), ElementsAre(0, 1, 5));  // ties: the earlier
}

TEST(Tova, HeadsVoteTogether) {
  Prompt prompt = prompt_of({{0, 0, 0, 0}});
  prompt.shape.kv_heads = 2;
  prompt.importance = {0.6, 0,   0.3, 0.1,  //
                       0,   0.5, 0.4, 0.1};
  const auto rule = make_rule(retention::tova, {{"keep", "0.5"}, {"profile", "official"}});
  EXPECT_THAT(testing::select(*rule, prompt)[0].slots.at(0), ElementsAre(2, 3));
}

TEST(Tova, KeepsTheLastRowAtLeast) {
  const auto rule = make_rule(retention::tova, {{"keep", "0.01"}, {"sinks", "0"}});
  EXPECT_THAT(testing::select(*rule, random_prompt(1, 2, 20, 1))[0].slots.at(0), ElementsAre(19));
  DecodeView view;
  view.rows = 30;
  view.prompt_rows = 20;
  view.step = 10;
  view.kept = 1;
  EXPECT_EQ(rule->evict(view), -1);
}

}  // namespace
}  // namespace kvlm
