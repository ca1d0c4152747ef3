// Prompt attention on the tensor cores and the sums of its columns, against the CPU in f32.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/column_sums.h"
#include "kernels/elementwise.h"
#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::Cuda;
using testing::kGpu;
using testing::make_tensor;
using testing::normal_tensor;

struct Prompt {
  int64_t n = 1;
  int kv_heads = 1;
  int q_per_kv = 1;
  int head_dim = 64;
  bool causal = true;
  bool past = false;

  Shape q_shape() const { return {n, kv_heads * q_per_kv, head_dim}; }
  Shape k_shape() const { return {n, kv_heads, head_dim}; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(head_dim)); }
  std::string name() const {
    return "n " + std::to_string(n) + ", " + std::to_string(kv_heads) + " x " +
           std::to_string(q_per_kv) + " heads of " + std::to_string(head_dim) +
           (causal ? ", causal" : "") + (past ? ", past" : "");
  }
};

class PromptOnGpu : public Cuda {
 protected:
  struct Operands {
    Tensor q, k, v;
    std::vector<Tensor> runs;        // keys, then values, of each run of each kv_head
    std::vector<KeyValueRows> past;  // empty for none
  };

  /// Three runs of earlier rows a kv_head, each of another format.
  static Operands operands(const Prompt& p) {
    Operands made{normal_tensor(DType::kF32, p.q_shape(), 1),
                  normal_tensor(DType::kF32, p.k_shape(), 2),
                  normal_tensor(DType::kF32, p.k_shape(), 3),
                  {},
                  {}};
    struct Run {
      DType dtype;
      int64_t rows;
    };
    uint32_t seed = 3;
    for (int head = 0; p.past && head < p.kv_heads; ++head) {
      for (const Run& run : {Run{DType::kF16, 33}, Run{DType::kBF16, 70}, Run{DType::kF32, 12}}) {
        for (int part = 0; part < 2; ++part) {
          made.runs.push_back(normal_tensor(run.dtype, {run.rows, p.head_dim}, ++seed));
        }
      }
    }
    describe(made);
    return made;
  }
  static void describe(Operands& made) {
    made.past.clear();
    for (size_t i = 0; i < made.runs.size(); i += 2) {
      const Tensor& keys = made.runs[i];
      made.past.push_back({keys.view().data(), made.runs[i + 1].view().data(), keys.dtype(),
                           keys.view().shape()[0]});
    }
  }
  Operands placed(const Operands& host) {
    Operands made{on_gpu(host.q), on_gpu(host.k), on_gpu(host.v), {}, {}};
    for (const Tensor& run : host.runs) made.runs.push_back(on_gpu(run));
    describe(made);
    return made;
  }

  void expect_parity(const Prompt& p) {
    const Operands host = operands(p);
    const Operands gpu = placed(host);
    const auto size = static_cast<size_t>(p.q_shape().elements());
    const Tensor poison =
        make_tensor(DType::kF32, p.q_shape(), std::vector<float>(size, std::nanf("")));
    Tensor out(DType::kF32, p.q_shape());
    attention(out, host.q, host.k, host.v, host.past, p.causal, p.scale(), DType::kF32, cpu_);
    for (const DType multiply : {DType::kF16, DType::kBF16}) {
      Tensor gpu_out = on_gpu(poison);
      attention(gpu_out, gpu.q, gpu.k, gpu.v, gpu.past, p.causal, p.scale(), multiply, *gpu_);
      EXPECT_LE(error(gpu_out, out), multiply == DType::kF16 ? 2e-3 : 1.5e-2)
          << p.name() << ", " << dtype_name(multiply);
    }
  }
};

TEST_F(PromptOnGpu, AttendsAsOnTheCpu) {
  for (const int head_dim : {32, 64, 80, 96, 128, 256}) {
    for (const int q_per_kv : {1, 4, 7}) {
      for (const int64_t n : {1, 2, 63, 64, 65, 129, 577}) {
        for (const bool causal : {true, false}) {
          for (const bool past : {false, true}) {
            const int kv_heads = q_per_kv == 7 ? 1 : 2;
            expect_parity({n, kv_heads, q_per_kv, head_dim, causal, past});
          }
        }
      }
    }
  }
}

TEST_F(PromptOnGpu, AttendsWithBlocksEnoughForEveryMultiprocessor) {
  for (const int head_dim : {32, 64, 80, 96, 128, 256}) {
    for (const bool causal : {true, false}) {
      for (const bool past : {false, true}) {
        expect_parity({1100, 8, 8, head_dim, causal, past});
      }
    }
  }
}

TEST_F(PromptOnGpu, AttendsWithHeadsOfOddSizes) {
  for (const int head_dim : {1, 7, 20, 30, 97, 200}) {
    for (const bool past : {false, true}) {
      expect_parity({70, 2, 2, head_dim, true, past});
    }
  }
}

TEST_F(PromptOnGpu, MayOverwriteItsQueries) {
  const Prompt p{.n = 1100, .kv_heads = 8, .q_per_kv = 8, .head_dim = 128};
  const Operands gpu = placed(operands(p));
  Tensor apart(DType::kF32, p.q_shape(), kGpu);
  Tensor in_place = on_gpu(operands(p).q);
  attention(apart, gpu.q, gpu.k, gpu.v, {}, true, p.scale(), DType::kF16, *gpu_);
  attention(in_place, in_place, gpu.k, gpu.v, {}, true, p.scale(), DType::kF16, *gpu_);
  EXPECT_EQ(error(in_place, on_host(apart)), 0);
}

TEST_F(PromptOnGpu, FollowsScoresThatGrowAndShrink) {
  // Maxima that rise by less and by more than what sums are rescaled for.
  for (const float step : {0.05f, 1.0f, -1.0f}) {
    const Prompt p{.n = 300, .head_dim = 64};
    Operands host = operands(p);
    for (int64_t row = 0; row < p.n; ++row) {
      for (int64_t channel = 0; channel < 64; ++channel) {
        host.q.as<float>()[row * 64 + channel] = channel == 0 ? 8.0f : 0.0f;
        if (channel == 0) {
          host.k.as<float>()[row * 64] = step * static_cast<float>(row % 128);
        }
      }
    }
    const Operands gpu = placed(host);
    Tensor out(DType::kF32, p.q_shape());
    attention(out, host.q, host.k, host.v, {}, true, p.scale(), DType::kF32, cpu_);
    Tensor gpu_out(DType::kF32, p.q_shape(), kGpu);
    attention(gpu_out, gpu.q, gpu.k, gpu.v, {}, true, p.scale(), DType::kF16, *gpu_);
    EXPECT_LE(error(gpu_out, out), 5e-2) << step;  // keys of up to 128 carry errors of 2^-4
  }
}

TEST_F(PromptOnGpu, ClampsWhatAHalfCannotHold) {
  const Prompt p{.n = 3, .head_dim = 32};
  const Operands gpu = placed(operands(p));
  const auto size = static_cast<size_t>(p.k_shape().elements());
  const Tensor huge =
      on_gpu(make_tensor(DType::kF32, p.k_shape(), std::vector<float>(size, -1e6f)));
  Tensor out(DType::kF32, p.q_shape(), kGpu);
  attention(out, gpu.q, gpu.k, huge, {}, true, p.scale(), DType::kF16, *gpu_);
  const Tensor clamped = make_tensor(DType::kF32, p.k_shape(), std::vector<float>(size, -65504.0f));
  EXPECT_LE(error(out, clamped), 1e-3);
}

class ColumnSumsOnGpu : public PromptOnGpu {
 protected:
  struct Sums {
    std::vector<double> sums, small;
  };

  /// The same with numbers that f16 and bf16 hold exactly.
  static Tensor coarse(const Tensor& x) {
    std::vector<float> values;
    for (const double value : testing::values_of(x)) {
      values.push_back(static_cast<float>(std::clamp(std::round(value * 32) / 32, -7.0, 7.0)));
    }
    return make_tensor(x.dtype(), x.shape(), values);
  }
  static Operands coarse_operands(const Prompt& p) {
    Operands made = operands(p);
    made.q = coarse(made.q);
    made.k = coarse(made.k);
    for (Tensor& run : made.runs) run = coarse(run);
    describe(made);
    return made;
  }
  /// A scale that turns them into such numbers, of which powers of two are taken.
  static float coarse_scale() { return 0.125f * std::log(2.0f); }

  static Sums run(const Prompt& p, const Operands& on, int64_t first_row, float scale,
                  DType multiply, Stream& stream) {
    int64_t columns = p.n;
    for (size_t i = 0; i < on.past.size() / static_cast<size_t>(p.kv_heads); ++i) {
      columns += on.past[i].rows;
    }
    // Sums are added to what is there.
    Sums found{std::vector<double>(static_cast<size_t>(p.kv_heads * columns), 0.5),
               std::vector<double>(static_cast<size_t>(p.kv_heads * p.q_per_kv), 3.0)};
    add_sums(found.sums, found.small, on, first_row, scale, multiply, stream);
    return found;
  }

  /// Adds to sums on the host.
  static void add_sums(std::vector<double>& sums, std::span<double> small, const Operands& on,
                       int64_t first_row, float scale, DType multiply, Stream& stream) {
    const int64_t columns = static_cast<int64_t>(sums.size()) / on.k.shape()[1];
    const Shape bytes{static_cast<int64_t>(sums.size() * sizeof(double))};
    Tensor there(DType::kU8, bytes, stream.device());
    copy(there, ConstTensorView(sums.data(), DType::kU8, bytes), stream);
    column_sums({reinterpret_cast<double*>(there.view().data()), columns, columns, small}, on.q,
                on.k, on.past, first_row, scale, multiply, stream);
    copy(TensorView(sums.data(), DType::kU8, bytes), there, stream);
  }

  void expect_parity(const Prompt& p, int64_t first_row, DType multiply = DType::kF32) {
    const bool rounds = multiply != DType::kF32;
    const Operands host = rounds ? coarse_operands(p) : operands(p);
    const float scale = rounds ? coarse_scale() : p.scale();
    const Operands gpu = placed(host);
    const Sums expected = run(p, host, first_row, scale, multiply, cpu_);
    const Sums found = run(p, gpu, first_row, scale, multiply, *gpu_);
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < expected.sums.size(); ++i) {
      difference += std::pow(found.sums[i] - expected.sums[i], 2);
      norm += std::pow(expected.sums[i] - 0.5, 2);
    }
    const std::string name = p.name() + ", from row " + std::to_string(first_row) +
                             ", multiplied in " + std::string(dtype_name(multiply));
    EXPECT_LE(std::sqrt(difference / norm), 1e-5) << name;
    for (size_t head = 0; head < expected.small.size(); ++head) {
      // Entries at the threshold may fall on either side.
      EXPECT_NEAR(found.small[head], expected.small[head], 1 + 1e-4 * expected.small[head])
          << name << ", head " << head;
    }
    const Sums again = run(p, gpu, first_row, scale, multiply, *gpu_);
    EXPECT_EQ(again.sums, found.sums) << name;
    EXPECT_EQ(again.small, found.small) << name;
  }
};

TEST_F(ColumnSumsOnGpu, EqualTheCpus) {
  for (const int head_dim : {20, 64, 80, 128, 256}) {
    for (const int q_per_kv : {1, 4, 7}) {
      for (const int64_t n : {1, 2, 63, 64, 65, 300}) {
        for (const bool past : {false, true}) {
          for (const int64_t first_row : {int64_t{0}, n / 2, n - 1}) {
            expect_parity({n, 2, q_per_kv, head_dim, true, past}, first_row);
          }
        }
      }
    }
  }
}

TEST_F(ColumnSumsOnGpu, EqualTheCpusOnTheTensorCores) {
  for (const int head_dim : {20, 32, 64, 80, 128, 130, 256}) {
    for (const int q_per_kv : {1, 4, 7}) {
      for (const int64_t n : {1, 31, 33, 64, 129, 300}) {
        for (const bool past : {false, true}) {
          for (const int64_t first_row : {int64_t{0}, n / 2, n - 1}) {
            const DType multiply = n % 2 == 0 ? DType::kBF16 : DType::kF16;
            expect_parity({n, 2, q_per_kv, head_dim, true, past}, first_row, multiply);
          }
        }
      }
    }
  }
}

TEST_F(ColumnSumsOnGpu, EqualTheCpusForLongPrompts) {
  for (const DType multiply : {DType::kF32, DType::kF16, DType::kBF16}) {
    expect_parity({1500, 2, 4, 128, true, true}, 0, multiply);
    expect_parity({1500, 2, 4, 128, true, true}, 1468, multiply);
  }
}

/// Beside attention: its outputs are those of attention alone, also where they take the place of
/// the queries, and the sums are the CPU's.
TEST_F(ColumnSumsOnGpu, ComeWithAttention) {
  bool attention_gave = false;  // sums that the two passes do not
  const auto expect = [this, &attention_gave](const Prompt& p, DType multiply,
                                              float steepness = 1) {
    Operands host = coarse_operands(p);
    const Operands gpu = placed(host);
    const float scale = coarse_scale() * steepness;
    const int64_t columns = p.n + (p.past ? 33 + 70 + 12 : 0);
    const int64_t stride = columns + 5;
    std::vector<double> expected(static_cast<size_t>(p.kv_heads * stride), 0.5);
    column_sums({expected.data(), stride, columns}, host.q, host.k, host.past, 0, scale,
                DType::kF32, cpu_);
    Tensor alone(DType::kF32, p.q_shape(), kGpu);
    attention(alone, gpu.q, gpu.k, gpu.v, gpu.past, true, scale, multiply, *gpu_);
    std::vector<double> first;
    for (const bool in_place : {false, true}) {
      std::vector<double> found(expected.size(), 0.5);
      const Shape bytes{static_cast<int64_t>(found.size() * sizeof(double))};
      Tensor sums(DType::kU8, bytes, kGpu);
      copy(sums, ConstTensorView(found.data(), DType::kU8, bytes), *gpu_);
      Tensor out = in_place ? on_gpu(host.q) : Tensor(DType::kF32, p.q_shape(), kGpu);
      attend_and_sum({reinterpret_cast<double*>(sums.view().data()), stride, columns}, out,
                     in_place ? out : gpu.q, gpu.k, gpu.v, gpu.past, 0, scale, multiply, *gpu_);
      copy(TensorView(found.data(), DType::kU8, bytes), sums, *gpu_);
      const std::string name = p.name() + ", multiplied in " + std::string(dtype_name(multiply));
      EXPECT_EQ(error(out, on_host(alone)), 0) << name;
      double difference = 0;
      double norm = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        difference += std::pow(found[i] - expected[i], 2);
        norm += std::pow(expected[i] - 0.5, 2);
      }
      EXPECT_LE(std::sqrt(difference / norm), 1e-5) << name;
      if (in_place) {
        EXPECT_EQ(found, first) << name;
      }
      first = found;
    }
    std::vector<double> passes(expected.size(), 0.5);
    const Shape bytes{static_cast<int64_t>(passes.size() * sizeof(double))};
    Tensor sums(DType::kU8, bytes, kGpu);
    copy(sums, ConstTensorView(passes.data(), DType::kU8, bytes), *gpu_);
    column_sums({reinterpret_cast<double*>(sums.view().data()), stride, columns}, gpu.q, gpu.k,
                gpu.past, 0, scale, multiply, *gpu_);
    copy(TensorView(passes.data(), DType::kU8, bytes), sums, *gpu_);
    attention_gave = attention_gave || passes != first;
  };
  for (const DType multiply : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int head_dim : {20, 32, 64, 96, 128, 130, 256}) {
      for (const int64_t n : {1, 31, 64, 129, 300}) {
        expect({n, 2, n % 2 == 0 ? 4 : 7, head_dim, true, n % 3 == 0}, multiply);
      }
    }
    expect({1100, 8, 4, 128, true, true}, multiply);    // two row tiles a warp
    expect({300, 2, 2, 64, true, true}, multiply, 16);  // maxima rise by more than is rescaled for
  }
  EXPECT_TRUE(attention_gave);
}

TEST_F(ColumnSumsOnGpu, RoundWhatAttentionRounds) {
  // What is summed is what attention() weighs values with: values of 1 in one row, 0 in others.
  const Prompt p{.n = 70, .head_dim = 128};
  constexpr int64_t kColumn = 9;
  Operands host = operands(p);
  for (int64_t row = 0; row < p.n; ++row) {
    for (int64_t channel = 0; channel < p.head_dim; ++channel) {
      host.v.as<float>()[row * p.head_dim + channel] = row == kColumn ? 1.0f : 0.0f;
    }
  }
  const Operands gpu = placed(host);
  for (const DType multiply : {DType::kF16, DType::kBF16}) {
    Tensor out(DType::kF32, p.q_shape(), kGpu);
    attention(out, gpu.q, gpu.k, gpu.v, {}, true, p.scale(), multiply, *gpu_);
    const Tensor weights = on_host(out);
    double expected = 0;
    for (int64_t row = 0; row < p.n; ++row) {
      expected += static_cast<double>(weights.view().as<float>()[row * p.head_dim]);
    }
    const Sums found = run(p, gpu, 0, p.scale(), multiply, *gpu_);
    const double exact = run(p, host, 0, p.scale(), DType::kF32, cpu_).sums[kColumn];
    const double difference = found.sums[kColumn] - 0.5 - expected;
    EXPECT_LE(std::abs(difference), 2e-3 * expected);
    EXPECT_NE(found.sums[kColumn], exact);
  }
}

TEST_F(ColumnSumsOnGpu, MayLeaveOutSmallEntries) {
  const Prompt p{.n = 90, .q_per_kv = 2};
  const Operands gpu = placed(operands(p));
  for (const DType multiply : {DType::kF32, DType::kF16}) {
    const Sums counted = run(p, gpu, 0, p.scale(), multiply, *gpu_);
    std::vector<double> sums(90, 0.5);
    add_sums(sums, {}, gpu, 0, p.scale(), multiply, *gpu_);
    EXPECT_EQ(sums, counted.sums);
  }
}

TEST_F(ColumnSumsOnGpu, HaveTheSameMeansOverHeads) {
  for (const int64_t columns : {1, 255, 257, 641}) {
    constexpr int64_t kLayers = 3;
    constexpr int64_t kHeads = 7;
    const auto count = static_cast<size_t>(kLayers * kHeads * columns);
    std::vector<double> sums(count);
    for (size_t i = 0; i < count; ++i) {
      sums[i] = std::exp(static_cast<double>(i * 2654435761u % 97));
    }
    std::vector<double> want(static_cast<size_t>(kLayers * columns));
    mean_over_heads(sums.data(), kLayers, kHeads, columns, want.data(), cpu_);
    const Shape all{kLayers * kHeads * columns * 8};
    const Shape few{kLayers * columns * 8};
    Tensor on_gpu(DType::kU8, all, kGpu);
    Tensor means(DType::kU8, few, kGpu);
    copy(on_gpu, ConstTensorView(sums.data(), DType::kU8, all), *gpu_);
    mean_over_heads(reinterpret_cast<const double*>(on_gpu.view().data()), kLayers, kHeads, columns,
                    reinterpret_cast<double*>(means.view().data()), *gpu_);
    std::vector<double> found(want.size());
    copy(TensorView(found.data(), DType::kU8, few), means, *gpu_);
    EXPECT_EQ(found, want) << columns;
  }
}

TEST_F(ColumnSumsOnGpu, CountRowsByWhatTheyReceive) {
  constexpr int64_t kFirst = 37;
  for (const int64_t n : {130, 300}) {
    const Prompt p{.n = n, .kv_heads = 3, .q_per_kv = 2};
    const Operands host = operands(p);
    const Operands gpu = placed(host);
    std::vector<double> received(static_cast<size_t>(n));
    for (size_t i = 0; i < received.size(); ++i) received[i] = 1 + static_cast<double>(i * 37 % 11);
    std::vector<double> expected(static_cast<size_t>(3 * n));
    SummedRows rows(kFirst);
    rows.received = received.data();
    column_sums({expected.data(), n}, host.q, host.k, {}, rows, p.scale(), DType::kF32, cpu_);
    const Shape of_rows{n * 8};
    const Shape of_sums{3 * n * 8};
    Tensor received_there(DType::kU8, of_rows, kGpu);
    Tensor sums_there(DType::kU8, of_sums, kGpu);
    copy(received_there, ConstTensorView(received.data(), DType::kU8, of_rows), *gpu_);
    rows.received = reinterpret_cast<const double*>(received_there.view().data());
    for (const DType multiply : {DType::kF32, DType::kF16, DType::kBF16}) {
      column_sums({reinterpret_cast<double*>(sums_there.view().data()), n}, gpu.q, gpu.k, {}, rows,
                  p.scale(), multiply, *gpu_);
      std::vector<double> found(expected.size());
      copy(TensorView(found.data(), DType::kU8, of_sums), sums_there, *gpu_);
      const double share = multiply == DType::kF32 ? 1e-5 : multiply == DType::kF16 ? 0.01 : 0.08;
      for (size_t j = 0; j < found.size(); ++j) {
        EXPECT_NEAR(found[j], expected[j], share * (expected[j] + 0.01)) << j;
      }
    }
  }
}

/// Columns that hold something gain, the others are overwritten.
TEST_F(ColumnSumsOnGpu, MayStayThere) {
  const Prompt p{.n = 90, .kv_heads = 3, .q_per_kv = 2};
  const Operands gpu = placed(operands(p));
  constexpr int64_t kStride = 100;
  constexpr int64_t kHeld = 40;
  for (const DType multiply : {DType::kF32, DType::kF16}) {
    const Sums counted = run(p, gpu, 5, p.scale(), multiply, *gpu_);
    std::vector<double> sums(3 * kStride, 0.5);
    const Shape bytes{static_cast<int64_t>(sums.size() * sizeof(double))};
    Tensor on_gpu(DType::kU8, bytes, gpu_->device());
    copy(on_gpu, ConstTensorView(sums.data(), DType::kU8, bytes), *gpu_);
    std::vector<double> small(6, 3.0);
    column_sums({reinterpret_cast<double*>(on_gpu.view().data()), kStride, kHeld, small}, gpu.q,
                gpu.k, {}, 5, p.scale(), multiply, *gpu_);
    copy(TensorView(sums.data(), DType::kU8, bytes), on_gpu, *gpu_);
    EXPECT_EQ(small, counted.small);
    for (int64_t j = 0; j < 3 * kStride; ++j) {
      const int64_t column = j % kStride;
      const double held = column < kHeld || column >= 90 ? 0.5 : 0;
      const double gained =
          column < 90 ? counted.sums[static_cast<size_t>(j / kStride * 90 + column)] - 0.5 : 0;
      EXPECT_NEAR(sums[static_cast<size_t>(j)], held + gained, 1e-12) << j;
    }
  }
}

}  // namespace
}  // namespace kvlm
