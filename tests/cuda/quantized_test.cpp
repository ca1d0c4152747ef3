// Products with quantized matrices on a GPU against their definition in double.

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/activation.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "tests/cuda/fixture.h"
#include "tests/kernels/quantized/matrices.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::MatrixMaker;
using testing::normal_tensor;
using testing::same_bits;

/// Every code, scale and zero point; outputs and inputs that fill no tile, and both half formats.
std::vector<QuantizedFormat> formats() {
  std::vector<QuantizedFormat> all;
  for (const DType activations : {DType::kBF16, DType::kF16}) {
    const QuantizedFormat some[] = {
        {.code = WeightCode::kU4, .out = 96, .in = 512, .group = 32},
        {.code = WeightCode::kU4, .out = 50, .in = 80, .group = 32, .scale = DType::kBF16},
        {.code = WeightCode::kU4, .out = 33, .in = 41, .group = 32},
        {.code = WeightCode::kU4, .out = 128, .in = 1024, .group = 128, .has_zeros = true},
        {.code = WeightCode::kU4, .out = 64, .in = 352, .group = 352, .scale = DType::kF32},
        {.code = WeightCode::kU8, .out = 96, .in = 320, .group = 32},
        {.code = WeightCode::kU8, .out = 40, .in = 192, .group = 64, .has_zeros = true},
        {.code = WeightCode::kU8, .out = 40, .in = 100, .group = 100, .scale = DType::kF32},
        {.code = WeightCode::kE4M3, .out = 70, .in = 256, .group = 128, .scale = DType::kBF16},
        {.code = WeightCode::kE4M3, .out = 64, .in = 96, .group = 96, .scale = DType::kF32},
    };
    for (QuantizedFormat format : some) {
      format.activations = activations;
      all.push_back(format);
    }
  }
  return all;
}

class Quantized : public testing::Cuda {
 protected:
  Weight placed(const MatrixMaker& made) {
    buffers_.push_back(on_gpu(made.laid_out_for(DeviceKind::kCuda)));
    return Weight(QuantizedMatrix{made.format, buffers_.back().view().data(), kGpu, false});
  }
  /// x rounded to the activations' type.
  static Tensor activations(const MatrixMaker& made, int64_t rows, uint32_t seed) {
    return normal_tensor(made.format.activations, {rows, made.format.in}, seed);
  }
  std::vector<Tensor> buffers_;
};

/// Products in double, and the sums of their terms' magnitudes.
struct Wanted {
  std::vector<double> sums, sizes;
};

Wanted wanted(const MatrixMaker& made, const Tensor& x) {
  const QuantizedFormat& format = made.format;
  const auto values = testing::values_of(x);
  Wanted result;
  std::vector<float> w(static_cast<size_t>(format.in));
  result.sums.resize(static_cast<size_t>(x.shape()[0] * format.out));
  result.sizes.resize(result.sums.size());
  for (int64_t o = 0; o < format.out; ++o) {
    made.rows.widen(format, o, w.data());
    for (int64_t r = 0; r < x.shape()[0]; ++r) {
      const auto at = static_cast<size_t>(r * format.out + o);
      for (int64_t i = 0; i < format.in; ++i) {
        const double term =
            double{w[static_cast<size_t>(i)]} * values[static_cast<size_t>(r * format.in + i)];
        result.sums[at] += term;
        result.sizes[at] += std::fabs(term);
      }
    }
  }
  return result;
}

void expect_near(const Tensor& y, const Wanted& want, double bound) {
  double worst = 0;
  for (size_t i = 0; i < want.sums.size(); ++i) {
    const double error = std::fabs(y.as<float>()[i] - want.sums[i]);
    worst = std::max(worst, error / (want.sizes[i] + 1e-30));
  }
  EXPECT_LT(worst, bound);
}

TEST_F(Quantized, ProductsAreExactToRounding) {
  uint32_t seed = 1;
  for (const QuantizedFormat& format : formats()) {
    const MatrixMaker made(format, ++seed);
    const Weight w = placed(made);
    for (const int64_t rows : {1, 3, 16, 17, 33, 64, 70}) {
      const Tensor x = activations(made, rows, ++seed);
      Tensor y(DType::kF32, {rows, format.out}, kGpu);
      linear(y, on_gpu(x), w, {}, false, *gpu_);
      SCOPED_TRACE(seed);
      expect_near(on_host(y), wanted(made, x), 2e-6);
    }
  }
}

/// Above kMostQuantized rows weights are rounded to the activations' type.
TEST_F(Quantized, ProductsOfManyRowsRoundTheWeights) {
  uint32_t seed = 100;
  for (const QuantizedFormat& format : formats()) {
    const MatrixMaker made(format, ++seed);
    const Weight w = placed(made);
    const Tensor x = activations(made, 300, ++seed);
    Tensor y(DType::kF32, {300, format.out}, kGpu);
    linear(y, on_gpu(x), w, {}, false, *gpu_);
    SCOPED_TRACE(seed);
    expect_near(on_host(y), wanted(made, x), format.activations == DType::kF16 ? 1e-3 : 5e-3);
  }
}

TEST_F(Quantized, ARowDependsOnNothingElse) {
  for (const QuantizedFormat& format : formats()) {
    const MatrixMaker made(format, 7);
    const Weight w = placed(made);
    const Tensor x = on_gpu(activations(made, 150, 8));
    Tensor all(DType::kF32, {150, format.out}, kGpu);
    linear(all, x, w, {}, false, *gpu_);
    for (const int64_t rows : {1, 5, 20, 64}) {
      Tensor some(DType::kF32, {rows, format.out}, kGpu);
      linear(some, x.view().slice(31, rows), w, {}, false, *gpu_);
      EXPECT_TRUE(same_bits(on_host(some), on_host(all.view().slice(31, rows)))) << rows;
    }
  }
}

TEST_F(Quantized, SeveralMatricesBiasAndSums) {
  const MatrixMaker a({.code = WeightCode::kU4, .out = 96, .in = 256, .activations = DType::kBF16},
                      1);
  const MatrixMaker b({.code = WeightCode::kU4, .out = 40, .in = 256, .activations = DType::kBF16},
                      2);
  const MatrixMaker c({.code = WeightCode::kU8, .out = 40, .in = 256, .activations = DType::kBF16},
                      3);
  const Tensor x = on_gpu(activations(a, 5, 4));
  const Tensor bias = normal_tensor(DType::kF32, {40}, 5);
  const Tensor gpu_bias = on_gpu(bias);
  Tensor y[3];
  Tensor alone[3];
  const MatrixMaker* made[] = {&a, &b, &c};
  std::vector<Projection> projections;
  for (int i = 0; i < 3; ++i) {
    const Shape shape{5, made[i]->format.out};
    y[i] = Tensor(DType::kF32, shape, kGpu);
    alone[i] = Tensor(DType::kF32, shape, kGpu);
    const Weight w = placed(*made[i]);
    projections.push_back({y[i], w, i == 0 ? ConstTensorView() : gpu_bias});
    linear(alone[i], x, w, projections.back().bias, false, *gpu_);
  }
  linears(projections, x, *gpu_);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(on_host(y[i]), on_host(alone[i]))) << i;
  linear(y[1], x, projections[1].w, gpu_bias, /*add=*/true, *gpu_);
  const Tensor once = on_host(alone[1]);
  const Tensor twice = on_host(y[1]);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(twice.as<float>()[i], 2 * once.as<float>()[i]);
}

TEST_F(Quantized, GatesInOneLaunch) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const WeightCode code : {WeightCode::kU4, WeightCode::kU8}) {
      const QuantizedFormat format{.code = code, .out = 72, .in = 288, .activations = dtype};
      const MatrixMaker gate(format, 1);
      const MatrixMaker up(format, 2);
      for (const int64_t rows : {1, 4, 30, 90, 300}) {
        const Tensor x = activations(gate, rows, 3);
        const Wanted g = wanted(gate, x);
        const Wanted u = wanted(up, x);
        Projection projections[] = {{{}, placed(gate), {}}, {{}, placed(up), {}}};
        Tensor places[2];
        const bool alone =
            gates_alone(projections[0], projections[1], Activation::kSilu, DType::kF32, rows);
        EXPECT_EQ(alone, rows <= kMostQuantized);
        for (int i = 0; i < 2 && !alone; ++i) {
          places[i] = Tensor(DType::kF32, {rows, 72}, kGpu);
          projections[i].y = places[i];
        }
        Tensor y(DType::kF32, {rows, 72}, kGpu);
        gated_linears(y, projections[0], projections[1], Activation::kSilu, on_gpu(x), *gpu_);
        const Tensor made = on_host(y);
        for (size_t i = 0; i < g.sums.size(); ++i) {
          const double want = g.sums[i] / (1 + std::exp(-g.sums[i])) * u.sums[i];
          const double size = (1 + std::fabs(g.sizes[i])) * (1 + std::fabs(u.sizes[i]));
          ASSERT_NEAR(made.as<float>()[i], want, (alone ? 4e-6 : 1e-2) * size) << rows << " " << i;
        }
      }
    }
  }
}

/// Above kMostQuantized rows a gate in half precision is made as with plain weights.
TEST_F(Quantized, GatesOfManyRowsNeedNoWorkspaceInHalfPrecision) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const QuantizedFormat format{
        .code = WeightCode::kU4, .out = 256, .in = 1024, .activations = dtype};
    const MatrixMaker gate(format, 1);
    const MatrixMaker up(format, 2);
    const Tensor x = activations(gate, 300, 3);
    const Wanted g = wanted(gate, x);
    const Wanted u = wanted(up, x);
    Projection projections[] = {{{}, placed(gate), {}}, {{}, placed(up), {}}};
    Tensor places[2];
    if (!gates_alone(projections[0], projections[1], Activation::kSilu, dtype, 300)) {
      for (int i = 0; i < 2; ++i) {  // a GPU without warpgroups
        places[i] = Tensor(DType::kF32, {300, 256}, kGpu);
        projections[i].y = places[i];
      }
    }
    Tensor y(dtype, {300, 256}, kGpu);
    gated_linears(y, projections[0], projections[1], Activation::kSilu, on_gpu(x), *gpu_);
    const auto made = testing::values_of(on_host(y));
    for (size_t i = 0; i < g.sums.size(); ++i) {
      const double want = g.sums[i] / (1 + std::exp(-g.sums[i])) * u.sums[i];
      const double size = (1 + std::fabs(g.sizes[i])) * (1 + std::fabs(u.sizes[i]));
      ASSERT_NEAR(made[i], want, 1e-2 * size) << i;
    }
  }
}

TEST_F(Quantized, GathersRows) {
  for (const QuantizedFormat& format : formats()) {
    const MatrixMaker made(format, 9);
    const int32_t ids[] = {static_cast<int32_t>(format.out - 1), 0, 5, 5};
    Tensor y(DType::kF32, {4, format.in}, kGpu);
    gather_rows(y, placed(made), ids, *gpu_);
    const Tensor rows = on_host(y);
    std::vector<float> want(static_cast<size_t>(format.in));
    for (int i = 0; i < 4; ++i) {
      made.rows.widen(format, ids[i], want.data());
      const float* row = rows.as<float>() + i * format.in;
      EXPECT_EQ(std::vector(row, row + format.in), want);
    }
  }
}

}  // namespace
}  // namespace kvlm
