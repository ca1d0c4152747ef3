#include "llm/logit_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "llm/sampler.h"

namespace kvlm {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kVocab = 8;

/// The tokens that may come next after `generated`, on the host and where the logits are.
std::vector<int> allowed(const LogitRuleOptions& options, const std::vector<int32_t>& prompt,
                         const std::vector<int32_t>& generated, int max_tokens = 100) {
  LogitRules rules(options, kVocab);
  rules.start(prompt, max_tokens);
  ThreadPool pool(1);
  Stream stream(pool);
  std::vector<int> ids;
  for (size_t step = 0; step <= generated.size(); ++step) {
    std::vector<float> logits(kVocab, 1.0f);
    rules.apply(TensorView(logits.data(), DType::kF32, {1, kVocab}), stream);
    ids.clear();
    for (int id = 0; id < kVocab; ++id) {
      if (!std::isinf(logits[static_cast<size_t>(id)])) ids.push_back(id);
    }
    std::vector<float> on_host(kVocab, 1.0f);
    rules.apply(on_host);
    EXPECT_EQ(on_host, logits);
    if (step < generated.size()) rules.accept(generated[step]);
  }
  return ids;
}

TEST(LogitRules, NoneAreNeededWithoutRules) {
  EXPECT_TRUE(LogitRuleOptions{}.empty());
  EXPECT_TRUE((LogitRuleOptions{.eos_ids = {2}}.empty()));
  EXPECT_FALSE((LogitRuleOptions{.min_new_tokens = 1}.empty()));
  EXPECT_THAT(allowed({}, {1}, {2}), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(LogitRules, AnEndComesNotBeforeItsTime) {
  const LogitRuleOptions after_two{.min_new_tokens = 2, .eos_ids = {2, 5}};
  EXPECT_THAT(allowed(after_two, {1}, {}), ElementsAre(0, 1, 3, 4, 6, 7));
  EXPECT_THAT(allowed(after_two, {1}, {0}), ElementsAre(0, 1, 3, 4, 6, 7));
  EXPECT_THAT(allowed(after_two, {1}, {0, 0}), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  const LogitRuleOptions length{.min_length = 4, .eos_ids = {2}};
  EXPECT_THAT(allowed(length, {1, 1}, {0}), ElementsAre(0, 1, 3, 4, 5, 6, 7));
  EXPECT_THAT(allowed(length, {1, 1}, {0, 0}), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(LogitRules, SuppressesAlwaysOrAtTheBeginning) {
  const LogitRuleOptions options{.suppress_tokens = {0, 7}, .begin_suppress_tokens = {3}};
  EXPECT_THAT(allowed(options, {1}, {}), ElementsAre(1, 2, 4, 5, 6));
  EXPECT_THAT(allowed(options, {1}, {4}), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(allowed({.suppress_tokens = {-1, 8, 1 << 20}}, {1}, {}),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

/// Of a sequence the last token, where the others have come; an end alone is no bad word.
TEST(LogitRules, BadWordsAreNotCompleted) {
  const LogitRuleOptions options{.eos_ids = {2}, .bad_words = {{6}, {2}, {3, 4}, {1, 3, 5}}};
  EXPECT_THAT(allowed(options, {1}, {}), ElementsAre(0, 1, 2, 3, 4, 5, 7));
  EXPECT_THAT(allowed(options, {1}, {3}), ElementsAre(0, 1, 2, 3, 7)) << "over the prompt's end";
  EXPECT_THAT(allowed(options, {0}, {3}), ElementsAre(0, 1, 2, 3, 5, 7));
  EXPECT_THAT(allowed({.bad_words = {{3, 4}}}, {3}, {}), ElementsAre(0, 1, 2, 3, 5, 6, 7))
      << "a beginning as long as the context";
}

TEST(LogitRules, NgramsComeOnce) {
  const LogitRuleOptions pairs{.no_repeat_ngram_size = 2};
  EXPECT_THAT(allowed(pairs, {1, 2, 1}, {}), ElementsAre(0, 1, 3, 4, 5, 6, 7));
  EXPECT_THAT(allowed(pairs, {1, 2, 1, 3}, {1}), ElementsAre(0, 1, 4, 5, 6, 7));
  EXPECT_THAT(allowed({.no_repeat_ngram_size = 1}, {1, 2}, {4}), ElementsAre(0, 3, 5, 6, 7));
  EXPECT_THAT(allowed({.no_repeat_ngram_size = 3}, {1, 2, 3, 1, 2}, {}),
              ElementsAre(0, 1, 2, 4, 5, 6, 7));
  EXPECT_THAT(allowed({.no_repeat_ngram_size = 100}, {1, 1}, {}),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(LogitRules, AnEndIsForcedAtTheLastToken) {
  const LogitRuleOptions options{.forced_eos_token = 2};
  EXPECT_THAT(allowed(options, {1}, {0}, 3), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(allowed(options, {1}, {0, 0}, 3), ElementsAre(2));
  EXPECT_THAT(allowed({.suppress_tokens = {2}, .forced_eos_token = 2}, {1}, {}, 1), IsEmpty());
}

/// A NaN must still be seen where a rule forbids the token.
TEST(LogitRules, DoNotHideLogitsThatAreNoNumbers) {
  LogitRules rules({.suppress_tokens = {1}}, kVocab);
  rules.start({}, 1);
  std::vector<float> logits(kVocab, std::nanf(""));
  rules.apply(logits);
  EXPECT_TRUE(std::isnan(logits[1]));
}

TEST(Sampler, RulesComeBeforeEverythingElse) {
  SamplerOptions options;
  options.repetition_penalty = 0.5;  // favours what has been seen
  options.rules = {.min_new_tokens = 1, .eos_ids = {3}};
  Sampler sampler(options, kVocab);
  sampler.see(std::vector<int32_t>{3}, 4);
  const std::vector<float> logits = {0, 1, 0, 9, 0, 0, 0, 0};
  std::vector<float> row = logits;
  EXPECT_EQ(sampler.sample(row), 1);
  sampler.accept(1);
  row = logits;
  EXPECT_EQ(sampler.sample(row), 3);
}

}  // namespace
}  // namespace kvlm
