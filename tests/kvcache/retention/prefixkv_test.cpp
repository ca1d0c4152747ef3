#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<double> kFirst = {.5, .3, .1, .06, .04};
const std::vector<double> kSecond = {.25, .22, .2, .18, .15};

// The published profile of LLaVA-1.5-7B for r = .5: what layers 0...31 keep.
const std::vector<double> kPublished7b = {
    .886, .760, .655, .424, .431, .299, .511, .553, .546, .622, .658, .706, .572, .531, .506, .557,
    .477, .467, .435, .364, .497, .235, .356, .324, .331, .391, .323, .357, .519, .400, .614, .721};

PolicyProfile profile_of(const std::vector<double>& keep, double of) {
  PolicyProfile profile;
  for (const char* score : {"means", "sums"}) {
    for (const double r : keep) profile.forget[score].push_back(1 - r);
  }
  profile.forget_keep = of;
  return profile;
}

CacheShape shape_of(size_t layers) {
  return {.layers = static_cast<int>(layers),
          .q_heads = 1,
          .kv_heads = 1,
          .head_dim = 1,
          .rope_frequencies = {}};
}

TEST(PrefixKv, SplitsTheWorkedExample) {
  const Prompt prompt = prompt_of({kFirst, kSecond});
  const auto rule = make_rule(retention::prefixkv,
                              {{"keep", "0.6"}, {"last", "1"}, {"score", "sums"}, {"sinks", "0"}});
  EXPECT_TRUE(rule->joint());
  const auto selections = testing::select(*rule, prompt);
  EXPECT_THAT(kept(selections), ElementsAre(2, 4));
  EXPECT_DOUBLE_EQ(selections[0].forget, .6);
  EXPECT_DOUBLE_EQ(selections[1].forget, 1 - .8);
  // The last row takes a place; the best others have the rest.
  EXPECT_THAT(selections[0].slots, ElementsAre(ElementsAre(0, 4)));
  EXPECT_THAT(selections[1].slots, ElementsAre(ElementsAre(0, 1, 2, 4)));
  // Sinks, the last row and another of each layer are more than the first one's share.
  const auto clamped = make_rule(retention::prefixkv, {{"keep", "0.6"}, {"score", "sums"}});
  EXPECT_THAT(kept(testing::select(*clamped, prompt)), ElementsAre(3, 3));
  const Prompt ties = prompt_of({{.4, .3, .2, .1}, {.4, .3, .2, .1}});
  const auto three = make_rule(retention::prefixkv, {{"keep", "0.375"}, {"sinks", "0"}});
  EXPECT_THAT(kept(testing::select(*three, ties)), ElementsAre(2, 2));  // least: 2 of each
}

TEST(PrefixKv, MeetsTheTotalAndProtectsBothEnds) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const Prompt prompt = random_prompt(7, 2, 150, seed);
    for (const char* keep : {"0.1", "0.3", "0.5", "0.9"}) {
      const auto rule =
          make_rule(retention::prefixkv, {{"keep", keep}, {"sinks", "3"}, {"last", "2"}});
      const auto selections = testing::select(*rule, prompt);
      const std::vector<int> rows = kept(selections);
      EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0),
                std::lround(std::stod(keep) * 7 * 150));
      for (const LayerSelection& selection : selections) {
        const std::vector<int32_t>& slots = selection.slots.at(0);
        EXPECT_GE(slots.size(), 5u);
        EXPECT_THAT(std::vector<int32_t>(slots.begin(), slots.begin() + 3), ElementsAre(0, 1, 2));
        EXPECT_THAT(std::vector<int32_t>(slots.end() - 2, slots.end()), ElementsAre(148, 149));
      }
    }
  }
}

TEST(PrefixKv, SplitsAlikeLayersEvenly) {
  const std::vector<double> layer = random_prompt(1, 1, 80, 4).importance;
  const auto rule = make_rule(retention::prefixkv, {{"keep", "0.45"}});
  const std::vector<int> rows = kept(testing::select(*rule, prompt_of({layer, layer, layer})));
  for (const int m : rows) EXPECT_EQ(m, 36);
}

TEST(PrefixKv, CountsProtectedRowsOnTopIfOfficial) {
  const Prompt prompt = random_prompt(6, 1, 400, 5);
  const auto rule = make_rule(retention::prefixkv,
                              {{"keep", "0.3"}, {"mode", "online"}, {"profile", "official"}});
  const std::vector<int> rows = kept(testing::select(*rule, prompt));
  const int sum = std::accumulate(rows.begin(), rows.end(), 0);
  EXPECT_GE(sum, 720);
  EXPECT_LT(sum, 720 + 6);  // counts of forgotten rows are rounded down
}

TEST(PrefixKv, TakesTheProfileMadeForItsBudget) {
  const CacheShape shape = shape_of(32);
  PolicyProfile profile = profile_of(kPublished7b, .5);
  double mean = 0;
  const std::vector<double>& ratios = profile.forget.at("means");
  for (const double forget : ratios) mean += forget / 32;
  EXPECT_NEAR(mean, .4990, 5e-4);
  EXPECT_EQ(std::max_element(ratios.begin(), ratios.end()), ratios.begin() + 21);

  const PolicyContext context{.shape = &shape, .profile = &profile};
  const auto rule = make_rule(retention::prefixkv, {}, context);
  EXPECT_FALSE(rule->joint());
  const Prompt prompt = random_prompt(32, 1, 624, 1);
  const auto selections = testing::select(*rule, prompt);
  EXPECT_EQ(selections[0].kept(), 553);   // 624 - round(.114 * 624)
  EXPECT_EQ(selections[21].kept(), 147);  // 624 - round(.765 * 624)
  EXPECT_DOUBLE_EQ(selections[21].forget, ratios[21]);

  EXPECT_TRUE(make_rule(retention::prefixkv, {{"mode", "online"}}, context)->joint());
  // auto falls back to fitting where the profile is for another budget or decoder.
  EXPECT_TRUE(make_rule(retention::prefixkv, {{"keep", "0.4"}}, context)->joint());
  const CacheShape other = shape_of(28);
  EXPECT_TRUE(make_rule(retention::prefixkv, {}, {.shape = &other, .profile = &profile})->joint());
  // The published rule takes what was fitted on its own score.
  EXPECT_FALSE(make_rule(retention::prefixkv, {{"profile", "official"}}, context)->joint());
  profile.forget.erase("sums");
  EXPECT_THROW(make_rule(retention::prefixkv, {{"profile", "official"}}, context), Error);
}

TEST(PrefixKv, RefusesAProfileThatDoesNotFit) {
  const CacheShape shape = shape_of(32);
  PolicyProfile profile = profile_of(kPublished7b, .5);
  const auto refusal = [](ErrorCode code, const Options& options,
                          const PolicyContext& context) -> std::string {
    try {
      make_rule(retention::prefixkv, options, context);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    return "nothing was thrown";
  };
  // The published budgets come from a profile; nothing else is put in its place in silence.
  for (const char* name : {"official", "paper"}) {
    const std::string told =
        refusal(ErrorCode::kUnsupported, {{"profile", name}}, {.shape = &shape});
    EXPECT_THAT(told, HasSubstr(std::string("prefixkv,profile=") + name));
    EXPECT_THAT(told, HasSubstr("vlm-kv profile --policy prefixkv --keep 0.5"));
    EXPECT_THAT(told, HasSubstr("mode=online"));
  }
  const Options options = {{"mode", "profile"}, {"keep", "0.3"}};
  EXPECT_THAT(refusal(ErrorCode::kUnsupported, options, {.shape = &shape}),
              HasSubstr("--kv-profile"));
  EXPECT_THAT(refusal(ErrorCode::kUnsupported, options, {.shape = &shape, .profile = &profile}),
              HasSubstr("measured for keep=0.5"));
  const CacheShape other = shape_of(28);
  EXPECT_THAT(refusal(ErrorCode::kUnsupported, {{"mode", "profile"}},
                      {.shape = &other, .profile = &profile}),
              HasSubstr("the profile has 32 layers"));
  profile.forget["means"][3] = 1.5;
  EXPECT_THAT(refusal(ErrorCode::kCorruptFile, {}, {.shape = &shape, .profile = &profile}),
              HasSubstr("forget ratio of 1.5"));
}

TEST(PrefixKv, ClampsShortLayersOfAProfile) {
  const CacheShape shape = shape_of(2);
  const PolicyProfile profile = profile_of({.19, .01}, .1);
  const auto rule =
      make_rule(retention::prefixkv, {{"keep", "0.1"}}, {.shape = &shape, .profile = &profile});
  const Prompt prompt = random_prompt(2, 1, 100, 1);
  const auto selections = testing::select(*rule, prompt);
  EXPECT_THAT(kept(selections), ElementsAre(19, 3));
  // The one that is no sink and no tail goes, and three stay until the budget has caught up.
  DecodingLayer layer(*rule, prompt, selections[1]);
  EXPECT_EQ(layer.step(), 1);
  EXPECT_EQ(layer.last_slot(), 1);
  for (int t = 2; t <= 50; ++t) layer.step();
  EXPECT_EQ(layer.rows(), 3);
}

TEST(PrefixKv, EvictsWithTheProfilesRatio) {
  const CacheShape shape = shape_of(1);
  const PolicyProfile profile = profile_of({.2}, .2);
  const auto rule =
      make_rule(retention::prefixkv, {{"keep", "0.2"}}, {.shape = &shape, .profile = &profile});
  const Prompt prompt = random_prompt(1, 1, 624, 1);
  const auto selection = testing::select(*rule, prompt).at(0);
  EXPECT_EQ(selection.kept(), 125);
  std::vector<int> steps;
  for (const auto& [step, label] : first_removals(DecodingLayer(*rule, prompt, selection), 6)) {
    steps.push_back(step);
  }
  EXPECT_THAT(steps, ElementsAre(1, 3, 4, 5, 6, 8));
}

TEST(PrefixKv, HasTheOptionsOfPaperAndCode) {
  const auto first = [](const Options& options, bool quantized = false) {
    const auto rule = make_rule(retention::prefixkv, options, {.with_quantizer = quantized});
    return first_removals(DecodingLayer(*rule, 100, 50, .5), 1)[0].second;
  };
  EXPECT_EQ(first({}), 33);
  EXPECT_EQ(first({}, /*quantized=*/true), 27);
  EXPECT_EQ(first({{"mode", "online"}, {"profile", "official"}}, /*quantized=*/true), 25);
  EXPECT_EQ(first({{"mode", "online"}, {"profile", "paper"}}), 27);
  const auto rule = [](const Options& options) { return make_rule(retention::prefixkv, options); };
  EXPECT_FALSE(rule({})->positions_from_layer0());
  EXPECT_TRUE(rule({{"pos", "layer0_len"}})->positions_from_layer0());
  EXPECT_TRUE(rule({{"mode", "online"}, {"profile", "official"}})->positions_from_layer0());
  EXPECT_EQ(rule({})->merge(), MergeRule::kNone);
  EXPECT_EQ(rule({{"merge", "position"}})->merge(), MergeRule::kPosition);
  EXPECT_EQ(rule({{"merge", "feature"}})->merge(), MergeRule::kFeature);
}

TEST(PrefixKv, CountsAPairTwice) {
  const Prompt prompt = random_prompt(4, 1, 100, 8);
  const auto rule = make_rule(retention::prefixkv, {{"keep", "0.4"}});
  const auto selections = testing::select(*rule, prompt, {0, 1, 1, 3});
  const std::vector<int> rows = kept(selections);
  EXPECT_EQ(rows[1], rows[2]);
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0), 160);
}

}  // namespace
}  // namespace kvlm
