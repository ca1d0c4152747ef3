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
  const auto rule =
      make_rule(retention::tova, {{"keep", "0.01"}, {"sinks", "0"}, {"evict", "none"}});
  EXPECT_THAT(testing::select(*rule, random_prompt(1, 2, 20, 1))[0].slots.at(0), ElementsAre(19));
  DecodeView view;
  view.rows = 30;
  view.prompt_rows = 20;
  view.step = 10;
  view.kept = 1;
  EXPECT_EQ(rule->evict(view), -1);
}

TEST(Tova, WatchesEveryStepUnlessAskedNotTo) {
  using Weights = ImportanceNeeds::DecodeWeights;
  EXPECT_EQ(make_rule(retention::tova, {})->needs().decode_weights, Weights::kOfStep);
  EXPECT_EQ(make_rule(retention::tova, {{"evict", "none"}})->needs().decode_weights,
            Weights::kNone);
  EXPECT_EQ(make_rule(retention::tova, {{"evict", "score"}})->needs().decode_weights,
            Weights::kNone);
}

/// Three rows stay of six. The row goes that has the least weight in the step, in whatever steps
/// before it had most; the prompt's last row and the newest stay, and the size does.
TEST(Tova, DropsWhatTheNewRowLooksAtLeast) {
  const auto rule = make_rule(retention::tova, {{"keep", "0.5"}, {"profile", "official"}});
  const Prompt prompt = prompt_of({{.1, .3, .05, .2, .25, .1}});
  DecodingLayer layer(*rule, prompt, testing::select(*rule, prompt)[0]);
  EXPECT_THAT(layer.labels(), ElementsAre(0, 1, 2));  // rows 1, 4 and 5
  layer.weights() = {.3f, .2f, .01f};
  EXPECT_EQ(layer.step(.1f), 1);
  layer.weights() = {.1f, .05f, .2f};
  EXPECT_EQ(layer.step(.01f), 0);
  layer.weights() = {.05f, .2f, .3f};
  EXPECT_EQ(layer.step(.4f), 3);
  EXPECT_THAT(layer.labels(), ElementsAre(2, 4, 5));
  layer.weights() = {.05f, .2f, .2f};
  EXPECT_EQ(layer.step(.4f), 5);  // ties: the later
  EXPECT_EQ(layer.rows(), 3);
  EXPECT_EQ(layer.peak(), 4);
}

/// sinks and last hold in decode too; where they are all there is, the end of the prompt gives way.
TEST(Tova, SparesBothEnds) {
  const auto rule = make_rule(retention::tova, {{"keep", "0.5"}, {"sinks", "1"}, {"last", "2"}});
  const Prompt prompt = random_prompt(1, 1, 10, 3);
  DecodingLayer layer(*rule, prompt, testing::select(*rule, prompt)[0]);
  layer.weights() = {0, .2f, .3f, 0, 0};
  EXPECT_EQ(layer.step(0), 1);
  layer.weights() = {0, .3f, 0, 0, .1f};
  EXPECT_EQ(layer.step(0), 5);
  const auto all_ends = make_rule(retention::tova, {{"keep", "0.2"}, {"sinks", "1"}});
  DecodingLayer two(*all_ends, prompt, testing::select(*all_ends, prompt)[0]);
  EXPECT_EQ(two.step(), 1);
  EXPECT_EQ(two.step(), 2);
}

}  // namespace
}  // namespace kvlm
