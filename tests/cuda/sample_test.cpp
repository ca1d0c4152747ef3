// A GPU chooses the tokens that the CPU chooses.
#include "kernels/sample.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "tests/cuda/fixture.h"
#include "tests/kernels/sample_cases.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::make_tensor;
using testing::SampleCase;
using testing::SampleInput;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CudaSample : public testing::Cuda {
 protected:
  /// Both devices choose from `input`; afterwards both have seen the same ids.
  void expect_equal(SampleInput& input, const std::string& what) {
    Tensor logits = on_gpu(input.logits);
    const auto size = static_cast<int64_t>(input.seen.size());
    Tensor seen = on_gpu(ConstTensorView(input.seen.data(), DType::kI32, {size}));
    std::vector<RowSampling> rows = input.rows;
    for (RowSampling& row : rows) {
      if (row.seen != nullptr) {
        row.seen = reinterpret_cast<uint32_t*>(seen.view().data()) + (row.seen - input.seen.data());
      }
    }
    std::vector<int32_t> ids(rows.size(), -7);
    std::vector<int32_t> expected(rows.size(), -8);
    sample_rows(ids, logits, rows, *gpu_);
    sample_rows(expected, input.logits, input.rows, cpu_);
    for (size_t i = 0; i < ids.size(); ++i) {
      const RowSampling& row = rows[i];
      EXPECT_EQ(ids[i], expected[i])
          << what << ", row " << i << ": temperature " << row.temperature << ", top_k " << row.top_k
          << ", top_p " << row.top_p << ", penalty " << row.repetition_penalty << ", uniform "
          << row.uniform;
    }
    EXPECT_TRUE(testing::same_bits(on_host(seen).view(),
                                   ConstTensorView(input.seen.data(), DType::kI32, {size})))
        << what;
  }

  /// The same of given logits, which all rows have.
  void expect_equal(const std::vector<float>& logits, const RowSampling& how) {
    const auto vocab = static_cast<int64_t>(logits.size());
    SampleInput input({vocab, 1, testing::Logits::kEqual, true, 1});
    input.logits = make_tensor(DType::kF32, {1, vocab}, logits);
    input.rows = {how};
    expect_equal(input, "given logits");
  }
};

TEST_F(CudaSample, ChoosesTheSameTokens) {
  for (const SampleCase& c : testing::sample_cases()) {
    SampleInput input(c);
    expect_equal(input, c.str());
  }
}

TEST_F(CudaSample, ManyRowsToo) {
  for (const int64_t rows : {64, 512, 1100}) {
    for (const bool greedy : {true, false}) {
      const SampleCase c{777, rows, testing::Logits::kTies, greedy, 5};
      SampleInput input(c);
      expect_equal(input, c.str());
    }
  }
}

TEST_F(CudaSample, TiesAndInfinities) {
  std::vector<float> late(5000, -3);
  late[4100] = late[2100] = late[4999] = 2;  // in splits of several blocks
  std::vector<float> infinite(5000, 1);
  infinite[3000] = infinite[4000] = kInfinity;
  infinite[10] = -kInfinity;
  const std::vector<std::vector<float>> all = {
      {7},         {-0.0f, 0.0f}, {0, -0.0f}, {-kInfinity, -kInfinity, -kInfinity},
      late,        infinite,      {1, NAN},   {NAN, kInfinity, 3},
      {2, 2, 2, 2}};
  for (const std::vector<float>& logits : all) {
    for (const double temperature : {0.0, 1.0}) {
      for (const int top_k : {0, 1, 2, 4500}) {
        for (const double top_p : {1.0, 0.5, 0.25, 0.0}) {
          // The last number below 1 falls between two tokens to within rounding.
          for (const double uniform : {0.0, 0.25, 0.5, 0.75, 1 - 0x1p-20}) {
            RowSampling how;
            how.temperature = temperature;
            how.top_k = top_k;
            how.top_p = top_p;
            how.uniform = uniform;
            expect_equal(logits, how);
          }
        }
      }
    }
  }
}

TEST_F(CudaSample, DrawsAreTheSameInEveryRun) {
  std::mt19937_64 random(3);
  const Tensor logits = testing::normal_tensor(DType::kF32, {40, 92553}, 4, 0.5f);
  std::vector<RowSampling> rows(40);
  for (RowSampling& row : rows) {
    row.temperature = 1;
    row.top_p = 0.95;
    row.uniform = static_cast<double>(random() >> 11) * 0x1p-53;
  }
  std::vector<int32_t> first(rows.size());
  for (int run = 0; run < 5; ++run) {
    Tensor placed = on_gpu(logits);
    std::vector<int32_t> ids(rows.size());
    sample_rows(ids, placed, rows, *gpu_);
    if (run == 0) first = ids;
    EXPECT_EQ(ids, first);
    for (size_t i = 0; i < rows.size(); i += 13) {  // one row alone
      placed = on_gpu(logits.view().slice(static_cast<int64_t>(i), 1));
      sample_rows(std::span(ids).subspan(i, 1), placed, std::span(rows).subspan(i, 1), *gpu_);
      EXPECT_EQ(ids[i], first[i]);
    }
  }
}

}  // namespace
}  // namespace kvlm
