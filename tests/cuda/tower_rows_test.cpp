// What the layers of a vision tower do with their rows: long products of halves, as warpgroups make
// them, and sums with the norm behind them, against the CPU in f32.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::Cuda;
using testing::kGpu;
using testing::make_tensor;
using testing::normal_tensor;

class TowerRows : public Cuda {
 protected:
  Tensor halves(const Tensor& x, DType dtype) {
    Tensor made(dtype, x.shape(), kGpu);
    convert(made, on_gpu(x), *gpu_);
    gpu_->synchronize();
    return made;
  }
  Tensor floats(const Tensor& x) {
    Tensor made(DType::kF32, x.shape(), kGpu);
    convert(made, x, *gpu_);
    return on_host(made);
  }
  Tensor poison(DType dtype, const Shape& shape) {
    const auto count = static_cast<size_t>(shape.elements());
    return on_gpu(make_tensor(dtype, shape, std::vector<float>(count, std::nanf(""))));
  }
};

constexpr DType kHalves[] = {DType::kF16, DType::kBF16};

double tolerance(DType dtype) {
  return dtype == DType::kF16 ? 2e-3 : dtype == DType::kBF16 ? 1.5e-2 : 1e-5;
}

/// The first row, the last ones, and some between.
std::vector<int32_t> sampled_rows(int64_t rows) {
  std::vector<int32_t> sampled;
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 61 == 0 || row + 15 > rows) sampled.push_back(static_cast<int32_t>(row));
  }
  return sampled;
}

/// More tiles than multiprocessors, rows and columns that fill none, and few of either.
TEST_F(TowerRows, OfLongProductsAgreeWithTheCpu) {
  struct Size {
    int64_t rows, in, out;
  };
  for (const Size& size : {Size{5, 1024, 2048},
                           {129, 968, 2064},
                           {3341, 1032, 2064},
                           {1300, 1024, 4096},
                           {520, 4096, 3072}}) {
    const Tensor x = normal_tensor(DType::kF32, {size.rows, size.in}, 1);
    const Tensor w = normal_tensor(DType::kF32, {size.out, size.in}, 2,
                                   1 / std::sqrt(static_cast<float>(size.in)));
    const Tensor bias = normal_tensor(DType::kF32, {size.out}, 3);
    const std::vector<int32_t> sampled = sampled_rows(size.rows);
    const auto count = std::ssize(sampled);
    for (const DType dtype : kHalves) {
      const Tensor x_gpu = halves(x, dtype);
      const Tensor w_gpu = halves(w, dtype);
      const Tensor bias_gpu = on_gpu(bias);
      const Tensor all_used = floats(x_gpu);
      Tensor x_used(DType::kF32, {count, size.in});
      gather_rows(x_used, all_used, sampled, cpu_);
      const Tensor w_used = floats(w_gpu);
      for (const bool biased : {false, true}) {
        for (const bool gelu : {false, true}) {
          const auto tail = [&](const Tensor& of) {
            LinearTail made;
            if (biased) made.bias = of;
            if (gelu) made.activation = Activation::kGelu;
            return made;
          };
          Tensor expected(DType::kF32, {count, size.out});
          linear(expected, x_used, w_used, tail(bias), cpu_);
          Tensor y = poison(dtype, {size.rows, size.out});
          linear(y, x_gpu, w_gpu, tail(bias_gpu), *gpu_);
          Tensor found(DType::kF32, expected.shape(), kGpu);
          gather_rows(found, y, sampled, *gpu_);
          EXPECT_LE(error(found, expected), tolerance(dtype))
              << size.rows << " x " << size.in << " x " << size.out << ", " << dtype_name(dtype)
              << (biased ? ", bias" : "") << (gelu ? ", gelu" : "");
          const Tensor every = floats(y);
          for (int64_t i = 0; i < every.view().elements(); ++i) {
            ASSERT_TRUE(std::isfinite(every.as<float>()[i])) << "element " << i << " of y";
          }
        }
      }
    }
  }
}

/// A row is what it is in any number of rows, bit for bit.
TEST_F(TowerRows, OfLongProductsDoNotDependOnTheirNumber) {
  const Tensor w = normal_tensor(DType::kF32, {2304, 1024}, 2, 0.03f);
  const Tensor x = normal_tensor(DType::kF32, {2700, 1024}, 1);
  for (const DType dtype : kHalves) {
    const Tensor x_gpu = halves(x, dtype);
    const Tensor w_gpu = halves(w, dtype);
    for (const bool gelu : {false, true}) {
      LinearTail tail;
      if (gelu) tail.activation = Activation::kGelu;
      Tensor together(dtype, {2700, 2304}, kGpu);
      linear(together, x_gpu, w_gpu, tail, *gpu_);
      for (const int64_t rows : {5, 64, 577, 1025}) {
        Tensor alone(dtype, {rows, 2304}, kGpu);
        linear(alone, x_gpu.view().slice(2700 - rows, rows), w_gpu, tail, *gpu_);
        EXPECT_TRUE(testing::same_bits(on_host(alone).view(),
                                       on_host(together.view().slice(2700 - rows, rows)).view()))
            << rows << " rows, " << dtype_name(dtype);
      }
    }
  }
}

/// gated_linears() of rows of halves, whose gate is applied inside the product.
class GatedRows : public TowerRows {
 protected:
  /// y of the dtype of w, without room for the sums of either product beyond what the call asks
  /// for. `biased`: a bit for the gate, a bit for the other factor.
  Tensor gated(ConstTensorView x, const Tensor (&w)[2], const Tensor (&bias)[2], int biased) {
    const Shape shape{x.shape()[0], w[0].shape()[0]};
    Tensor y = poison(w[0].dtype(), shape);
    Projection parts[2];
    Tensor sums[2];
    for (int i = 0; i < 2; ++i) {
      parts[i] = {{}, w[i], (biased >> i & 1) != 0 ? ConstTensorView(bias[i]) : ConstTensorView()};
    }
    alone_ = gates_alone(parts[0], parts[1], Activation::kSilu, y.dtype(), shape[0]);
    const std::string gpu = cuda::device_facts(kGpu.index).name;
    const bool has_warpgroups =
        gpu.find("H100") != std::string::npos || gpu.find("H200") != std::string::npos;
    EXPECT_TRUE(alone_ || !has_warpgroups || shape[0] < 32) << gpu;
    EXPECT_TRUE(!alone_ || shape[0] >= 32);
    for (int i = 0; i < 2 && !alone_; ++i) {
      sums[i] = Tensor(DType::kF32, shape, kGpu);
      parts[i].y = sums[i];
    }
    gated_linears(y, parts[0], parts[1], Activation::kSilu, x, *gpu_);
    return y;
  }

  bool alone_ = false;  // the last call needed no room
};

TEST_F(GatedRows, AgreeWithTheCpu) {
  struct Size {
    int64_t rows, in, out;
  };
  // Odd and even numbers of tiles either way, more rows than columns and fewer.
  for (const Size& size : {Size{31, 1024, 2048},
                           {32, 1024, 2048},
                           {129, 968, 2064},
                           {870, 1032, 2064},
                           {3341, 1024, 136},
                           {520, 2048, 3080}}) {
    const Tensor x = normal_tensor(DType::kF32, {size.rows, size.in}, 1);
    const float unit = 1 / std::sqrt(static_cast<float>(size.in));
    const Tensor w[] = {normal_tensor(DType::kF32, {size.out, size.in}, 2, 2 * unit),
                        normal_tensor(DType::kF32, {size.out, size.in}, 3, unit)};
    const Tensor bias[] = {normal_tensor(DType::kF32, {size.out}, 4),
                           normal_tensor(DType::kF32, {size.out}, 5)};
    const Tensor gpu_bias[] = {on_gpu(bias[0]), on_gpu(bias[1])};
    const std::vector<int32_t> sampled = sampled_rows(size.rows);
    const auto count = std::ssize(sampled);
    for (const DType dtype : kHalves) {
      const Tensor gpu_x = halves(x, dtype);
      const Tensor gpu_w[] = {halves(w[0], dtype), halves(w[1], dtype)};
      const Tensor used[] = {floats(gpu_w[0]), floats(gpu_w[1])};
      Tensor used_x(DType::kF32, {count, size.in});
      gather_rows(used_x, floats(gpu_x), sampled, cpu_);
      for (const int biased : {0, 1, 2, 3}) {
        Tensor expected(DType::kF32, {count, size.out});
        Tensor up(DType::kF32, expected.shape());
        const auto part = [&](Tensor& sums, int i) {
          const bool has_bias = (biased >> i & 1) != 0;
          return Projection{sums, used[i], has_bias ? ConstTensorView(bias[i]) : ConstTensorView()};
        };
        gated_linears(expected, part(expected, 0), part(up, 1), Activation::kSilu, used_x, cpu_);
        const Tensor y = gated(gpu_x, gpu_w, gpu_bias, biased);
        Tensor found(DType::kF32, expected.shape(), kGpu);
        gather_rows(found, y, sampled, *gpu_);
        EXPECT_LE(error(found, expected), tolerance(dtype))
            << size.rows << " x " << size.in << " x " << size.out << ", " << dtype_name(dtype)
            << ", biased " << biased;
        const Tensor every = floats(y);
        for (int64_t i = 0; i < every.view().elements(); ++i) {
          ASSERT_TRUE(std::isfinite(every.as<float>()[i])) << "element " << i << " of y";
        }
      }
    }
  }
}

/// Gates far from 0 are all or nothing, and no number stays none.
TEST_F(GatedRows, HaveTheEndsOfTheGate) {
  const Tensor x = normal_tensor(DType::kF32, {39, 1024}, 1);
  const Tensor w = halves(normal_tensor(DType::kF32, {2048, 1024}, 2, 0.0f), DType::kBF16);
  const Tensor weights[] = {halves(floats(w), DType::kBF16), halves(floats(w), DType::kBF16)};
  Tensor bias[] = {Tensor(DType::kF32, {2048}), Tensor(DType::kF32, {2048})};
  const float gates[] = {-200, -89, -1e30f, 0, 89, 3e38f, NAN};
  for (int i = 0; i < 2048; ++i) {
    bias[0].as<float>()[i] = gates[i % 7];
    bias[1].as<float>()[i] = 0.5f;
  }
  const Tensor gpu_bias[] = {on_gpu(bias[0]), on_gpu(bias[1])};
  const Tensor y = floats(gated(halves(x, DType::kBF16), weights, gpu_bias, 3));
  for (int i = 0; i < 39 * 2048; ++i) {
    const float gate = gates[i % 2048 % 7];
    const float found = y.as<float>()[i];
    if (std::isnan(gate)) {
      EXPECT_TRUE(std::isnan(found)) << i;
    } else {
      EXPECT_NEAR(found, gate > 0 ? gate / 2 : 0, gate > 0 ? 4e-3 * gate : 1e-30) << gate;
    }
  }
}

/// A row is what it is in any number of rows, bit for bit, and rounded beforehand or by the call.
TEST_F(GatedRows, DoNotDependOnTheirNumber) {
  const Tensor x = normal_tensor(DType::kF32, {2700, 1024}, 1);
  for (const DType dtype : kHalves) {
    const Tensor w[] = {halves(normal_tensor(DType::kF32, {2304, 1024}, 2, 0.06f), dtype),
                        halves(normal_tensor(DType::kF32, {2304, 1024}, 3, 0.03f), dtype)};
    const Tensor bias[] = {Tensor(), Tensor()};
    const Tensor gpu_x = halves(x, dtype);
    const Tensor together = gated(gpu_x, w, bias, 0);
    EXPECT_TRUE(
        testing::same_bits(on_host(gated(on_gpu(x), w, bias, 0)).view(), on_host(together).view()));
    if (!alone_) GTEST_SKIP() << "this GPU has no warpgroups: the library plans for each number";
    for (const int64_t rows : {32, 64, 577, 1025}) {
      const Tensor alone = gated(gpu_x.view().slice(2700 - rows, rows), w, bias, 0);
      EXPECT_TRUE(testing::same_bits(on_host(alone).view(),
                                     on_host(together.view().slice(2700 - rows, rows)).view()))
          << rows << " rows, " << dtype_name(dtype);
    }
  }
}

/// Without room for the products the gate has to be taken inside, which wants both ends even.
TEST_F(GatedRows, SayWhyTheyNeedRoom) {
  const Tensor x = halves(normal_tensor(DType::kF32, {41, 1024}, 1), DType::kF16);
  const Tensor w = halves(normal_tensor(DType::kF32, {2048, 1024}, 2), DType::kF16);
  const Projection part{{}, w, {}};
  Tensor y = poison(DType::kF16, {40, 2048});
  Tensor wide = poison(DType::kF32, {40, 2048});
  const auto call = [&](ConstTensorView from, TensorView to) {
    gated_linears(to, part, part, Activation::kSilu, from, *gpu_);
  };
  // Few rows, and rows of f32, have no such kernel on any GPU.
  EXPECT_THROW(call(x.view().slice(0, 31), y.view().slice(0, 31)), Error);
  EXPECT_THROW(call(x.view().slice(0, 40), wide), Error);
  if (!gates_alone(part, part, Activation::kSilu, DType::kF16, 40)) return;
  const ConstTensorView odd(x.view().data() + 2, DType::kF16, {40, 1024}, kGpu);
  try {
    call(odd, y);
    FAIL() << "x begins at an odd place";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("aligned to 16 bytes"), std::string::npos);
  }
}

TEST_F(TowerRows, AreAddedAndNormedAsOnTheCpu) {
  struct Size {
    int64_t rows, dim;
  };
  for (const Size& size : {Size{3, 7}, {130, 1024}, {5, 1152}, {9, 4096}, {4, 5000}}) {
    const Shape shape{size.rows, size.dim};
    const Tensor x = normal_tensor(DType::kF32, shape, 1);
    const Tensor p[] = {normal_tensor(DType::kF32, shape, 2), normal_tensor(DType::kF32, shape, 3)};
    const Tensor p_bias = normal_tensor(DType::kF32, {size.dim}, 4);
    const Tensor scale = normal_tensor(DType::kF32, {size.dim}, 5);
    const Tensor weight = normal_tensor(DType::kF32, {size.dim}, 6);
    const Tensor bias = normal_tensor(DType::kF32, {size.dim}, 7);
    const Tensor vectors[] = {on_gpu(p_bias), on_gpu(scale), on_gpu(weight), on_gpu(bias)};
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const Tensor gpu_p[] = {halves(p[0], dtype), halves(p[1], dtype)};
      const Tensor used[] = {floats(gpu_p[0]), floats(gpu_p[1])};
      for (const size_t count : {1, 2}) {
        for (const Residual residual : {Residual::kSum, Residual::kSame}) {
          const Addend addends[] = {{used[0], p_bias, scale}, {used[1]}};
          Tensor sum(DType::kF32, shape);
          copy(sum, x, cpu_);
          Tensor expected(DType::kF32, shape);
          add_norm(expected, sum, residual, {addends, count}, weight, bias, 1e-5f, cpu_);
          const Addend on_device[] = {{gpu_p[0], vectors[0], vectors[1]}, {gpu_p[1]}};
          Tensor gpu_x = on_gpu(x);
          Tensor y = poison(dtype, shape);
          add_norm(y, gpu_x, residual, {on_device, count}, vectors[2], vectors[3], 1e-5f, *gpu_);
          const std::string named = std::to_string(size.rows) + " x " + std::to_string(size.dim) +
                                    ", " + std::string(dtype_name(dtype)) + ", " +
                                    std::to_string(count) + " addends";
          EXPECT_LE(error(y, expected), tolerance(dtype)) << named;
          EXPECT_LE(error(gpu_x, sum), 1e-6) << named;
        }
      }
      Tensor normed = poison(dtype, shape);
      layer_norm(normed, on_gpu(x), vectors[2], vectors[3], 1e-5f, *gpu_);
      Tensor expected(DType::kF32, shape);
      layer_norm(expected, x, weight, bias, 1e-5f, cpu_);
      EXPECT_LE(error(normed, expected), tolerance(dtype)) << "norm of " << size.dim;
    }
  }
}

}  // namespace
}  // namespace kvlm
