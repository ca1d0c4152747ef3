#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Not;

TEST(Random, LooksAtNoAttention) {
  const auto rule = make_rule(retention::random, {});
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kNone);
  EXPECT_FALSE(rule->joint());
  EXPECT_TRUE(rule->per_head());
  EXPECT_FALSE(make_rule(retention::random, {{"head_shared", "on"}})->per_head());
}

TEST(Random, KeepsAsManyRowsAsUniform) {
  for (const char* keep : {"0.01", "0.2", "0.5", "0.77"}) {
    for (const int n : {5, 63, 101, 624}) {
      const Prompt prompt = random_prompt(3, 2, n, 1);
      const auto uniform = make_rule(retention::uniform, {{"keep", keep}});
      const auto random = make_rule(retention::random, {{"keep", keep}});
      EXPECT_EQ(kept(testing::select(*random, prompt)), kept(testing::select(*uniform, prompt)));
      EXPECT_EQ(random->peak_rows_total(3, n, n + 50), uniform->peak_rows_total(3, n, n + 50));
    }
  }
}

/// A request has one answer, in whichever batch, on whichever device: nothing but its own length
/// and the seed decides.
TEST(Random, DrawsTheSameForTheSameRequest) {
  const auto slots = [](const Options& options, unsigned prompt) {
    const auto rule = make_rule(retention::random, options);
    return testing::select(*rule, random_prompt(3, 2, 200, prompt))[1].slots;
  };
  EXPECT_EQ(slots({}, 1), slots({}, 2));
  EXPECT_EQ(slots({}, 1), slots({{"seed", "0"}}, 1));
  EXPECT_THAT(slots({}, 1), Not(slots({{"seed", "1"}}, 1)));
}

TEST(Random, DrawsAnewForEveryLayerAndHead) {
  const Prompt prompt = random_prompt(3, 2, 400, 1);
  const auto rule = make_rule(retention::random, {{"seed", "5"}});
  std::vector<std::vector<int32_t>> all;
  for (const LayerSelection& selection : testing::select(*rule, prompt)) {
    all.insert(all.end(), selection.slots.begin(), selection.slots.end());
  }
  ASSERT_EQ(all.size(), 6u);
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      std::vector<int32_t> both;
      std::set_intersection(all[a].begin(), all[a].end(), all[b].begin(), all[b].end(),
                            std::back_inserter(both));
      // Half of half of 383 rows, and 17 that are protected; six standard deviations of 5.
      EXPECT_NEAR(static_cast<double>(both.size()), 17 + 183. * 183 / 383, 30) << a << " " << b;
    }
  }
}

/// Every row is as likely as another: each of 300 seeds keeps a third of them.
TEST(Random, HasNoFavourites) {
  const Prompt prompt = random_prompt(1, 1, 90, 1);
  std::vector<int> times(90);
  for (int seed = 0; seed < 300; ++seed) {
    const auto rule = make_rule(
        retention::random,
        {{"keep", "0.3333"}, {"seed", std::to_string(seed)}, {"sinks", "0"}, {"last", "1"}});
    const std::vector<LayerSelection> selections = testing::select(*rule, prompt);
    for (const int32_t slot : selections[0].slots[0]) ++times[static_cast<size_t>(slot)];
  }
  EXPECT_EQ(times.back(), 300);
  times.pop_back();
  // 29 of 89 rows, 300 times: 97.8 with a deviation of 8.1.
  EXPECT_THAT(times, Each(::testing::AllOf(::testing::Gt(57), ::testing::Lt(139))));
}

TEST(Random, EvictsInTheOrderOfItsNumbers) {
  const Prompt prompt = random_prompt(1, 1, 100, 1);
  const auto rule = make_rule(retention::random, {});
  const LayerSelection selection = testing::select(*rule, prompt)[0];
  DecodingLayer layer(*rule, prompt, selection);
  std::vector<float> gone;
  for (int t = 1; t <= 40; ++t) {
    const int label = layer.step();
    if (label >= 0) gone.push_back(selection.scores[0][static_cast<size_t>(label)]);
  }
  ASSERT_EQ(gone.size(), 20u);
  EXPECT_TRUE(std::is_sorted(gone.begin(), gone.end()));
}

}  // namespace
}  // namespace kvlm
