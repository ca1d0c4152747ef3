#include "tools/bench/throughput_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::HasSubstr;

constexpr Budget kCache{Budget::Kind::kCache, "10M", 10'000'000};
constexpr Budget kDevice{Budget::Kind::kDevice, "10M", 10'000'000};

std::string refusal(const Budget& budget, const Reservation& each, size_t weights = 0,
                    const Workspaces& spaces = {}) {
  try {
    batch_of(budget, 700, each, weights, spaces);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    return error.what();
  }
  return "";
}

TEST(BatchOf, CountsStagingOnce) {
  EXPECT_EQ(batch_of(kCache, 700, {1'000'000, 0}), 10);
  EXPECT_EQ(batch_of(kCache, 700, {1'000'000, 1}), 9);
  EXPECT_EQ(batch_of(kCache, 700, {1'000'000, 9'000'000}), 1);
  EXPECT_EQ(batch_of({Budget::Kind::kBatch, "7", 7}, 700, {SIZE_MAX, 0}), 7);
}

TEST(BatchOf, CountsWhatADeviceHoldsBeside) {
  EXPECT_EQ(batch_of(kDevice, 700, {1'000'000, 0}, 2'000'000, {1'000'000, 400'000}), 5);
  EXPECT_THAT(refusal(kDevice, {1'000'000, 0}, 9'000'000, {500'000, 0}),
              HasSubstr("with 9.00 MB of weights and 500.0 kB of workspaces"));
}

TEST(BatchOf, SaysWhatOneSequenceTakes) {
  EXPECT_EQ(refusal(kCache, {8'000'000, 2'000'001}),
            "10M does not hold one sequence of 700 tokens: it takes 8.00 MB, and 2.00 MB more "
            "during its prefill; give more memory or a shorter prompt");
}

TEST(SequenceSizeOf, CountsWarmUpAndTimedSteps) {
  ThroughputOptions options;
  options.prompt_tokens = 500;
  options.text_tokens = 30;
  options.tokens = 4;
  options.repeats = 2;
  const SequenceSize size = sequence_size(options);
  EXPECT_EQ(size.visual_rows, 500);
  EXPECT_EQ(size.prompt_rows, 530);
  EXPECT_EQ(size.max_rows, 530 + kWarmUpSteps + 8);
  EXPECT_NO_THROW(check_context(options, size.max_rows));
  EXPECT_THROW(check_context(options, size.max_rows - 1), Error);
}

TEST(PromptTokensOf, IsWhatTheContextLeaves) {
  ThroughputOptions options;
  options.text_tokens = 30;
  options.tokens = 4;
  options.repeats = 2;
  const int steps = kWarmUpSteps + 8;
  EXPECT_EQ(prompt_tokens_of(options, 32768), 3328);
  EXPECT_EQ(prompt_tokens_of(options, 3328 + 30 + steps), 3328);
  EXPECT_EQ(prompt_tokens_of(options, 3327 + 30 + steps), 3327);
  EXPECT_EQ(prompt_tokens_of(options, 1), 1);  // and check_context() refuses it
  options.prompt_tokens = 5000;
  EXPECT_EQ(prompt_tokens_of(options, 1000), 5000);
}

TEST(ParseBudgets, ABatchWhereNoneIsGiven) {
  ThroughputOptions options;
  const std::vector<Budget> budgets = parse_budgets(options);
  ASSERT_EQ(budgets.size(), 1u);
  EXPECT_EQ(budgets[0].kind, Budget::Kind::kBatch);
  EXPECT_EQ(budgets[0].size, 8u);
  options.batches = {3};
  options.kv_memory = {"1G"};
  EXPECT_THROW(parse_budgets(options), Error);
}

}  // namespace
}  // namespace kvlm
