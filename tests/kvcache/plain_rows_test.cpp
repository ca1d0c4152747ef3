#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "tests/allocations.h"
#include "tests/kvcache/plans.h"
#include "tests/reference/row_cache.h"

// Caches that drop and pack nothing: f32, f16 and bf16.
namespace kvlm {
namespace {

using test::plan_of;

using testing::AllOf;
using testing::HasSubstr;

/// What one sequence adds to a step.
struct Part {
  char sequence;
  int rows;
  bool prompt;
  bool goes_on = false;  // a prompt of which more follows
};

/// Drives a cache with random rows, sequence by name. The values of a row depend on the sequence,
/// its place in it and the layer alone, so that a sequence is fed the same in every company.
class Driver {
 public:
  Driver(DType format, const CacheShape& shape, size_t arena_bytes, int threads = 1)
      : format_(format),
        shape_(shape),
        pool_(threads),
        stream_(pool_),
        cache_(make_cache(plan_of(std::string(dtype_name(format)), shape), arena_bytes, {})) {}

  KvCache& cache() { return *cache_; }
  SequenceId id(char sequence) const { return ids_.at(sequence); }

  void open(char sequence, int max_rows) {
    ids_[sequence] = cache_->open({max_rows, 0, max_rows}, std::string(1, sequence));
    fed_[sequence] = 0;
    reference_[sequence].assign(static_cast<size_t>(shape_.layers),
                                reference::RowLayer(format_, static_cast<size_t>(shape_.q_heads),
                                                    static_cast<size_t>(shape_.kv_heads),
                                                    static_cast<size_t>(shape_.head_dim)));
  }
  void close(char sequence) {
    cache_->close(ids_.at(sequence));
    ids_.erase(sequence);
  }

  /// One forward pass; returns the output of every layer side by side, (layers, rows, q_heads,
  /// head_dim). With `check`, compares it with the scalar reference.
  std::vector<float> step(const std::vector<Part>& parts, bool check = false) {
    const auto width = static_cast<size_t>(shape_.q_heads) * static_cast<size_t>(shape_.head_dim);
    rows_.clear();
    int total = 0;
    for (const Part& part : parts) total += part.rows;
    for (const Part& part : parts) {
      rows_.push_back(
          {ids_.at(part.sequence), part.rows, part.prompt, part.prompt && !part.goes_on, {}});
    }
    std::vector<float> outputs;
    cache_->begin(rows_, stream_);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      fill(q_, parts, layer, 0, shape_.q_heads);
      fill(k_, parts, layer, 1, shape_.kv_heads);
      fill(v_, parts, layer, 2, shape_.kv_heads);
      const std::vector<float> q = q_;
      const auto view = [&](std::vector<float>& x, int heads) {
        return TensorView(x.data(), DType::kF32, {total, heads, shape_.head_dim});
      };
      const float scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
      const TensorView out = view(q_, shape_.q_heads);  // in place, as the decoder does
      cache_->attend(layer, out, view(k_, shape_.kv_heads), view(v_, shape_.kv_heads), out, scale,
                     stream_);
      outputs.insert(outputs.end(), q_.begin(), q_.end());
      if (check) compare(parts, layer, q, static_cast<double>(scale), width);
    }
    cache_->end(stream_);
    for (const Part& part : parts) fed_.at(part.sequence) += part.rows;
    return outputs;
  }

 private:
  void fill(std::vector<float>& values, const std::vector<Part>& parts, int layer, int what,
            int heads) const {
    values.clear();
    std::normal_distribution<float> normal;
    for (const Part& part : parts) {
      for (int r = 0; r < part.rows; ++r) {
        const int place = fed_.at(part.sequence) + r;
        std::minstd_rand rng(
            static_cast<unsigned>(((place * 31 + layer) * 3 + what) * 127 + part.sequence));
        rng.discard(3);
        normal.reset();
        // Keys grow along the sequence, so that the running maximum moves in every tile.
        const float size = what == 1 ? 1 + 0.01f * static_cast<float>(place) : 1;
        for (int i = 0; i < heads * shape_.head_dim; ++i) values.push_back(size * normal(rng));
      }
    }
  }

  void compare(const std::vector<Part>& parts, int layer, const std::vector<float>& q, double scale,
               size_t width) {
    const auto kv_width =
        static_cast<size_t>(shape_.kv_heads) * static_cast<size_t>(shape_.head_dim);
    size_t row = 0;
    for (const Part& part : parts) {
      const auto rows = static_cast<size_t>(part.rows);
      const auto expected = reference_.at(part.sequence)[static_cast<size_t>(layer)].attend(
          q.data() + row * width, k_.data() + row * kv_width, v_.data() + row * kv_width, rows,
          part.prompt, scale, [&](size_t r) { return r % 37 == 0 || r + 1 == rows; });
      for (size_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < expected[r].size(); ++i) {
          ASSERT_NEAR(static_cast<double>(q_[(row + r) * width + i]), expected[r][i], 2e-5)
              << "sequence " << part.sequence << ", row " << r << " of " << rows << ", layer "
              << layer << ", channel " << i;
        }
      }
      row += rows;
    }
  }

  DType format_;
  CacheShape shape_;
  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<KvCache> cache_;
  std::map<char, SequenceId> ids_;
  std::map<char, int> fed_;
  std::map<char, std::vector<reference::RowLayer>> reference_;
  std::vector<StepRows> rows_;
  std::vector<float> q_, k_, v_;
};

size_t arena_for(DType format, const CacheShape& shape, std::initializer_list<int> max_rows) {
  size_t bytes = 0;
  for (const int rows : max_rows)
    bytes += reservation(*plan_of(std::string(dtype_name(format)), shape), {1, 0, rows}).bytes();
  return bytes;
}

/// Keys and values of every layer and kv_head.
size_t formula(DType format, const CacheShape& shape, int tokens) {
  size_t bytes = format == DType::kF32 ? 4 : 2;
  for (const int factor : {2, shape.layers, shape.kv_heads, shape.head_dim, tokens}) {
    bytes *= static_cast<size_t>(factor);
  }
  return bytes;
}

using Shape3 = std::tuple<DType, int, int>;  // format, head_dim, q_per_kv

class PlainRowsParity : public testing::TestWithParam<Shape3> {};

/// Sequences of different lengths that join, decode, take a second prompt and leave, all in the
/// same passes.
TEST_P(PlainRowsParity, RaggedBatchesEqualTheScalarReference) {
  const auto [format, head_dim, q_per_kv] = GetParam();
  const CacheShape shape{2, 2 * q_per_kv, 2, head_dim, {}};
  Driver driver(format, shape, arena_for(format, shape, {64, 300, 40}));
  driver.open('A', 64);
  driver.open('B', 300);
  driver.step({{'A', 7, true}, {'B', 255, true}}, true);
  driver.open('C', 40);
  driver.step({{'B', 1, false}, {'C', 1, true}, {'A', 1, false}}, true);
  for (int i = 0; i < 3; ++i) {  // B passes 256 rows here
    driver.step({{'A', 1, false}, {'B', 1, false}, {'C', 1, false}}, true);
  }
  driver.step({{'A', 19, true}, {'B', 1, false}, {'C', 5, true}}, true);  // second turns
  driver.step({{'C', 1, false}, {'A', 1, false}}, true);
  driver.step({{'B', 30, true}}, true);
  driver.step({{'B', 1, false}, {'A', 1, false}}, true);
  driver.close('B');
  driver.open('D', 290);  // takes B's place, whose rows must be forgotten
  driver.step({{'C', 1, false}, {'D', 33, true}, {'A', 1, false}}, true);
  driver.step({{'D', 1, false}, {'C', 1, false}}, true);
  EXPECT_EQ(driver.cache().tokens(driver.id('A')), 7 + 4 + 19 + 2 + 1);
  EXPECT_EQ(driver.cache().tokens(driver.id('D')), 34);
}

INSTANTIATE_TEST_SUITE_P(, PlainRowsParity,
                         testing::Combine(testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                                          testing::Values(12, 32, 64, 80, 128),
                                          testing::Values(1, 2, 4, 7)),
                         [](const testing::TestParamInfo<Shape3>& param) {
                           return fmt::format("{}_d{}_g{}", dtype_name(std::get<0>(param.param)),
                                              std::get<1>(param.param), std::get<2>(param.param));
                         });

/// A prompt that comes in parts sees its earlier ones as they are stored, while others decode and
/// bring prompts of their own.
TEST_P(PlainRowsParity, PromptsInPartsEqualTheScalarReference) {
  const auto [format, head_dim, q_per_kv] = GetParam();
  const CacheShape shape{2, 2 * q_per_kv, 2, head_dim, {}};
  Driver driver(format, shape, arena_for(format, shape, {300, 64}));
  driver.open('A', 300);
  driver.open('B', 64);
  driver.step({{'A', 33, true, true}, {'B', 7, true}}, true);
  driver.step({{'B', 1, false}, {'A', 1, true, true}}, true);
  driver.step({{'A', 230, true, true}, {'B', 1, false}}, true);
  driver.step({{'B', 5, true, true}, {'A', 4, true}}, true);
  driver.step({{'A', 1, false}, {'B', 2, true}}, true);
  driver.step({{'B', 1, false}, {'A', 1, false}}, true);
  EXPECT_EQ(driver.cache().tokens(driver.id('A')), 33 + 1 + 230 + 4 + 2);
  EXPECT_EQ(driver.cache().tokens(driver.id('B')), 7 + 2 + 5 + 2 + 1);
  EXPECT_EQ(driver.cache().bytes(), formula(format, shape, 270 + 17));
}

/// Neither the company nor the threads change one bit of a sequence's outputs.
TEST(PlainRows, OutputsDependOnTheSequenceAlone) {
  const CacheShape shape{2, 6, 3, 20, {}};
  const auto run = [&](int threads, const std::string& company) {
    Driver driver(DType::kF16, shape, 1 << 22, threads);
    driver.open('A', 320);
    for (const char other : company) driver.open(other, 100);
    std::vector<float> outputs;
    const auto keep_a = [&](const std::vector<float>& all, size_t total, size_t first,
                            size_t rows) {
      const size_t width = 6 * 20;
      for (size_t layer = 0; layer < 2; ++layer) {
        const auto begin =
            all.begin() + static_cast<std::ptrdiff_t>((layer * total + first) * width);
        outputs.insert(outputs.end(), begin, begin + static_cast<std::ptrdiff_t>(rows * width));
      }
    };
    keep_a(driver.step({{'A', 250, true}}), 250, 0, 250);
    for (size_t i = 0; i < company.size(); ++i) {
      driver.step({{company[i], 3 + 11 * static_cast<int>(i), true}});
    }
    for (int step = 0; step < 20; ++step) {
      std::vector<Part> parts;
      for (const char other : company) parts.push_back({other, 1, false});
      const size_t first = parts.size() / 2;
      parts.insert(parts.begin() + static_cast<std::ptrdiff_t>(first), {'A', 1, false});
      keep_a(driver.step(parts), parts.size(), first, 1);
    }
    return outputs;
  };
  const std::vector<float> alone = run(1, "");
  for (const int threads : {1, 2, 3, 5}) {
    EXPECT_EQ(run(threads, ""), alone) << threads << " threads";
    EXPECT_EQ(run(threads, "BCDEFGH"), alone) << threads << " threads, in a batch of 8";
  }
}

class PlainRowsFormat : public testing::TestWithParam<DType> {};

/// bytes() is what the formula of the spec says, after the prompt and after every decode step.
TEST_P(PlainRowsFormat, BytesEqualTheFormulaAtEveryStep) {
  const DType format = GetParam();
  const CacheShape shape{3, 4, 2, 12, {}};
  Driver driver(format, shape, arena_for(format, shape, {360, 330, 340}));
  KvCache& cache = driver.cache();
  EXPECT_EQ(cache.bytes(), 0u);
  driver.open('A', 360);
  driver.open('B', 330);
  EXPECT_EQ(cache.bytes(), 0u) << "opening reserves, it does not use";
  driver.step({{'A', 47, true}});
  EXPECT_EQ(cache.bytes(), formula(format, shape, 47));
  driver.step({{'B', 5, true}});
  int a = 47;
  int b = 5;
  for (int step = 0; step < 300; ++step) {
    if (step == 100) {
      driver.open('C', 340);
      driver.step({{'C', 9, true}});
    }
    std::vector<Part> parts = {{'A', 1, false}, {'B', 1, false}};
    if (step >= 100) parts.push_back({'C', 1, false});
    driver.step(parts);
    const int c = step >= 100 ? 9 + step - 99 : 0;
    ASSERT_EQ(cache.bytes(), formula(format, shape, ++a + ++b + c)) << "step " << step;
    ASSERT_EQ(cache.report(driver.id('A')).bytes, formula(format, shape, a));
    ASSERT_EQ(cache.report(driver.id('B')).bytes, formula(format, shape, b));
    ASSERT_EQ(cache.tokens(driver.id('A')), a);
  }
  driver.close('B');
  EXPECT_EQ(cache.bytes(), formula(format, shape, a + 209));
  driver.close('A');
  driver.close('C');
  EXPECT_EQ(cache.bytes(), 0u);
}

TEST_P(PlainRowsFormat, ReportsBitsAndSlots) {
  const DType format = GetParam();
  const CacheShape shape{2, 4, 2, 12, {}};
  Driver driver(format, shape, 1 << 20);
  driver.open('A', 10);
  const CacheReport empty = driver.cache().report(driver.id('A'));
  EXPECT_EQ(empty.bytes, 0u);
  EXPECT_EQ(empty.stored_bits, 0);
  driver.step({{'A', 6, true}});
  const CacheReport report = driver.cache().report(driver.id('A'));
  const auto bits = static_cast<double>(8 * dtype_bytes(format));
  EXPECT_EQ(report.stored_bits, bits);
  EXPECT_EQ(report.nominal_bits, bits);
  EXPECT_EQ(report.f16_bytes, 2u * 2 * 2 * 2 * 12 * 6);
  EXPECT_EQ(report.slots, 6);
}

INSTANTIATE_TEST_SUITE_P(, PlainRowsFormat, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& param) { return std::string(dtype_name(param.param)); });

TEST(PlainRows, RefusesByNameAndFigureAndChangesNothing) {
  const CacheShape shape{2, 4, 2, 16, {}};
  // Per layer of 20 rows: 2 x 2 x 20 x 16 x 2 bytes = 2560.
  Driver driver(DType::kF16, shape, 2 * 2560 + 2 * 640);
  driver.open('A', 20);
  driver.step({{'A', 11, true}});
  const size_t bytes = driver.cache().bytes();
  try {
    driver.cache().open({3, 0, 6}, "record-17");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("record-17"), HasSubstr("6 tokens under --kv f16"),
                      HasSubstr("takes 1.5 kB"), HasSubstr("1.3 kB of 6.4 kB are free")));
  }
  EXPECT_EQ(driver.cache().bytes(), bytes);
  EXPECT_EQ(driver.cache().tokens(driver.id('A')), 11);
  driver.open('B', 5);  // what is left, to the byte
  driver.step({{'A', 1, false}, {'B', 4, true}}, false);
  driver.close('B');
  EXPECT_THROW(driver.cache().open({6, 0, 6}, "c"), Error);
  driver.open('B', 5);
}

TEST(PlainRows, MemoryOfClosedSequencesIsReused) {
  const CacheShape shape{3, 4, 4, 8, {}};
  Driver driver(DType::kF32, shape, arena_for(DType::kF32, shape, {16, 16}));
  driver.open('A', 16);
  driver.open('B', 16);
  for (int turn = 0; turn < 50; ++turn) {
    const char leaving = turn % 2 == 0 ? 'A' : 'B';
    driver.step({{leaving, 5, true}}, true);
    driver.step({{leaving, 1, false}}, true);
    driver.close(leaving);
    driver.open(leaving, 16);
    EXPECT_EQ(driver.cache().tokens(driver.id(leaving)), 0);
  }
  driver.close('A');
  driver.close('B');
  EXPECT_EQ(driver.cache().bytes(), 0u);
  driver.open('C', 32);  // both places, side by side
}

TEST(PlainRows, RefusesMoreRowsThanWereReserved) {
  const CacheShape shape{1, 2, 1, 8, {}};
  Driver driver(DType::kF16, shape, 1 << 16);
  driver.open('A', 6);
  driver.step({{'A', 5, true}});
  const size_t bytes = driver.cache().bytes();
  try {
    driver.step({{'A', 2, true}});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("5 tokens"), HasSubstr("grow by 2"), HasSubstr("6")));
  }
  EXPECT_EQ(driver.cache().bytes(), bytes);
  driver.step({{'A', 1, false}}, false);
  EXPECT_THROW(driver.step({{'A', 1, false}}), Error);
}

/// begin, attend and end of a decode step allocate nothing, for one sequence and for many, also
/// where a sequence passes into a new piece of work (256 rows).
TEST(PlainRows, DecodeAllocatesNothing) {
  const CacheShape shape{2, 4, 2, 16, {}};
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    Stream stream(pool);
    const auto cache = make_cache(plan_of("f16", shape), 1 << 22, {});
    constexpr size_t kSequences = 5;
    std::vector<SequenceId> ids;
    for (size_t i = 0; i < kSequences; ++i) ids.push_back(cache->open({1, 0, 400}, "x"));
    std::vector<float> q(kSequences * 4 * 16, 0.5f);
    std::vector<float> kv(kSequences * 2 * 16, 0.25f);
    std::vector<StepRows> rows(kSequences);
    const auto step = [&](int64_t n) {
      const TensorView q_view(q.data(), DType::kF32, {n, 4, 16});
      const TensorView kv_view(kv.data(), DType::kF32, {n, 2, 16});
      cache->begin(rows, stream);
      for (int layer = 0; layer < 2; ++layer) {
        cache->attend(layer, q_view, kv_view, kv_view, q_view, 0.25f, stream);
      }
      cache->end(stream);
    };
    const auto decode = [&] {
      for (size_t i = 0; i < kSequences; ++i) rows[i] = {ids[i], 1, false, false, {}};
      step(kSequences);
    };
    for (const SequenceId id : ids) {
      rows = {{id, 1, true, true, {}}};
      step(1);
    }
    rows.resize(kSequences);
    decode();
    const size_t before = allocations();
    for (int i = 0; i < 300; ++i) decode();
    EXPECT_EQ(allocations() - before, 0u) << threads << " threads";
  }
}

}  // namespace
}  // namespace kvlm
