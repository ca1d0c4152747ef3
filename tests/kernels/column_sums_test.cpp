#include "kernels/column_sums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using kvlm::testing::make_tensor;
using kvlm::testing::message_of;
using kvlm::testing::normal_tensor;
using kvlm::testing::values_of;
using ::testing::Each;
using ::testing::Gt;
using ::testing::HasSubstr;

struct Case {
  int64_t n = 1;
  int64_t kv_heads = 2;
  int64_t q_per_kv = 1;
  int64_t head_dim = 64;
  int64_t first_row = 0;
  DType past_dtype = DType::kF32;
  std::vector<int64_t> past_rows = {};  // one entry per run
  float deviation = 1;
  float newest_weight = 1;
};

struct Sums {
  std::vector<double> sums;
  std::vector<double> small;
};

/// Sums over all columns, which gain.
QueuedSums added(std::span<double> sums, std::span<double> small = {}, int64_t kv_heads = 1) {
  const int64_t columns = static_cast<int64_t>(sums.size()) / kv_heads;
  return {sums.data(), columns, columns, small};
}

class Prompt {
 public:
  explicit Prompt(const Case& c)
      : shape(c),
        q(normal_tensor(DType::kF32, {c.n, c.kv_heads * c.q_per_kv, c.head_dim}, 1, c.deviation)),
        k(normal_tensor(DType::kF32, {c.n, c.kv_heads, c.head_dim}, 2, c.deviation)) {
    uint32_t seed = 10;
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      for (const int64_t rows : c.past_rows) {
        keys.push_back(normal_tensor(c.past_dtype, {rows, c.head_dim}, ++seed, c.deviation));
        past.push_back({keys.back().view().data(), nullptr, c.past_dtype, rows});
      }
    }
    columns = c.n + std::accumulate(c.past_rows.begin(), c.past_rows.end(), int64_t{0});
    scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  }

  Sums empty() const {
    return {std::vector<double>(static_cast<size_t>(shape.kv_heads * columns)),
            std::vector<double>(static_cast<size_t>(shape.kv_heads * shape.q_per_kv))};
  }

  Sums run(int threads = 1) const {
    ThreadPool pool(threads);
    Stream stream(pool);
    Sums result = empty();
    column_sums(added(result.sums, result.small, shape.kv_heads), q, k, past,
                {shape.first_row, shape.newest_weight}, scale, DType::kF32, stream);
    return result;
  }

  /// In double and in the order of the formula.
  Sums expected() const {
    Sums result = empty();
    const reference::Values q_values = values_of(q);
    const reference::Values k_values = values_of(k);
    std::vector<reference::Values> past_values;
    for (const Tensor& run : keys) past_values.push_back(values_of(run));
    const auto dim = static_cast<size_t>(shape.head_dim);
    const auto kv_heads = static_cast<size_t>(shape.kv_heads);
    const auto g = static_cast<size_t>(shape.q_per_kv);
    const size_t runs = shape.past_rows.size();
    for (auto i = static_cast<size_t>(shape.first_row); i < static_cast<size_t>(shape.n); ++i) {
      const double weight = weight_of(static_cast<int64_t>(i));
      for (size_t hq = 0; hq < kv_heads * g; ++hq) {
        const size_t h = hq / g;
        const double* query = q_values.data() + (i * kv_heads * g + hq) * dim;
        std::vector<double> scores;
        const auto score = [&](const double* key) {
          scores.push_back(std::inner_product(query, query + dim, key, 0.0) *
                           static_cast<double>(scale));
        };
        for (size_t run = 0; run < runs; ++run) {
          for (size_t r = 0; r < static_cast<size_t>(shape.past_rows[run]); ++r) {
            score(past_values[h * runs + run].data() + r * dim);
          }
        }
        for (size_t j = 0; j <= i; ++j) score(k_values.data() + (j * kv_heads + h) * dim);
        const double max = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& s : scores) sum += s = std::exp(s - max);
        for (size_t j = 0; j < scores.size(); ++j) {
          result.sums[h * static_cast<size_t>(columns) + j] +=
              weight * scores[j] / sum / static_cast<double>(g);
          if (scores[j] < 0.01) result.small[hq] += 1;
        }
      }
    }
    return result;
  }

  /// What row i counts: 1 for the first that is summed, newest_weight for the last.
  double weight_of(int64_t i) const {
    if (shape.n - shape.first_row < 2) return 1;
    const double share = static_cast<double>(i - shape.first_row) /
                         static_cast<double>(shape.n - 1 - shape.first_row);
    return 1 - share + share * static_cast<double>(shape.newest_weight);
  }

  Case shape;
  Tensor q, k;
  std::vector<Tensor> keys;
  std::vector<KeyValueRows> past;
  int64_t columns = 0;
  float scale = 1;
};

void expect_parity(const Case& c) {
  const Prompt prompt(c);
  const Sums got = prompt.run(2);
  const Sums want = prompt.expected();
  SCOPED_TRACE(::testing::Message()
               << "n " << c.n << " kv_heads " << c.kv_heads << " q_per_kv " << c.q_per_kv
               << " head_dim " << c.head_dim << " first_row " << c.first_row << " past runs "
               << c.past_rows.size() << " of " << dtype_name(c.past_dtype));
  for (size_t j = 0; j < want.sums.size(); ++j) {
    ASSERT_NEAR(got.sums[j], want.sums[j], 1e-5 * std::max(1.0, want.sums[j])) << "column " << j;
  }
  for (size_t h = 0; h < want.small.size(); ++h) {
    // An entry on the threshold may fall on either side of it.
    EXPECT_NEAR(got.small[h], want.small[h], 1) << "query head " << h;
  }
  for (size_t h = 0; h < static_cast<size_t>(c.kv_heads); ++h) {
    const auto columns = static_cast<size_t>(prompt.columns);
    const double* row = got.sums.data() + h * columns;
    double rows = 0;
    for (int64_t i = c.first_row; i < c.n; ++i) rows += prompt.weight_of(i);
    EXPECT_NEAR(std::accumulate(row, row + columns, 0.0), rows, 1e-5 * rows) << "kv head " << h;
  }
}

TEST(ColumnSums, EqualTheReferenceForEverySharingAndLength) {
  for (const int64_t q_per_kv : {1, 4, 7}) {
    for (const int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 130, 300}) {
      expect_parity({.n = n, .kv_heads = n == 300 ? 1 : 3, .q_per_kv = q_per_kv});
    }
  }
}

TEST(ColumnSums, EqualTheReferenceForEveryHeadDim) {
  for (const int64_t head_dim : {1, 3, 16, 33, 72, 80, 128, 256}) {
    expect_parity({.n = 70, .q_per_kv = 2, .head_dim = head_dim});
  }
}

TEST(ColumnSums, SeeThePastInEveryDType) {
  const std::vector<std::vector<int64_t>> pasts = {{0}, {1}, {100}, {3, 0, 65}, {300, 7}};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::vector<int64_t>& past_rows : pasts) {
      for (const int64_t n : {1, 33}) {
        expect_parity({.n = n,
                       .q_per_kv = n == 1 ? 7 : 4,
                       .head_dim = 33,
                       .past_dtype = dtype,
                       .past_rows = past_rows});
      }
    }
  }
}

TEST(ColumnSums, SumOnlyTheChosenRows) {
  for (const int64_t first_row : {0, 1, 36, 99}) {
    expect_parity({.n = 100, .q_per_kv = 4, .first_row = first_row});
    expect_parity({.n = 100,
                   .q_per_kv = 7,
                   .first_row = first_row,
                   .past_dtype = DType::kF16,
                   .past_rows = {50}});
  }
}

TEST(ColumnSums, CountSmallEntriesOfPeakedRows) {
  // Wide scores: most entries are far below a hundredth of their row's largest.
  const Prompt prompt({.n = 200, .kv_heads = 2, .q_per_kv = 4, .deviation = 3});
  const Sums got = prompt.run();
  const Sums want = prompt.expected();
  for (size_t h = 0; h < want.small.size(); ++h) {
    EXPECT_GT(want.small[h], 200 * 201 / 4.0);
    EXPECT_NEAR(got.small[h], want.small[h], 2);
  }
  // They are counted only where asked for, and the sums do not depend on it.
  ThreadPool pool(1);
  Stream stream(pool);
  Sums uncounted = prompt.empty();
  column_sums(added(uncounted.sums, {}, 2), prompt.q, prompt.k, {}, 0, prompt.scale, DType::kF32,
              stream);
  EXPECT_EQ(uncounted.sums, got.sums);
}

TEST(ColumnSums, SumTheRowsOfTheWorkedExample) {
  // Rows [1], [.25, .75], [.2, .3, .5] of one head, as scores of one channel (docs/formulas.md,
  // "Worked examples").
  ThreadPool pool(1);
  Stream stream(pool);
  // q_i . k_j = log A_ij up to a constant of the row: a channel per query.
  std::vector<float> q(9, 0.0f);
  for (size_t i = 0; i < 3; ++i) q[i * 3 + i] = 1;
  const std::vector<float> k = {
      0, std::log(0.25f), std::log(0.2f), 0, std::log(0.75f), std::log(0.3f), 0, 0, std::log(0.5f)};
  const Shape shape = {3, 1, 3};
  std::vector<double> sums(3);
  std::vector<double> small(1);
  column_sums(added(sums, small), make_tensor(DType::kF32, shape, q),
              make_tensor(DType::kF32, shape, k), {}, 0, 1, DType::kF32, stream);
  EXPECT_NEAR(sums[0], 1.45, 1e-6);
  EXPECT_NEAR(sums[1], 1.05, 1e-6);
  EXPECT_NEAR(sums[2], 0.5, 1e-6);
  EXPECT_EQ(small[0], 0);
}

/// The worked example with weights: 1, 1.5 and 2 of three rows, 1 and 2 of two, 1 of one.
TEST(ColumnSums, ComeWithAttention) {
  const Case c{.n = 37, .kv_heads = 2, .q_per_kv = 3, .head_dim = 20, .past_rows = {5, 9}};
  Prompt prompt(c);
  for (KeyValueRows& run : prompt.past) run.values = run.keys;
  const Tensor v = normal_tensor(DType::kF32, {c.n, c.kv_heads, c.head_dim}, 3);
  ThreadPool pool(1);
  Stream stream(pool);
  const auto columns = prompt.columns;
  Tensor alone(DType::kF32, prompt.q.view().shape());
  attention(alone, prompt.q, prompt.k, v, prompt.past, true, prompt.scale, DType::kF32, stream);
  for (const SummedRows rows : {SummedRows(0), SummedRows(4, 1.5f)}) {
    std::vector<double> expected(static_cast<size_t>(c.kv_heads * columns), 0.5);
    std::vector<double> found = expected;
    column_sums({expected.data(), columns, 30}, prompt.q, prompt.k, prompt.past, rows, prompt.scale,
                DType::kF32, stream);
    Tensor in_place(DType::kF32, prompt.q.view().shape());
    copy(in_place, prompt.q, stream);
    attend_and_sum({found.data(), columns, 30}, in_place, in_place, prompt.k, v, prompt.past, rows,
                   prompt.scale, DType::kF32, stream);
    EXPECT_EQ(found, expected);
    EXPECT_EQ(values_of(in_place), values_of(alone));
  }
}

TEST(ColumnSums, ComeWithAttentionOfOperandsThatFit) {
  const Case c{.n = 5, .head_dim = 16, .past_rows = {3}};
  Prompt prompt(c);
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor v = normal_tensor(DType::kF32, {c.n, c.kv_heads, c.head_dim}, 3);
  const Tensor narrow = normal_tensor(DType::kF32, {c.n, c.kv_heads, 8}, 3);
  Tensor out(DType::kF32, prompt.q.view().shape());
  std::vector<double> sums(16, 0.5);
  const auto attend = [&](TensorView to, ConstTensorView values) {
    attend_and_sum({sums.data(), 8, 8}, to, prompt.q, prompt.k, values, prompt.past, 0,
                   prompt.scale, DType::kF32, stream);
  };
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument, [&] { attend(out, v); }),
              HasSubstr("has no values"));
  for (KeyValueRows& run : prompt.past) run.values = run.keys;
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument, [&] { attend(out, narrow); }),
              HasSubstr("v has shape"));
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument, [&] { attend(out.view().slice(0, 4), v); }),
              HasSubstr("out has shape"));
  EXPECT_THAT(sums, Each(0.5));  // nothing is summed before all is known to fit
  attend(out, v);
  EXPECT_THAT(sums, Each(Gt(0.5)));
}

TEST(ColumnSums, CountNewerRowsMore) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Shape shape = {3, 1, 3};
  const Tensor q = make_tensor(DType::kF32, shape, {1, 0, 0, 0, 1, 0, 0, 0, 1});
  const Tensor k = make_tensor(DType::kF32, shape,
                               {0, std::log(0.25f), std::log(0.2f), 0, std::log(0.75f),
                                std::log(0.3f), 0, 0, std::log(0.5f)});
  const auto sums = [&](int64_t first) {
    std::vector<double> result(3);
    column_sums(added(result), q, k, {}, {first, 2}, 1, DType::kF32, stream);
    return result;
  };
  using ::testing::DoubleNear;
  using ::testing::ElementsAre;
  const auto near = [](double x) { return DoubleNear(x, 1e-6); };
  EXPECT_THAT(sums(0), ElementsAre(near(1.775), near(1.725), near(1)));
  EXPECT_THAT(sums(1), ElementsAre(near(0.65), near(1.35), near(1)));
  EXPECT_THAT(sums(2), ElementsAre(near(0.2), near(0.3), near(0.5)));
}

/// A row weighs received / rows that see it: here rows 1 and 2 receive .8 of 2 and .6 of 1.
TEST(ColumnSums, CountRowsByWhatTheyReceive) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Shape shape = {3, 1, 3};
  const Tensor q = make_tensor(DType::kF32, shape, {1, 0, 0, 0, 1, 0, 0, 0, 1});
  const Tensor k = make_tensor(DType::kF32, shape,
                               {0, std::log(0.25f), std::log(0.2f), 0, std::log(0.75f),
                                std::log(0.3f), 0, 0, std::log(0.5f)});
  const std::vector<double> received = {9, .8, .6};
  SummedRows rows(1);
  rows.received = received.data();
  std::vector<double> sums(3);
  column_sums(added(sums), q, k, {}, rows, 1, DType::kF32, stream);
  EXPECT_THAT(sums, ::testing::ElementsAre(::testing::DoubleNear(.4 * .25 + .6 * .2, 1e-6),
                                           ::testing::DoubleNear(.4 * .75 + .6 * .3, 1e-6),
                                           ::testing::DoubleNear(.6 * .5, 1e-6)));
}

/// A kernel's tiles have rows behind the last one, where nothing was received.
TEST(ColumnSums, PaddingReceivesNothing) {
  const std::vector<double> received = {1, 2};
  SummedRows rows(0);
  rows.received = received.data();
  EXPECT_EQ(summed_weight(rows, 0, 2), 0.5f);
  EXPECT_EQ(summed_weight(rows, 1, 2), 2);
  for (const int64_t index : {2, 3, 1000000}) EXPECT_EQ(summed_weight(rows, index, 2), 0);
}

TEST(ColumnSums, EqualTheReferenceWhereNewerRowsCountMore) {
  for (const int64_t q_per_kv : {1, 7}) {
    expect_parity({.n = 130, .kv_heads = 3, .q_per_kv = q_per_kv, .newest_weight = 1.2f});
    expect_parity({.n = 65,
                   .kv_heads = 2,
                   .q_per_kv = q_per_kv,
                   .first_row = 33,
                   .past_rows = {17},
                   .newest_weight = 3});
  }
}

TEST(ColumnSums, AreAddedToWhatIsThere) {
  const Prompt prompt({.n = 40, .q_per_kv = 2});
  ThreadPool pool(1);
  Stream stream(pool);
  const Sums once = prompt.run();
  Sums twice = once;
  column_sums(added(twice.sums, twice.small, 2), prompt.q, prompt.k, prompt.past, 0, prompt.scale,
              DType::kF32, stream);
  for (size_t j = 0; j < once.sums.size(); ++j) EXPECT_EQ(twice.sums[j], 2 * once.sums[j]);
  for (size_t h = 0; h < once.small.size(); ++h) EXPECT_EQ(twice.small[h], 2 * once.small[h]);
}

TEST(ColumnSums, MayBePutIntoRowsOfAnyLength) {
  const Prompt prompt({.n = 40, .kv_heads = 2, .q_per_kv = 2});
  ThreadPool pool(1);
  Stream stream(pool);
  const Sums want = prompt.run();
  constexpr size_t kStride = 50;
  constexpr size_t kHeld = 30;
  std::vector<double> sums(2 * kStride, 0.5);
  std::vector<double> small(4);
  column_sums({sums.data(), kStride, kHeld, small}, prompt.q, prompt.k, prompt.past, 0,
              prompt.scale, DType::kF32, stream);
  EXPECT_EQ(small, want.small);
  for (size_t head = 0; head < 2; ++head) {
    for (size_t j = 0; j < kStride; ++j) {
      const double held = j < kHeld || j >= 40 ? 0.5 : 0;
      EXPECT_EQ(sums[head * kStride + j], held + (j < 40 ? want.sums[head * 40 + j] : 0.0)) << j;
    }
  }
  EXPECT_THROW(column_sums({sums.data(), 39, 0}, prompt.q, prompt.k, prompt.past, 0, prompt.scale,
                           DType::kF32, stream),
               Error);
  EXPECT_THROW(column_sums({sums.data(), kStride, 41}, prompt.q, prompt.k, prompt.past, 0,
                           prompt.scale, DType::kF32, stream),
               Error);
  EXPECT_THROW(column_sums({sums.data(), kStride, 0}, prompt.q, prompt.k, prompt.past, 40,
                           prompt.scale, DType::kF32, stream),
               Error);
}

TEST(ColumnSums, AreAveragedOverHeads) {
  // Two layers of three heads and two columns, by hand.
  const std::vector<double> sums = {1, 2, 4, 8, 1, 0.5, 3, 0, 0, 0, 0, 30};
  std::vector<double> means(4, 7.0);
  ThreadPool pool(1);
  Stream stream(pool);
  mean_over_heads(sums.data(), 2, 3, 2, means.data(), stream);
  EXPECT_THAT(means, ::testing::ElementsAre(2, 3.5, 1, 10));
}

TEST(ColumnSums, AreTheSameInPieces) {
  // A prompt fed in two pieces: the rows of the first are past rows of the second.
  const Prompt whole({.n = 90, .kv_heads = 1, .q_per_kv = 4});
  const Sums want = whole.run();
  ThreadPool pool(1);
  Stream stream(pool);
  std::vector<double> first(50);
  std::vector<double> all(90);
  column_sums(added(first), whole.q.view().slice(0, 50), whole.k.view().slice(0, 50), {}, 0,
              whole.scale, DType::kF32, stream);
  std::copy(first.begin(), first.end(), all.begin());
  const KeyValueRows past{whole.k.view().data(), nullptr, DType::kF32, 50};
  column_sums(added(all), whole.q.view().slice(50, 40), whole.k.view().slice(50, 40), {&past, 1}, 0,
              whole.scale, DType::kF32, stream);
  for (size_t j = 0; j < 90; ++j) EXPECT_NEAR(all[j], want.sums[j], 1e-5);
}

TEST(ColumnSums, AreBitIdenticalForAnyNumberOfThreads) {
  const Prompt prompt(
      {.n = 500, .kv_heads = 3, .q_per_kv = 4, .past_dtype = DType::kF16, .past_rows = {70}});
  const Sums one = prompt.run(1);
  const Sums three = prompt.run(3);
  EXPECT_EQ(one.sums, three.sums);
  EXPECT_EQ(one.small, three.small);
}

TEST(ColumnSums, RefuseWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Prompt good({.n = 5, .kv_heads = 2, .q_per_kv = 2, .head_dim = 8, .past_rows = {3}});
  Sums out = good.empty();
  const auto message = [&](ConstTensorView q, ConstTensorView k, std::span<const KeyValueRows> past,
                           int64_t first_row, size_t sums, size_t small, float scale = 1,
                           DType multiply = DType::kF32) {
    return message_of(ErrorCode::kInvalidArgument, [&] {
      column_sums(added(std::span(out.sums).first(sums), std::span(out.small).first(small), 2), q,
                  k, past, first_row, scale, multiply, stream);
    });
  };
  const Tensor other = normal_tensor(DType::kF32, {4, 2, 8}, 1);
  const Tensor three_heads = normal_tensor(DType::kF32, {5, 3, 8}, 1);
  const Tensor half = normal_tensor(DType::kF16, {5, 4, 8}, 1);
  EXPECT_THAT(message(good.q, other, good.past, 0, 16, 4), HasSubstr("k has shape (4, 2, 8)"));
  EXPECT_THAT(message(good.q, three_heads, {}, 0, 15, 4), HasSubstr("4 query heads"));
  EXPECT_THAT(message(half, good.k, good.past, 0, 16, 4), HasSubstr("f16"));
  EXPECT_THAT(message(good.q, good.k, good.past, 0, 15, 4), HasSubstr("sums have rows of 7,"));
  EXPECT_THAT(message(good.q, good.k, good.past, 0, 16, 3), HasSubstr("small_entries has 3"));
  EXPECT_THAT(message(good.q, good.k, good.past, 5, 16, 4), HasSubstr("first_row is 5"));
  EXPECT_THAT(message(good.q, good.k, good.past, -1, 16, 4), HasSubstr("first_row is -1"));
  EXPECT_THAT(message(good.q, good.k, std::span(good.past).first(1), 0, 16, 4),
              HasSubstr("1 cached segments"));
  EXPECT_THAT(message(good.q, good.k, good.past, 0, 16, 4, HUGE_VALF), HasSubstr("scale"));
  EXPECT_THAT(message(good.q, good.k, good.past, 0, 16, 4, 1, DType::kI32),
              HasSubstr("the type to multiply in is i32"));
  std::vector<KeyValueRows> bad = good.past;
  bad[1].rows = 2;
  EXPECT_THAT(message(good.q, good.k, bad, 0, 16, 4), HasSubstr("KV head 1 has 2 cached tokens"));
  bad = good.past;
  bad[1].keys = nullptr;
  EXPECT_THAT(message(good.q, good.k, bad, 0, 16, 4), HasSubstr("claims 3 cached tokens"));
  bad = good.past;
  bad[0].dtype = DType::kI32;
  EXPECT_THAT(message(good.q, good.k, bad, 0, 16, 4), HasSubstr("i32"));
}

class ColumnSumsOnEveryTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(ColumnSumsOnEveryTarget, EqualTheReference) {
  for (const int64_t n : {1, 5, 67}) {
    expect_parity({.n = n,
                   .q_per_kv = 3,
                   .head_dim = 72,
                   .first_row = n / 4,
                   .past_dtype = DType::kF16,
                   .past_rows = {9}});
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ColumnSumsOnEveryTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return hwy::TargetName(test.param); });

}  // namespace
}  // namespace kvlm
