#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

TEST(Elastic, IsUniformThatMergesByPosition) {
  const Prompt prompt = random_prompt(4, 2, 90, 3);
  const auto uniform = make_rule(retention::uniform, {{"keep", "0.3"}});
  const auto elastic = make_rule(retention::elastic, {{"keep", "0.3"}});
  const auto expected = testing::select(*uniform, prompt);
  const auto selections = testing::select(*elastic, prompt);
  for (size_t l = 0; l < 4; ++l) EXPECT_EQ(selections[l].slots, expected[l].slots);
  EXPECT_EQ(elastic->merge(), MergeRule::kPosition);
  EXPECT_EQ(uniform->merge(), MergeRule::kNone);
}

TEST(Elastic, EvictsAtAFixedIndex) {
  const auto rule = make_rule(retention::elastic, {});
  EXPECT_THAT(first_removals(DecodingLayer(*rule, 100, 50, .5), 3),
              ElementsAre(std::pair(2, 25), std::pair(4, 26), std::pair(6, 27)));
}

}  // namespace
}  // namespace kvlm
