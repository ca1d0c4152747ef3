// Products with quantized matrices on the CPU, against their definition step by step: equal bits on
// every instruction set.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <array>
#include <cmath>
#include <random>

#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "tests/kernels/quantized/matrices.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using testing::make_tensor;
using testing::MatrixMaker;
using testing::normal_tensor;
using testing::same_bits;

/// A row of x as the CPU rounds it.
struct Rounded {
  std::vector<int> codes;
  std::vector<float> scales;
};

Rounded rounded(const float* x, int64_t in) {
  Rounded row;
  for (int64_t block = 0; block * 32 < in; ++block) {
    const int64_t last = std::min(in, block * 32 + 32);
    float most = 0;
    for (int64_t i = block * 32; i < last; ++i) most = std::max(most, std::fabs(x[i]));
    const float scale = most / 127;
    row.scales.push_back(scale);
    for (int64_t i = block * 32; i < last; ++i) {
      row.codes.push_back(scale == 0 ? 0 : static_cast<int>(std::nearbyint(x[i] / scale)));
    }
  }
  return row;
}

/// y = x w^T + bias, by the definition.
std::vector<float> defined(const MatrixMaker& made, const Tensor& x, const Tensor& bias) {
  const QuantizedFormat& format = made.format;
  std::vector<float> y;
  for (int64_t r = 0; r < x.shape()[0]; ++r) {
    const Rounded row = rounded(x.as<float>() + r * format.in, format.in);
    for (int64_t o = 0; o < format.out; ++o) {
      float sum = 0;
      for (int64_t block = 0; block * 32 < format.in; ++block) {
        const int64_t group = o * format.groups() + block * 32 / format.group;
        int64_t acc = 0;
        int64_t codes = 0;
        for (int64_t i = block * 32; i < std::min(format.in, block * 32 + 32); ++i) {
          const auto at = static_cast<size_t>(i);
          acc += int64_t{made.rows.codes[static_cast<size_t>(o * format.in + i)]} * row.codes[at];
          codes += row.codes[at];
        }
        const int zero =
            format.has_zeros ? made.rows.zeros[static_cast<size_t>(group)] : format.zero();
        const float scale =
            row.scales[static_cast<size_t>(block)] * made.rows.scales[static_cast<size_t>(group)];
        sum = std::fma(scale, static_cast<float>(acc - zero * codes), sum);
      }
      y.push_back(bias.empty() ? sum : sum + bias.as<float>()[o]);
    }
  }
  return y;
}

Tensor product(const Tensor& x, const MatrixMaker& made, const Tensor& bias, Stream& stream,
               bool exact = false) {
  Tensor y(DType::kF32, {x.shape()[0], made.format.out});
  linear(y, x, made.on_cpu(exact), bias.empty() ? ConstTensorView() : bias, false, stream);
  return y;
}

const std::array kFormats = {
    QuantizedFormat{.code = WeightCode::kU4, .out = 96, .in = 128, .group = 32},
    QuantizedFormat{.code = WeightCode::kU4, .out = 33, .in = 90, .group = 32},
    QuantizedFormat{.code = WeightCode::kU4,
                    .out = 70,
                    .in = 256,
                    .group = 128,
                    .scale = DType::kBF16,
                    .has_zeros = true},
    QuantizedFormat{
        .code = WeightCode::kU4, .out = 17, .in = 96, .group = 96, .scale = DType::kF32},
    QuantizedFormat{.code = WeightCode::kU8, .out = 80, .in = 128, .group = 32},
    QuantizedFormat{.code = WeightCode::kU8, .out = 5, .in = 33, .group = 32},
    QuantizedFormat{.code = WeightCode::kU8,
                    .out = 50,
                    .in = 192,
                    .group = 64,
                    .scale = DType::kF32,
                    .has_zeros = true},
    QuantizedFormat{
        .code = WeightCode::kU8, .out = 130, .in = 160, .group = 160, .scale = DType::kBF16},
};

class QuantizedProduct : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  ThreadPool pool_{2};
  Stream stream_{pool_};
};

TEST_P(QuantizedProduct, EqualsItsDefinitionBitForBit) {
  uint32_t seed = 1;
  for (const QuantizedFormat& format : kFormats) {
    const MatrixMaker made(format, ++seed);
    const Tensor bias = normal_tensor(DType::kF32, {format.out}, seed);
    for (const int64_t rows : {1, 2, 3, 4, 5, 7, 16, 19}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, format.in}, ++seed);
      const Tensor y = product(x, made, bias, stream_);
      EXPECT_EQ(std::vector(y.as<float>(), y.as<float>() + rows * format.out),
                defined(made, x, bias))
          << seed;
    }
  }
}

/// Codes and activations at their ends, where sums of 16 bits would overflow.
TEST_P(QuantizedProduct, IsExactAtTheEndsOfTheCodes) {
  for (const WeightCode code : {WeightCode::kU4, WeightCode::kU8}) {
    MatrixMaker made({.code = code, .out = 32, .in = 64, .group = 32}, 1);
    const uint8_t last = code == WeightCode::kU4 ? 15 : 255;
    for (size_t i = 0; i < made.rows.codes.size(); ++i) made.rows.codes[i] = i / 64 % 2 ? last : 0;
    for (const float sign : {1.0f, -1.0f}) {
      const Tensor x = make_tensor(DType::kF32, {1, 64}, std::vector<float>(64, sign * 3));
      const Tensor y = product(x, made, {}, stream_);
      EXPECT_EQ(std::vector(y.as<float>(), y.as<float>() + 32), defined(made, x, {}));
    }
  }
}

TEST_P(QuantizedProduct, ARowDependsOnNothingElse) {
  const MatrixMaker made({.code = WeightCode::kU4, .out = 200, .in = 320, .group = 64}, 3);
  const Tensor x = normal_tensor(DType::kF32, {40, 320}, 4);
  const Tensor all = product(x, made, {}, stream_);
  for (const int threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    Stream stream(pool);
    for (const int64_t rows : {1, 6, 17}) {
      Tensor some(DType::kF32, {rows, 200});
      linear(some, x.view().slice(9, rows), made.on_cpu(), {}, false, stream);
      EXPECT_TRUE(same_bits(some, all.view().slice(9, rows))) << threads << " " << rows;
    }
  }
}

/// The bound of cpu/quantized_product.h.
TEST_P(QuantizedProduct, StaysWithinItsErrorBound) {
  for (const QuantizedFormat& format : kFormats) {
    const MatrixMaker made(format, 5);
    const Tensor x = normal_tensor(DType::kF32, {3, format.in}, 6);
    const Tensor y = product(x, made, {}, stream_);
    std::vector<float> w(static_cast<size_t>(format.in));
    for (int64_t o = 0; o < format.out; ++o) {
      made.rows.widen(format, o, w.data());
      for (int64_t r = 0; r < 3; ++r) {
        const float* row = x.as<float>() + r * format.in;
        double want = 0;
        double bound = 0;
        double size = 0;
        for (int64_t first = 0; first < format.in; first += 32) {
          double most = 0;
          double weights = 0;
          for (int64_t i = first; i < std::min(format.in, first + 32); ++i) {
            const double weight = w[static_cast<size_t>(i)];
            want += weight * row[i];
            size += std::fabs(weight * row[i]);
            most = std::max<double>(most, std::fabs(row[i]));
            weights += std::fabs(weight);
          }
          bound += most / 254 * weights;
        }
        EXPECT_LE(std::fabs(y.as<float>()[r * format.out + o] - want), bound + 1e-5 * size);
      }
    }
  }
}

TEST_P(QuantizedProduct, OfActivationsInF32IsExactToRounding) {
  std::vector<QuantizedFormat> formats(kFormats.begin(), kFormats.end());
  formats.push_back({.code = WeightCode::kE4M3, .out = 40, .in = 256, .group = 128});
  formats.push_back(
      {.code = WeightCode::kE4M3, .out = 20, .in = 100, .group = 100, .scale = DType::kF32});
  for (const QuantizedFormat& format : formats) {
    const MatrixMaker made(format, 7);
    const Tensor x = normal_tensor(DType::kF32, {6, format.in}, 8);
    const Tensor y = product(x, made, {}, stream_, /*exact=*/true);
    std::vector<float> w(static_cast<size_t>(format.in));
    for (int64_t o = 0; o < format.out; ++o) {
      made.rows.widen(format, o, w.data());
      for (int64_t r = 0; r < 6; ++r) {
        double want = 0;
        double size = 0;
        for (int64_t i = 0; i < format.in; ++i) {
          const double term = double{w[static_cast<size_t>(i)]} * x.as<float>()[r * format.in + i];
          want += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(y.as<float>()[r * format.out + o], want, 1e-6 * size);
      }
    }
  }
}

TEST_P(QuantizedProduct, AddsAndServesSeveralMatricesAtOnce) {
  const MatrixMaker a({.code = WeightCode::kU4, .out = 48, .in = 64, .group = 32}, 9);
  const MatrixMaker b({.code = WeightCode::kU8, .out = 20, .in = 64, .group = 64}, 10);
  const Tensor x = normal_tensor(DType::kF32, {2, 64}, 11);
  const Tensor alone_a = product(x, a, {}, stream_);
  const Tensor alone_b = product(x, b, {}, stream_);
  Tensor y_a(DType::kF32, {2, 48});
  Tensor y_b(DType::kF32, {2, 20});
  const Projection both[] = {{y_a, a.on_cpu(), {}}, {y_b, b.on_cpu(), {}}};
  linears(both, x, stream_);
  EXPECT_TRUE(same_bits(y_a, alone_a));
  EXPECT_TRUE(same_bits(y_b, alone_b));
  linear(y_b, x, b.on_cpu(), {}, /*add=*/true, stream_);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(y_b.as<float>()[i], 2 * alone_b.as<float>()[i]);
}

TEST_P(QuantizedProduct, GathersRows) {
  const MatrixMaker made({.code = WeightCode::kU8, .out = 37, .in = 70, .group = 32}, 12);
  const int32_t ids[] = {36, 0, 5, 5};
  Tensor y(DType::kF32, {4, 70});
  gather_rows(y, made.on_cpu(), ids, stream_);
  std::vector<float> want(70);
  for (int i = 0; i < 4; ++i) {
    made.rows.widen(made.format, ids[i], want.data());
    EXPECT_EQ(std::vector(y.as<float>() + 70 * i, y.as<float>() + 70 * i + 70), want);
  }
}

TEST_P(QuantizedProduct, OfZerosAndOfWhatIsNotFinite) {
  const MatrixMaker made({.code = WeightCode::kU4, .out = 16, .in = 64, .group = 32}, 13);
  const Tensor zeros = make_tensor(DType::kF32, {1, 64}, std::vector<float>(64, 0));
  const Tensor y = product(zeros, made, {}, stream_);
  for (int o = 0; o < 16; ++o) EXPECT_EQ(y.as<float>()[o], 0);
  for (const float bad : {INFINITY, NAN}) {
    Tensor x = make_tensor(DType::kF32, {1, 64}, std::vector<float>(64, 1));
    x.as<float>()[40] = bad;
    const Tensor made_of_bad = product(x, made, {}, stream_);
    for (int o = 0; o < 16; ++o) EXPECT_FALSE(std::isfinite(made_of_bad.as<float>()[o])) << bad;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, QuantizedProduct,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

}  // namespace
}  // namespace kvlm
