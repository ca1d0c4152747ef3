#include "kernels/sample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/allocations.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Where a token lies in [0, 1): it is drawn by uniform numbers from `first` to `last`.
struct Share {
  int32_t id;
  double first, last;
};

/// The tokens that may be drawn, in falling order, in f64 throughout. Logits are finite or -inf.
std::vector<Share> shares(std::vector<float> logits, const RowSampling& row) {
  for (size_t i = 0; i < logits.size() && row.seen != nullptr; ++i) {
    if ((row.seen[i / 32] >> i % 32 & 1u) == 0) continue;
    logits[i] =
        logits[i] > 0 ? logits[i] / row.repetition_penalty : logits[i] * row.repetition_penalty;
  }
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](int32_t id) {
    return static_cast<double>(logits[static_cast<size_t>(id)]);
  };
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  const bool greedy = row.temperature <= 0;
  const size_t top_k = greedy ? 1 : static_cast<size_t>(row.top_k);
  if (top_k > 0 && top_k < order.size()) {
    size_t kept = top_k;  // and all that equal the last of them
    while (top_k > 1 && kept < order.size() && logit(order[kept]) == logit(order[top_k - 1])) {
      ++kept;
    }
    order.resize(kept);
  }
  std::vector<double> weights;
  for (const int32_t id : order) {
    weights.push_back(greedy ? 1 : std::exp((logit(id) - logit(order[0])) / row.temperature));
  }
  if (row.top_p < 1) {
    const double enough = row.top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
    double reached = weights[0];
    size_t count = 1;
    while (count < weights.size() && reached < enough) reached += weights[count++];
    weights.resize(count);
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<Share> result;
  double at = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    result.push_back({order[i], at / total, (at + weights[i]) / total});
    at += weights[i];
  }
  return result;
}

int32_t sample(std::vector<float> logits, const RowSampling& row) {
  std::vector<int32_t> workspace(logits.size());
  return sample_row(logits, row, workspace);
}

RowSampling drawing(double uniform) {
  RowSampling row;
  row.temperature = 1;
  row.uniform = uniform;
  return row;
}

/// Sums and probabilities in f32 move a border by less than this.
constexpr double kRounding = 1e-6;

TEST(SampleRows, EqualAPlainReference) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const testing::SampleCase& c : testing::sample_cases()) {
    testing::SampleInput input(c);
    const std::vector<float> logits(input.logits.as<float>(),
                                    input.logits.as<float>() + input.logits.view().elements());
    const std::vector<uint32_t> seen = input.seen;
    std::vector<int32_t> ids(input.rows.size(), -7);
    sample_rows(ids, input.logits, input.rows, stream);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto vocab = static_cast<std::ptrdiff_t>(c.vocab);
      const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(i) * vocab;
      std::vector<uint32_t> words(
          seen.begin() + static_cast<std::ptrdiff_t>(i * input.words),
          seen.begin() + static_cast<std::ptrdiff_t>((i + 1) * input.words));
      RowSampling row = input.rows[i];
      if (row.seen != nullptr) row.seen = words.data();
      const std::vector<Share> expected = shares({begin, begin + vocab}, row);
      const auto chosen = std::ranges::find(expected, ids[i], &Share::id);
      ASSERT_NE(chosen, expected.end()) << ids[i] << " is cut off; " << c.str() << ", row " << i;
      EXPECT_LE(chosen->first - kRounding, row.uniform) << c.str() << ", row " << i;
      EXPECT_GE(chosen->last + kRounding, row.uniform) << c.str() << ", row " << i;
      if (row.seen != nullptr) row.mark(ids[i]);
      EXPECT_TRUE(std::equal(words.begin(), words.end(),
                             input.seen.begin() + static_cast<std::ptrdiff_t>(i * input.words)))
          << c.str() << ", row " << i;
    }
  }
}

TEST(SampleRows, GreedyTakesTheFirstMaximum) {
  const RowSampling greedy;
  EXPECT_EQ(sample({7}, greedy), 0);
  EXPECT_EQ(sample({0, 3, 1, 3}, greedy), 1);
  EXPECT_EQ(sample({-0.0f, 0.0f}, greedy), 0);
  EXPECT_EQ(sample({0.0f, -0.0f}, greedy), 0);
  EXPECT_EQ(sample({-kInfinity, -kInfinity}, greedy), 0);
  EXPECT_EQ(sample({-kInfinity, kInfinity, kInfinity}, greedy), 1);
}

TEST(SampleRows, BordersAreTheNextTokens) {
  for (const auto& [uniform, id] :
       std::vector<std::pair<double, int>>{{0, 0}, {0.25, 1}, {0.5, 2}, {1 - 0x1p-53, 3}}) {
    EXPECT_EQ(sample({2, 2, 2, 2}, drawing(uniform)), id) << uniform;
  }
}

TEST(SampleRows, TopPThatIsReachedExactlyTakesNoMore) {
  RowSampling row = drawing(1 - 0x1p-53);
  row.top_p = 0.5;
  EXPECT_EQ(sample({2, 2, 2, 2}, row), 1);
  row.top_p = 0.5 + 1e-9;
  EXPECT_EQ(sample({2, 2, 2, 2}, row), 2);
  row.top_p = -1;
  EXPECT_EQ(sample({2, 2, 2, 2}, row), 0);
}

/// Probabilities of infinite logits are no numbers: the last that is kept, or the first of top-p.
TEST(SampleRows, InfiniteMaximaHaveTheirTokenToo) {
  RowSampling row = drawing(0.4);
  EXPECT_EQ(sample({-kInfinity, -kInfinity, -kInfinity}, row), 2);
  EXPECT_EQ(sample({3, kInfinity, 1, 2}, row), 2);
  row.top_k = 2;
  EXPECT_EQ(sample({-kInfinity, -kInfinity, -kInfinity}, row), 2);  // which all equal the second
  EXPECT_EQ(sample({3, kInfinity, 1, 2}, row), 0);
  row.top_p = 0.9;
  EXPECT_EQ(sample({-kInfinity, -kInfinity, -kInfinity}, row), 0);
  EXPECT_EQ(sample({3, kInfinity, 1, 2}, row), 1);
}

TEST(SampleRows, NaNIsNoTokenForItsRowOnly) {
  ThreadPool pool(2);
  Stream stream(pool);
  uint32_t seen[3] = {};
  std::vector<RowSampling> rows(3, drawing(0.1));
  rows[0].temperature = 0;
  for (size_t i = 0; i < rows.size(); ++i) rows[i].seen = &seen[i];
  Tensor logits = make_tensor(DType::kF32, {3, 2}, {9, NAN, 5, 1, NAN, 1});
  std::vector<int32_t> ids(3);
  sample_rows(ids, logits, rows, stream);
  EXPECT_THAT(ids, ElementsAre(kNoToken, 0, kNoToken));
  EXPECT_THAT(seen, ElementsAre(0, 1, 0)) << "marks what it has chosen";
}

TEST(SampleRows, ALargerBatchAllocatesNothing) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    Stream stream(pool);
    Tensor logits = testing::normal_tensor(DType::kF32, {9, 1000}, 1);
    const std::vector<RowSampling> rows(9, drawing(0.7));
    std::vector<int32_t> ids(9);
    sample_rows(std::span(ids).first(1), logits.view().slice(0, 1), std::span(rows).first(1),
                stream);
    const size_t before = allocations();
    sample_rows(ids, logits, rows, stream);
    EXPECT_EQ(allocations(), before) << threads << " threads";
  }
}

TEST(SampleRows, RefusesWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor logits = testing::normal_tensor(DType::kF32, {2, 5}, 1);
  std::vector<int32_t> ids(2);
  std::vector<RowSampling> rows(2);
  const auto message = [&](TensorView of) {
    return message_of(ErrorCode::kInvalidArgument, [&] { sample_rows(ids, of, rows, stream); });
  };
  EXPECT_THAT(message(logits.view().reshape({10})),
              HasSubstr("logits has shape (10), expected 2 dimensions (rows, vocab)"));
  EXPECT_THAT(message(logits.view().reshape({5, 2})),
              HasSubstr("ids has 2 entries, expected 5, the rows of logits"));
  Tensor none(DType::kF32, {2, 0});
  EXPECT_THAT(message(none), HasSubstr("logits has shape (2, 0), expected 1 to"));
  const auto with = [&](auto member, auto value) {
    rows[1] = {};
    rows[1].*member = value;
    return message(logits);
  };
  EXPECT_THAT(with(&RowSampling::temperature, HUGE_VAL),
              HasSubstr("temperature of row 1 is inf, expected a finite number"));
  EXPECT_THAT(with(&RowSampling::top_k, -1), HasSubstr("top_k of row 1 is -1"));
  EXPECT_THAT(with(&RowSampling::top_p, std::nan("")), HasSubstr("top_p of row 1 is nan"));
  EXPECT_THAT(with(&RowSampling::uniform, 1.0), HasSubstr("uniform of row 1 is 1, expected 0 to"));
  EXPECT_THAT(with(&RowSampling::repetition_penalty, 0.0f),
              HasSubstr("repetition_penalty of row 1 is 0, expected a finite number above 0"));
}

}  // namespace
}  // namespace kvlm
