#include "llm/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "tests/allocations.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

int32_t sample(Sampler& sampler, std::vector<float> logits) { return sampler.sample(logits); }

int32_t greedy(const std::vector<float>& logits) {
  Sampler sampler({}, static_cast<int>(logits.size()));
  return sample(sampler, logits);
}

TEST(Sampler, GreedyTakesTheFirstMaximum) {
  EXPECT_EQ(greedy({0, 3, 1}), 1);
  EXPECT_EQ(greedy({3, 1, 3, 3}), 0);
  EXPECT_EQ(greedy({-5, -2, -2}), 1);
  EXPECT_EQ(greedy({-kInfinity, -kInfinity, -1e30f}), 2);
  EXPECT_EQ(greedy({7}), 0);
  EXPECT_EQ(greedy({-0.0f, 0.0f}), 0) << "equal";
}

TEST(Sampler, PenaltyDividesPositiveAndMultipliesNegativeLogitsOfSeenIds) {
  SamplerOptions options;
  options.repetition_penalty = 2;
  Sampler sampler(options, 6);
  sampler.see(std::vector<int32_t>{0, 1, 1, 1, 2});
  std::vector<float> logits = {4, -3, 0, 4, -3, 1};
  EXPECT_EQ(sampler.sample(logits), 3);
  EXPECT_THAT(logits, ElementsAre(2, -6, 0, 4, -3, 1)) << "once per distinct id";
}

TEST(Sampler, PenaltyCountsEveryIdSeenSinceTheStart) {
  SamplerOptions options;
  options.repetition_penalty = 4;
  Sampler sampler(options, 3);
  EXPECT_EQ(sample(sampler, {8, 7, 6}), 0) << "nothing seen";
  sampler.see(std::vector<int32_t>{0});
  EXPECT_EQ(sample(sampler, {8, 7, 6}), 1);
  sampler.see(std::vector<int32_t>{1});
  EXPECT_EQ(sample(sampler, {8, 7, 6}), 2);
  sampler.see(std::vector<int32_t>{2});
  EXPECT_EQ(sample(sampler, {8, 7, 6}), 0);
}

TEST(Sampler, PenaltyBelowOneFavoursRepetition) {
  SamplerOptions options;
  options.repetition_penalty = 0.5;
  Sampler sampler(options, 3);
  sampler.see(std::vector<int32_t>{2});
  EXPECT_EQ(sample(sampler, {3, 1, 2}), 2);
}

TEST(Sampler, IdsOutsideTheVocabularyAreIgnored) {
  SamplerOptions options;
  options.repetition_penalty = 2;
  Sampler sampler(options, 2);
  sampler.see(std::vector<int32_t>{-1, 2, std::numeric_limits<int32_t>::max(),
                                   std::numeric_limits<int32_t>::min()});
  EXPECT_EQ(sample(sampler, {1, 2}), 1);
}

/// Counts of 100000 draws from the same logits.
std::vector<int> draw_counts(const SamplerOptions& options, const std::vector<float>& logits) {
  Sampler sampler(options, static_cast<int>(logits.size()));
  std::vector<int> counts(logits.size());
  std::vector<float> copy(logits.size());
  for (int draw = 0; draw < 100000; ++draw) {
    std::copy(logits.begin(), logits.end(), copy.begin());
    ++counts[static_cast<size_t>(sampler.sample(copy))];
  }
  return counts;
}

/// Pearson's statistic against probabilities over a set; ids outside it must not occur at all.
void expect_distribution(const std::vector<int>& counts, const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double statistic = 0;
  int degrees = -1;
  for (size_t id = 0; id < counts.size(); ++id) {
    if (weights[id] == 0) {
      EXPECT_EQ(counts[id], 0) << "id " << id << " is outside the set";
      continue;
    }
    const double expected = 1e5 * weights[id] / total;
    ASSERT_GT(expected, 20) << "too rare to test";
    statistic += (counts[id] - expected) * (counts[id] - expected) / expected;
    ++degrees;
  }
  // Mean and deviation of chi square are d and sqrt(2 d).
  EXPECT_LT(statistic, degrees + 5 * std::sqrt(2.0 * degrees) + 1e-9)
      << ::testing::PrintToString(counts);
}

/// Logits whose softmax is proportional to the weights.
std::vector<float> logits_of(const std::vector<double>& weights) {
  std::vector<float> logits;
  for (const double weight : weights) {
    logits.push_back(weight == 0 ? -kInfinity : static_cast<float>(std::log(weight) + 3));
  }
  return logits;
}

const std::vector<double> kWeights = {5, 40, 1, 20, 10, 0, 24};

TEST(Sampler, DrawsFromTheSoftmax) {
  SamplerOptions options;
  options.temperature = 1;
  expect_distribution(draw_counts(options, logits_of(kWeights)), kWeights);
}

TEST(Sampler, TemperatureRaisesProbabilitiesToItsInverse) {
  for (const double temperature : {0.5, 2.0, 5.0}) {
    SamplerOptions options;
    options.temperature = temperature;
    std::vector<double> expected;
    for (const double weight : kWeights) expected.push_back(std::pow(weight, 1 / temperature));
    expect_distribution(draw_counts(options, logits_of(kWeights)), expected);
  }
}

TEST(Sampler, VanishingTemperatureIsGreedy) {
  SamplerOptions options;
  options.temperature = 1e-4;
  Sampler sampler(options, 3);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sample(sampler, {1, 1.1f, -500}), 1);
}

TEST(Sampler, TopKKeepsExactlyTheKLargest) {
  SamplerOptions options;
  options.temperature = 1;
  options.top_k = 3;
  expect_distribution(draw_counts(options, logits_of(kWeights)), {0, 40, 0, 20, 0, 0, 24});
  options.top_k = 6;
  expect_distribution(draw_counts(options, logits_of(kWeights)), kWeights);
  options.top_k = 1000;  // more than there are
  expect_distribution(draw_counts(options, logits_of(kWeights)), kWeights);
}

/// As the reference's `scores < topk[-1]` does.
TEST(Sampler, TopKKeepsAllThatEqualTheLast) {
  SamplerOptions options;
  options.temperature = 1;
  options.top_k = 2;
  expect_distribution(draw_counts(options, {1, 2, 2, 2, 1}), {0, 1, 1, 1, 0});
}

/// Shares of 40, 24, 20, 10, 5 and 1 percent: the smallest set of the largest that reaches top_p.
TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  SamplerOptions options;
  options.temperature = 1;
  for (const auto& [top_p, expected] :
       std::vector<std::pair<double, std::vector<double>>>{{0.0, {0, 40, 0, 0, 0, 0, 0}},
                                                           {0.39, {0, 40, 0, 0, 0, 0, 0}},
                                                           {0.41, {0, 40, 0, 0, 0, 0, 24}},
                                                           {0.63, {0, 40, 0, 0, 0, 0, 24}},
                                                           {0.65, {0, 40, 0, 20, 0, 0, 24}},
                                                           {0.85, {0, 40, 0, 20, 10, 0, 24}},
                                                           {0.95, {5, 40, 0, 20, 10, 0, 24}},
                                                           {0.995, kWeights},
                                                           {1.0, kWeights}}) {
    options.top_p = top_p;
    SCOPED_TRACE(top_p);
    expect_distribution(draw_counts(options, logits_of(kWeights)), expected);
  }
}

/// The order of the reference: penalty, temperature, top-k, top-p on what top-k left.
TEST(Sampler, FiltersApplyInTheOrderOfTheReference) {
  SamplerOptions options;
  options.temperature = 1;
  options.top_k = 2;
  options.top_p = 0.6;  // of 40 + 24: the first has 62 percent
  expect_distribution(draw_counts(options, logits_of(kWeights)), {0, 40, 0, 0, 0, 0, 0});
  options.top_k = 3;  // of 40 + 24 + 20 the first has 48 percent, two have 76
  expect_distribution(draw_counts(options, logits_of(kWeights)), {0, 40, 0, 0, 0, 0, 24});
  options.temperature = 0.25;  // sharpens before top-p: the first alone has 84 percent
  expect_distribution(draw_counts(options, logits_of(kWeights)), {0, 40, 0, 0, 0, 0, 0});

  options = {};
  options.temperature = 1;
  options.top_k = 1;
  options.repetition_penalty = 10;
  Sampler sampler(options, 2);
  sampler.see(std::vector<int32_t>{0});
  EXPECT_EQ(sample(sampler, {5, 4}), 1) << "the penalty comes before the choice";
}

TEST(Sampler, TopKOfOneIsGreedyAtAnyTemperature) {
  SamplerOptions options;
  options.temperature = 100;
  options.top_k = 1;
  Sampler sampler(options, 4);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sample(sampler, {1, 3, 3, 2}), 1);
}

TEST(Sampler, SeedDecidesTheDraws) {
  const auto draws = [](uint64_t seed) {
    SamplerOptions options;
    options.temperature = 1;
    options.seed = seed;
    Sampler sampler(options, 50);
    std::vector<int32_t> ids;
    for (int i = 0; i < 40; ++i) ids.push_back(sample(sampler, std::vector<float>(50, 0.0f)));
    return ids;
  };
  EXPECT_EQ(draws(1), draws(1));
  EXPECT_NE(draws(1), draws(2));
  EXPECT_NE(draws(0), draws(uint64_t{1} << 63));
}

/// The standard fixes mt19937_64 but not its distributions, so the draws are our own: the same on
/// every machine and library.
TEST(Sampler, DrawsAreTheSameEverywhere) {
  SamplerOptions options;
  options.temperature = 1;
  options.seed = 5489;  // the generator's first values are known: 14514284786278117030, ...
  Sampler sampler(options, 1000);
  // floor(1000 * (14514284786278117030 >> 11) / 2^53), and of 4620546740167642908.
  EXPECT_EQ(sample(sampler, std::vector<float>(1000, 0.0f)), 786);
  EXPECT_EQ(sample(sampler, std::vector<float>(1000, 0.0f)), 250);
}

SamplerOptions all_options(uint64_t seed) {
  SamplerOptions options;
  options.temperature = 0.8;
  options.top_k = 40;
  options.top_p = 0.9;
  options.repetition_penalty = 1.3;
  options.seed = seed;
  return options;
}

/// Three sequences side by side, of which one is greedy, choose what each chooses alone.
TEST(Sampler, RowsTogetherAreTheRowsAlone) {
  constexpr int kVocab = 90;
  ThreadPool pool(2);
  Stream stream(pool);
  std::vector<SamplerOptions> options = {all_options(1), {}, all_options(3)};
  options[1].repetition_penalty = 2;
  std::vector<Sampler> together;
  std::vector<Sampler> alone;
  const std::vector<int32_t> prompt = {3, 80, 89};
  for (const SamplerOptions& each : options) {
    for (std::vector<Sampler>* samplers : {&together, &alone}) {
      samplers->emplace_back(each, kVocab);
      samplers->back().see(prompt);
    }
  }
  std::set<int32_t> chosen;
  for (uint32_t step = 0; step < 50; ++step) {
    Tensor logits = testing::normal_tensor(DType::kF32, {3, kVocab}, step, 2.0f);
    const std::vector<float> copy(logits.as<float>(), logits.as<float>() + size_t{3} * kVocab);
    std::vector<RowSampling> rows;
    for (Sampler& sampler : together) rows.push_back(sampler.next(stream));
    std::vector<int32_t> ids(3);
    sample_rows(ids, logits, rows, stream);
    for (size_t i = 0; i < ids.size(); ++i) {
      together[i].accept(ids[i]);
      const auto begin = copy.begin() + static_cast<std::ptrdiff_t>(i * kVocab);
      const int32_t id = sample(alone[i], {begin, begin + kVocab});
      alone[i].see(std::span(&id, 1));
      EXPECT_EQ(ids[i], id) << "step " << step << ", sequence " << i;
      chosen.insert(id);
    }
  }
  EXPECT_GT(chosen.size(), 30u);
}

TEST(Sampler, LogitsThatAreNoNumbersAreRefused) {
  const auto refused = [](auto&& action) {
    return testing::message_of(ErrorCode::kCorruptFile, action);
  };
  Sampler sampler(all_options(1), 3);
  EXPECT_THAT(refused([&] {
                sample(sampler, {1, std::nanf(""), 2});
              }),
              HasSubstr("the model's logits are not finite numbers"));
  EXPECT_THAT(refused([&] { sampler.accept(kNoToken); }),
              HasSubstr("the model's logits are not finite numbers"));
}

TEST(Sampler, AllocatesNothing) {
  SamplerOptions options;
  options.temperature = 0.8;
  options.top_k = 40;
  options.top_p = 0.9;
  options.repetition_penalty = 1.1;
  Sampler sampler(options, 500);
  std::vector<float> logits(500);
  sampler.sample(logits);  // takes its workspace
  const size_t before = allocations();
  for (int step = 0; step < 300; ++step) {
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = static_cast<float>((i * 7919 + static_cast<size_t>(step)) % 500) * 0.01f;
    }
    const int32_t id = sampler.sample(logits);
    sampler.see(std::span(&id, 1));
  }
  EXPECT_EQ(allocations(), before);
}

}  // namespace
}  // namespace kvlm
