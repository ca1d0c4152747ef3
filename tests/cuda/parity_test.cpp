// Every operation on a GPU against the same operation on the CPU, awkward sizes included. Without a
// GPU each test skips and says why.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/base/queue.h"
#include "kernels/base/recording.h"
#include "kernels/blend_rows.h"
#include "kernels/elementwise.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/hadamard.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/store_rows.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/table_heads.h"

namespace kvlm {
namespace {

using testing::make_tensor;
using testing::normal_tensor;

using testing::Cuda;
using testing::full_rows;
using testing::kGpu;

Tensor poisoned(const Shape& shape) {
  return make_tensor(DType::kF32, shape,
                     std::vector<float>(static_cast<size_t>(shape.elements()), std::nanf("")));
}

TEST_F(Cuda, Linear) {
  struct Case {
    int64_t rows, in, out;
  };
  for (const Case& c : {Case{1, 4096, 4096}, Case{1, 7, 3}, Case{2, 96, 40}, Case{3, 1024, 1000},
                        Case{4, 11008, 256}, Case{5, 64, 64}, Case{8, 4096, 1024},
                        Case{17, 88, 132}, Case{33, 50, 31}, Case{130, 640, 512}, Case{3, 64, 31},
                        Case{33, 64, 31}, Case{40, 512, 1025}}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const bool add : {false, true}) {
        const Tensor x = normal_tensor(DType::kF32, {c.rows, c.in}, 1);
        const Tensor w = normal_tensor(dtype, {c.out, c.in}, 2, 0.05f);
        const Tensor bias = normal_tensor(DType::kF32, {c.out}, 3);
        Tensor y = normal_tensor(DType::kF32, {c.rows, c.out}, 4);
        Tensor gpu_y = on_gpu(y);
        linear(y, x, w, bias, add, cpu_);
        const Tensor gpu_x = on_gpu(x);
        const Tensor gpu_w = on_gpu(w);
        const Tensor gpu_bias = on_gpu(bias);
        linear(gpu_y, gpu_x, gpu_w, gpu_bias, add, *gpu_);
        // Tensor cores take x rounded to the weights' format.
        const double gate = dtype == DType::kF32 ? 2e-6 : dtype == DType::kF16 ? 5e-4 : 4e-3;
        EXPECT_LE(error(gpu_y, y), gate)
            << c.rows << " x " << c.in << " to " << c.out << ", " << dtype_name(dtype);
      }
    }
  }
}

/// Several products of one x have the bits that each has alone.
TEST_F(Cuda, LinearsEqualLinear) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 7, 40}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t in : {64, 88, 50}) {
        const Tensor x = on_gpu(normal_tensor(DType::kF32, {rows, in}, 1));
        const int64_t widths[] = {128, 31, 64};
        std::vector<Tensor> w, bias, together, alone;
        std::vector<Projection> parts;
        for (uint32_t i = 0; i < 3; ++i) {
          w.push_back(on_gpu(normal_tensor(dtype, {widths[i], in}, 2 + i, 0.1f)));
          bias.push_back(i == 1 ? Tensor()
                                : on_gpu(normal_tensor(DType::kF32, {widths[i]}, 9 + i)));
          together.emplace_back(DType::kF32, Shape{rows, widths[i]}, kGpu);
          alone.emplace_back(DType::kF32, Shape{rows, widths[i]}, kGpu);
          linear(alone[i], x, w[i], bias[i], false, *gpu_);
        }
        for (size_t i = 0; i < 3; ++i) parts.push_back({together[i], w[i], bias[i]});
        linears(parts, x, *gpu_);
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(error(together[i], on_host(alone[i])), 0) << rows << " x " << in << ", " << i;
        }
      }
    }
  }
}

/// Queries, keys and values, whose weights, biases and products lie one behind the other, at other
/// distances or the wrong way round.
TEST_F(Cuda, LinearsOfOneShapeEqualLinear) {
  constexpr int64_t kOut = 192;
  const std::vector<std::vector<int64_t>> orders = {{0, 1},    {1, 0},    {0, 1, 2},
                                                    {0, 1, 3}, {0, 2, 1}, {3, 0, 1}};
  for (const int64_t rows : {1, 5, 40, 300}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t in : {64, 1032}) {
        const Tensor x = on_gpu(normal_tensor(DType::kF32, {rows, in}, 1));
        const Tensor w = on_gpu(normal_tensor(dtype, {4, kOut, in}, 2, 0.1f));
        const Tensor bias = on_gpu(normal_tensor(DType::kF32, {4, kOut}, 3));
        for (const int biases : {0, 1, 4}) {  // none, one for all, each its own
          const auto part = [&](Tensor& y, int64_t i) {
            ConstTensorView of_bias;
            if (biases > 0) of_bias = bias.view().slice(biases > 1 ? i : 0, 1).reshape({kOut});
            return Projection{y.view().slice(i, 1).reshape({rows, kOut}),
                              w.view().slice(i, 1).reshape({kOut, in}), of_bias};
          };
          Tensor alone = on_gpu(Tensor(DType::kF32, {4, rows, kOut}));
          for (int64_t i = 0; i < 4; ++i) {
            const Projection one = part(alone, i);
            linear(one.y, x, one.w, one.bias, false, *gpu_);
          }
          for (const std::vector<int64_t>& order : orders) {
            Tensor together(DType::kF32, alone.shape(), kGpu);
            copy(together, alone, *gpu_);
            std::vector<Projection> parts;
            for (const int64_t i : order) {
              parts.push_back(part(together, i));
              copy(parts.back().y, on_gpu(poisoned({rows, kOut})), *gpu_);
            }
            linears(parts, x, *gpu_);
            EXPECT_LE(error(together, on_host(alone)), 2e-6)
                << rows << " x " << in << ", " << dtype_name(dtype) << ", biases " << biases
                << ", from " << order[0] << ", " << order[1] << " of " << order.size();
          }
        }
      }
    }
  }
}

TEST_F(Cuda, GatedLinears) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 17}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t in : {8, 50, 88, 512, 1288, 4096}) {
        for (const int64_t out : {1, 31, 144}) {
          for (const bool biased : {false, true}) {
            SCOPED_TRACE(::testing::Message() << rows << " x " << in << " to " << out << ", "
                                              << dtype_name(dtype) << ", biased " << biased);
            const Tensor x = normal_tensor(DType::kF32, {rows, in}, 1);
            const Tensor gpu_x = on_gpu(x);
            const Tensor w[] = {normal_tensor(dtype, {out, in}, 2, 0.1f),
                                normal_tensor(dtype, {out, in}, 3, 0.1f)};
            const Tensor bias[] = {normal_tensor(DType::kF32, {out}, 4),
                                   normal_tensor(DType::kF32, {out}, 5)};
            const Tensor gpu_w[] = {on_gpu(w[0]), on_gpu(w[1])};
            const Tensor gpu_bias[] = {on_gpu(bias[0]), on_gpu(bias[1])};
            Tensor gate = poisoned({rows, out});
            Tensor up = poisoned({rows, out});
            Tensor gpu_gate = on_gpu(gate);
            Tensor gpu_up = on_gpu(up);
            const auto part = [&](Tensor& y, const Tensor& weights, const Tensor& biases) {
              return Projection{y, weights, biased ? ConstTensorView(biases) : ConstTensorView()};
            };
            const Projection gpu_parts[] = {part(gpu_gate, gpu_w[0], gpu_bias[0]),
                                            part(gpu_up, gpu_w[1], gpu_bias[1])};
            gated_linears(gate, part(gate, w[0], bias[0]), part(up, w[1], bias[1]),
                          Activation::kSilu, x, cpu_);
            Tensor y = on_gpu(poisoned({rows, out}));
            gated_linears(y, gpu_parts[0], gpu_parts[1], Activation::kSilu, gpu_x, *gpu_);
            // Tensor cores take rows rounded to the weights' format.
            const double gate_error = dtype == DType::kF32 || rows <= 4 ? 1e-5
                                      : dtype == DType::kF16            ? 2e-3
                                                                        : 1.2e-2;
            EXPECT_LE(error(y, gate), gate_error);

            Tensor half(DType::kBF16, {rows, out}, kGpu);
            Tensor rounded(DType::kBF16, {rows, out}, kGpu);
            gated_linears(half, gpu_parts[0], gpu_parts[1], Activation::kSilu, gpu_x, *gpu_);
            convert(rounded, y, *gpu_);
            EXPECT_LE(error(half, on_host(rounded)), rows <= 4 ? 4e-3 : 0);
            gated_linears(gpu_gate, gpu_parts[0], gpu_parts[1], Activation::kSilu, gpu_x, *gpu_);
            EXPECT_EQ(error(gpu_gate, on_host(y)), 0);
          }
        }
      }
    }
  }
}

/// A row among few has the bits that it has alone.
TEST_F(Cuda, FewRowsDoNotDependOnTheirCompany) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t in : {88, 1024, 4096}) {
      const Tensor w = on_gpu(normal_tensor(dtype, {63, in}, 2, 0.1f));
      const Tensor up = on_gpu(normal_tensor(dtype, {63, in}, 3, 0.1f));
      const Tensor x = on_gpu(normal_tensor(DType::kF32, {4, in}, 1));
      const auto run = [&](int64_t first, int64_t rows, bool gated) {
        Tensor y(DType::kF32, {rows, 63}, kGpu);
        Tensor other(DType::kF32, {rows, 63}, kGpu);
        const ConstTensorView from = x.view().slice(first, rows);
        if (gated) {
          gated_linears(y, {y, w, {}}, {other, up, {}}, Activation::kSilu, from, *gpu_);
        } else {
          linear(y, from, w, {}, false, *gpu_);
        }
        return on_host(y);
      };
      for (const bool gated : {false, true}) {
        for (const int64_t rows : {2, 3, 4}) {
          const Tensor together = run(0, rows, gated);
          for (int64_t row = 0; row < rows; ++row) {
            const Tensor alone = run(row, 1, gated);
            EXPECT_TRUE(testing::same_bits(alone.view(), together.view().slice(row, 1)))
                << dtype_name(dtype) << ", in " << in << ", row " << row << " of " << rows;
          }
        }
      }
    }
  }
}

/// What is written in the weights' type is what a conversion afterwards would have made, so
/// products of many rows keep their bits.
TEST_F(Cuda, HalfOperandsKeepTheBits) {
  for (const int64_t rows : {1, 5, 17, 130}) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const int64_t in : {64, 50, 1288}) {
        const Tensor x = on_gpu(normal_tensor(DType::kF32, {rows, in}, 1, 3.0f));
        const Tensor up = on_gpu(normal_tensor(DType::kF32, {rows, in}, 2));
        const Tensor weight = on_gpu(normal_tensor(DType::kF32, {in}, 3));
        const Tensor bias = on_gpu(normal_tensor(DType::kF32, {in}, 4));
        Tensor wide(DType::kF32, {rows, in}, kGpu);
        Tensor rounded(dtype, {rows, in}, kGpu);
        Tensor half(dtype, {rows, in}, kGpu);
        const auto expect_same = [&](const char* op) {
          convert(rounded, wide, *gpu_);
          EXPECT_TRUE(testing::same_bits(on_host(half).view(), on_host(rounded).view()))
              << op << ", " << rows << " x " << in << ", " << dtype_name(dtype);
        };
        layer_norm(wide, x, weight, bias, 1e-5f, *gpu_);
        layer_norm(half, x, weight, bias, 1e-5f, *gpu_);
        expect_same("layer_norm");
        activate(wide, x, Activation::kGelu, *gpu_);
        activate(half, x, Activation::kGelu, *gpu_);
        expect_same("activate");
        activate_gate(wide, x, up, Activation::kSilu, *gpu_);
        activate_gate(half, x, up, Activation::kSilu, *gpu_);
        expect_same("activate_gate");
        rms_norm(wide, x, weight, 1e-5f, *gpu_);
        rms_norm(half, x, weight, 1e-5f, *gpu_);
        expect_same("rms_norm");

        for (const int64_t out : {96, 31}) {
          const Tensor w = on_gpu(normal_tensor(dtype, {out, in}, 5, 0.1f));
          const bool many = rows > 4 && in % 8 == 0 && out % 16 == 0;
          EXPECT_EQ(operand_dtype({w}, rows), many ? dtype : DType::kF32);
          const Tensor wide_w = on_gpu(normal_tensor(DType::kF32, {out, in}, 5, 0.1f));
          EXPECT_EQ(operand_dtype({w, wide_w}, rows), DType::kF32) << "they differ";
          // Elsewhere halves are taken too, as the floats that they are.
          if (!many) convert(wide, rounded, *gpu_);
          Tensor y = on_gpu(normal_tensor(DType::kF32, {rows, out}, 6));
          Tensor same = on_gpu(on_host(y));
          for (const bool add : {true, false}) {
            linear(y, wide, w, {}, add, *gpu_);
            linear(same, half, w, {}, add, *gpu_);
            EXPECT_TRUE(testing::same_bits(on_host(same).view(), on_host(y).view()))
                << rows << " x " << in << " to " << out << ", " << dtype_name(dtype);
          }
          const Projection part{same, w, {}};
          linears({&part, 1}, half, *gpu_);
          EXPECT_TRUE(testing::same_bits(on_host(same).view(), on_host(y).view()));
        }
      }
    }
  }
}

/// Kernels that are started before those ahead of them have ended wait for what those write, also
/// when they are recorded.
TEST_F(Cuda, KernelsThatStartEarlyWait) {
  constexpr int64_t kWidth = 1024;
  const Tensor square = on_gpu(normal_tensor(DType::kBF16, {kWidth, kWidth}, 1, 0.03f));
  const Tensor weight = on_gpu(normal_tensor(DType::kF32, {kWidth}, 2));
  const Tensor cos = on_gpu(normal_tensor(DType::kF32, {4, 32}, 3));
  const Tensor sin = on_gpu(normal_tensor(DType::kF32, {4, 32}, 4));
  enum class Mode : uint8_t { kWaiting, kQueued, kRecorded };
  for (const int64_t rows : {1, 4}) {
    const auto run = [&](Mode mode) {
      Tensor x = on_gpu(normal_tensor(DType::kF32, {rows, kWidth}, 5));
      Tensor a(DType::kF32, {rows, kWidth}, kGpu);
      Tensor b(DType::kF32, {rows, kWidth}, kGpu);
      Tensor copied(DType::kF32, {rows, kWidth}, kGpu);
      const Projection part{a, square, {}};
      const Projection other{b, square, {}};
      const TensorView heads[] = {a.view().reshape({rows, 16, 64})};
      const auto done = [&] {
        if (mode == Mode::kWaiting) gpu_->synchronize();
      };
      const auto round = [&] {
        linears({&part, 1}, x, *gpu_);
        done();
        rotate(heads, cos.view().slice(0, rows), sin.view().slice(0, rows), *gpu_);
        done();
        linear(x, a, square, {}, /*add=*/true, *gpu_);
        done();
        rms_norm(x, x, weight, 1e-5f, *gpu_);
        done();
        gated_linears(a, part, other, Activation::kGelu, x, *gpu_);
        done();
        add(x, a, *gpu_);
        done();
        convert(copied, x, *gpu_);
        done();
        activate_gate(x, x, copied, Activation::kQuickGelu, *gpu_);
        done();
        layer_norm(x, x, weight, weight, 1e-5f, *gpu_);
        done();
      };
      constexpr int kRounds = 100;
      if (mode == Mode::kRecorded) {
        Recording recording;
        recording.make(*gpu_, round);
        for (int i = 0; i < kRounds; ++i) recording.run(*gpu_);
        return on_host(x);
      }
      for (int i = 0; i < kRounds; ++i) round();
      return on_host(x);
    };
    const Tensor expected = run(Mode::kWaiting);
    EXPECT_FALSE(std::isnan(expected.as<float>()[0]));
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(testing::same_bits(run(Mode::kQueued).view(), expected.view())) << rows;
      EXPECT_TRUE(testing::same_bits(run(Mode::kRecorded).view(), expected.view())) << rows;
    }
  }
}

TEST_F(Cuda, NormsActivationsAndElements) {
  for (const int64_t dim : {1, 7, 64, 1000, 4096, 4099, 5124}) {
    for (const int64_t rows : {1, 3, 577}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, dim}, 5, 3.0f);
      const Tensor weight = normal_tensor(DType::kF32, {dim}, 6);
      const Tensor bias = normal_tensor(DType::kF32, {dim}, 7);
      const Tensor gpu_x = on_gpu(x);
      const Tensor gpu_weight = on_gpu(weight);
      const Tensor gpu_bias = on_gpu(bias);
      Tensor y = poisoned({rows, dim});
      Tensor gpu_y = on_gpu(y);
      rms_norm(y, x, weight, 1e-5f, cpu_);
      rms_norm(gpu_y, gpu_x, gpu_weight, 1e-5f, *gpu_);
      EXPECT_LE(error(gpu_y, y), 4e-6);
      Tensor in_place = on_gpu(x);
      rms_norm(in_place, in_place, gpu_weight, 1e-5f, *gpu_);
      EXPECT_TRUE(testing::same_bits(on_host(in_place).view(), on_host(gpu_y).view()));
      layer_norm(y, x, weight, bias, 1e-5f, cpu_);
      layer_norm(gpu_y, gpu_x, gpu_weight, gpu_bias, 1e-5f, *gpu_);
      EXPECT_LE(error(gpu_y, y), 2e-6);
      add(y, x, cpu_);
      add(gpu_y, gpu_x, *gpu_);
      EXPECT_LE(error(gpu_y, y), 2e-6);
      add_scaled(y, x, weight, cpu_);
      add_scaled(gpu_y, gpu_x, gpu_weight, *gpu_);
      EXPECT_LE(error(gpu_y, y), 2e-6);
      for (const Activation kind :
           {Activation::kQuickGelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
        copy(y, x, cpu_);
        copy(gpu_y, gpu_x, *gpu_);
        activate(y, y, kind, cpu_);
        activate(gpu_y, gpu_y, kind, *gpu_);
        EXPECT_LE(error(gpu_y, y), 4e-6);
        activate_gate(y, y, x, kind, cpu_);
        activate_gate(gpu_y, gpu_y, gpu_x, kind, *gpu_);
        EXPECT_LE(error(gpu_y, y), 4e-6);
      }
    }
  }
}

TEST_F(Cuda, GatherConvertAndColumnsAreExact) {
  const std::vector<int32_t> ids = {4, 0, 4, 8, 1};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Tensor table = normal_tensor(dtype, {9, 37}, 8);
    const Tensor gpu_table = on_gpu(table);
    Tensor y = poisoned({5, 37});
    Tensor gpu_y = on_gpu(y);
    gather_rows(y, table, ids, cpu_);
    gather_rows(gpu_y, gpu_table, ids, *gpu_);
    EXPECT_EQ(error(gpu_y, y), 0);
    Tensor narrow(dtype, {5, 37});
    Tensor gpu_narrow(dtype, {5, 37}, kGpu);
    convert(narrow, y, cpu_);
    convert(gpu_narrow, gpu_y, *gpu_);
    EXPECT_EQ(error(gpu_narrow, narrow), 0);
  }
}

TEST_F(Cuda, HadamardIsExact) {
  for (const int64_t dim : {1, 20, 64, 80, 128, 256, 2048}) {
    for (const int64_t rows : {1, 7, 500}) {
      const Tensor q = normal_tensor(DType::kF32, {rows, 3, dim}, 8);
      const Tensor k = normal_tensor(DType::kF32, {rows, 1, dim}, 9);
      Tensor to_q = poisoned({rows, 3, dim});
      Tensor to_k = poisoned({rows, 1, dim});
      Tensor gpu_q = on_gpu(q);
      Tensor gpu_k = on_gpu(to_k);
      const HadamardRows on_cpu[] = {{q, to_q}, {k, to_k}};
      hadamard(on_cpu, cpu_);
      const Tensor from_k = on_gpu(k);
      const HadamardRows there[] = {{gpu_q, gpu_q}, {from_k, gpu_k}};  // one in its place
      hadamard(there, *gpu_);
      EXPECT_TRUE(testing::same_bits(on_host(gpu_q), to_q)) << rows << " x " << dim;
      EXPECT_TRUE(testing::same_bits(on_host(gpu_k), to_k)) << rows << " x " << dim;
    }
  }
}

TEST_F(Cuda, BlendRowsIsExact) {
  for (const int terms : {1, 2, 3, 4}) {
    for (const int64_t dim : {1, 37, 256, 1152}) {
      for (const int64_t rows : {1, 5, 3000}) {
        const Tensor x = normal_tensor(DType::kF32, {29, dim}, 8);
        RowBlend blend;
        blend.terms = terms;
        blend.weights = testing::normal_values(static_cast<size_t>(rows * terms), 9);
        for (size_t i = 0; i < blend.weights.size(); ++i) {
          blend.indices.push_back(static_cast<int32_t>(i * 11 % 29));
        }
        Tensor y = poisoned({rows, dim});
        Tensor gpu_y = on_gpu(y);
        blend_rows(y, x, blend, cpu_);
        blend_rows(gpu_y, on_gpu(x), blend, *gpu_);
        EXPECT_TRUE(testing::same_bits(on_host(gpu_y), y)) << rows << " x " << dim << ", " << terms;
      }
    }
  }
}

TEST_F(Cuda, RandomNumbersHaveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const float width : {1.0f, 0.0271f, 3e-6f}) {
      for (const int64_t count : {1, 255, 257, 3'000'001}) {
        Tensor host(dtype, {count});
        Tensor gpu(dtype, {count}, kGpu);
        fill_random(host, 12345, width, cpu_);
        fill_random(gpu, 12345, width, *gpu_);
        EXPECT_TRUE(testing::same_bits(on_host(gpu).view(), host.view()))
            << dtype_name(dtype) << ", width " << width << ", " << count;
      }
    }
  }
}

TEST_F(Cuda, Rotate) {
  for (const int head_dim : {32, 80, 128}) {
    for (const int half : {head_dim / 2, head_dim / 4}) {
      Tensor x = normal_tensor(DType::kF32, {5, 3, head_dim}, 10);
      Tensor gpu_x = on_gpu(x);
      const Tensor cos = normal_tensor(DType::kF32, {5, half}, 11);
      const Tensor sin = normal_tensor(DType::kF32, {5, half}, 12);
      const Tensor gpu_cos = on_gpu(cos);
      const Tensor gpu_sin = on_gpu(sin);
      rotate(std::array{TensorView(x)}, cos, sin, cpu_);
      rotate(std::array{TensorView(gpu_x)}, gpu_cos, gpu_sin, *gpu_);
      EXPECT_LE(error(gpu_x, x), 1e-7);
    }
  }
}

/// One launch turns several tensors as each alone.
TEST_F(Cuda, RotateTakesAList) {
  for (const int half : {16, 10, 3}) {
    std::vector<Tensor> alone, together;
    std::vector<TensorView> list;
    const Tensor cos = on_gpu(normal_tensor(DType::kF32, {5, half}, 11));
    const Tensor sin = on_gpu(normal_tensor(DType::kF32, {5, half}, 12));
    for (const int64_t heads : {7, 1, 32, 3, 2}) {
      const int64_t head_dim = heads == 2 ? 40 : 36;
      const Tensor x = normal_tensor(DType::kF32, {5, heads, head_dim}, 10);
      alone.push_back(on_gpu(x));
      together.push_back(on_gpu(x));
      rotate(std::array{TensorView(alone.back())}, cos, sin, *gpu_);
    }
    for (Tensor& x : together) list.emplace_back(x);
    rotate(list, cos, sin, *gpu_);
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(testing::same_bits(on_host(together[i]).view(), on_host(alone[i]).view())) << i;
    }
  }
}

TEST_F(Cuda, StoreRowsIsExact) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int dim : {20, 19}) {  // the first is stored four channels at a time
      const Tensor x = normal_tensor(DType::kF32, {6, 67, dim}, 13);
      const Tensor gpu_x = on_gpu(x);
      Tensor rows(dtype, {67, 6, dim});
      Tensor gpu_rows(dtype, {67, 6, dim}, kGpu);
      std::vector<RowDestination> to(67);
      std::vector<RowDestination> gpu_to(67);
      for (int64_t head = 0; head < 67; ++head) {
        to[static_cast<size_t>(head)].data = rows.view().slice(head, 1).data();
        gpu_to[static_cast<size_t>(head)].data = gpu_rows.view().slice(head, 1).data();
      }
      store_rows(to, dtype, x, cpu_);
      store_rows(gpu_to, dtype, gpu_x, *gpu_);
      EXPECT_EQ(error(gpu_rows, rows), 0);
    }
  }
}

struct HeadShape {
  int kv_heads, q_per_kv, head_dim;
};

TEST_F(Cuda, PromptAttention) {
  for (const HeadShape& s :
       {HeadShape{1, 1, 32}, HeadShape{2, 4, 64}, HeadShape{3, 7, 80}, HeadShape{2, 2, 96},
        HeadShape{1, 8, 128}, HeadShape{1, 2, 256}, HeadShape{2, 1, 20}}) {
    for (const int64_t n : {1, 5, 64, 77, 200}) {
      for (const bool causal : {true, false}) {
        const Tensor q = normal_tensor(DType::kF32, {n, s.kv_heads * s.q_per_kv, s.head_dim}, 14);
        const Tensor k = normal_tensor(DType::kF32, {n, s.kv_heads, s.head_dim}, 15);
        const Tensor v = normal_tensor(DType::kF32, {n, s.kv_heads, s.head_dim}, 16);
        // Two segments of earlier rows a kv_head.
        const Tensor past = normal_tensor(DType::kF16, {4 * s.kv_heads, 33, s.head_dim}, 17);
        const Tensor gpu_past = on_gpu(past);
        const auto segments_of = [&](ConstTensorView rows) {
          std::vector<KeyValueRows> segments;
          for (int head = 0; head < s.kv_heads; ++head) {
            segments.push_back({rows.slice(4 * head, 1).data(), rows.slice(4 * head + 1, 1).data(),
                                DType::kF16, 33});
            segments.push_back({rows.slice(4 * head + 2, 1).data(),
                                rows.slice(4 * head + 3, 1).data(), DType::kF16, 12});
          }
          return segments;
        };
        const Tensor gpu_q = on_gpu(q);
        const Tensor gpu_k = on_gpu(k);
        const Tensor gpu_v = on_gpu(v);
        for (const bool with_past : {false, true}) {
          Tensor out = poisoned(q.shape());
          Tensor gpu_out = on_gpu(out);
          const auto segments = with_past ? segments_of(past) : std::vector<KeyValueRows>{};
          const auto gpu_segments = with_past ? segments_of(gpu_past) : std::vector<KeyValueRows>{};
          attention(out, q, k, v, segments, causal, 0.2f, DType::kF32, cpu_);
          attention(gpu_out, gpu_q, gpu_k, gpu_v, gpu_segments, causal, 0.2f, DType::kF32, *gpu_);
          EXPECT_LE(error(gpu_out, out), 2e-6)
              << s.kv_heads << " x " << s.q_per_kv << " x " << s.head_dim << ", n " << n
              << (causal ? ", causal" : "") << (with_past ? ", past" : "");
        }
      }
    }
  }
}

TEST_F(Cuda, FullRowsOfEveryShape) {
  for (const HeadShape& s :
       {HeadShape{1, 1, 32}, HeadShape{1, 4, 64}, HeadShape{1, 7, 80}, HeadShape{1, 5, 96},
        HeadShape{1, 16, 128}, HeadShape{1, 3, 256}, HeadShape{1, 2, 20}}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      // KV heads of full parts, of ragged ones, of one row, of many parts.
      const std::vector<int> lengths = {256, 388, 1, 257, 900};
      const Tensor found = full_rows(s.q_per_kv, s.head_dim, dtype, lengths, kGpu, *gpu_);
      const Tensor expected = full_rows(s.q_per_kv, s.head_dim, dtype, lengths, {}, cpu_);
      EXPECT_LE(error(found, expected), 3e-6)
          << s.q_per_kv << " x " << s.head_dim << " " << dtype_name(dtype);
    }
  }
}

TEST_F(Cuda, ARecordingSegmentsAgainOnWhatIsThereThen) {
  const Shape shape{3, 5};
  const auto of = [&](float x) {
    return make_tensor(DType::kF32, shape, std::vector<float>(15, x));
  };
  Tensor sum = on_gpu(of(1));
  Tensor step = on_gpu(of(2));
  Recording recording;
  EXPECT_FALSE(recording.fits(*gpu_));
  recording.make(*gpu_, [&] { add(sum, step, *gpu_); });
  EXPECT_TRUE(recording.fits(*gpu_));
  EXPECT_EQ(error(sum, of(1)), 0) << "nothing runs while it is recorded";
  recording.run(*gpu_);
  recording.run(*gpu_);
  EXPECT_EQ(error(sum, of(5)), 0);
  copy(step, of(10), *gpu_);
  recording.run(*gpu_);
  EXPECT_EQ(error(sum, of(15)), 0);

  // What cannot be run again is refused, and the stream serves on.
  EXPECT_THROW(recording.make(*gpu_, [&] { copy(step, of(0), *gpu_); }), Error);
  EXPECT_FALSE(recording.fits(*gpu_));
  EXPECT_THROW(recording.make(*gpu_, [&] { gpu_->synchronize(); }), Error);
  EXPECT_EQ(error(step, of(10)), 0);
  recording.make(*gpu_, [&] { add(sum, sum, *gpu_); });
  recording.run(*gpu_);
  EXPECT_EQ(error(sum, of(30)), 0);
  gpu_->queue().scratch(0, size_t{1} << 20);
  EXPECT_FALSE(recording.fits(*gpu_)) << "scratch memory may have moved";
  EXPECT_THROW(recording.make(cpu_, [] {}), Error);
}

TEST_F(Cuda, MoreMemoryThanThereIsIsRefused) {
  try {
    Buffer buffer(kGpu, size_t{1} << 50);
    FAIL() << "a petabyte was given";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("bytes free"), std::string::npos) << error.what();
  }
  Buffer after(kGpu, 1 << 20);  // the GPU still serves
  EXPECT_NE(after.data(), nullptr);
}

TEST_F(Cuda, AGpuThatIsNotThereIsRefused) {
  try {
    Stream stream(pool_, {DeviceKind::kCuda, 99});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("choose cuda:0"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace kvlm
