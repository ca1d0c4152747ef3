#include "kernels/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;
using testing::normal_tensor;
using testing::same_bits;
using testing::values_of;

constexpr DType kWeightTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

Tensor run_linear(ConstTensorView x, ConstTensorView w, ConstTensorView bias, int threads) {
  ThreadPool pool(threads);
  Stream stream(pool);
  Tensor y(DType::kF32, {x.shape()[0], w.shape()[0]});
  std::memset(y.view().data(), 0xff, y.bytes());  // NaN: nothing may be read before it is written
  linear(y, x, w, bias, /*add=*/false, stream);
  return y;
}

reference::Values magnitudes(reference::Values values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

void expect_parity(DType dtype, int64_t rows, int64_t in, int64_t out, bool with_bias, bool add,
                   Stream& stream) {
  SCOPED_TRACE(::testing::Message() << dtype_name(dtype) << " rows " << rows << " in " << in
                                    << " out " << out << " bias " << with_bias << " add " << add);
  const Tensor x = normal_tensor(DType::kF32, {rows, in}, 1);
  const Tensor w = normal_tensor(dtype, {out, in}, 2);
  const Tensor bias = normal_tensor(DType::kF32, {out}, 3);
  Tensor y = normal_tensor(DType::kF32, {rows, out}, 4);
  const reference::Values before = values_of(y.view());
  const ConstTensorView bias_view = with_bias ? bias.view() : ConstTensorView();

  linear(y, x, w, bias_view, add, stream);

  reference::Values want = reference::linear(
      values_of(x), values_of(w), with_bias ? values_of(bias) : reference::Values{},
      static_cast<size_t>(rows), static_cast<size_t>(in), static_cast<size_t>(out));
  // Rounding errs in proportion to what is summed, not to the sum, which may cancel.
  reference::Values size = reference::linear(magnitudes(values_of(x)), magnitudes(values_of(w)),
                                             magnitudes(values_of(bias)), static_cast<size_t>(rows),
                                             static_cast<size_t>(in), static_cast<size_t>(out));
  const reference::Values got = values_of(y);
  for (size_t i = 0; i < want.size(); ++i) {
    if (add) want[i] += before[i];
    if (add) size[i] += std::abs(before[i]);
    ASSERT_NEAR(got[i], want[i], 4e-7 * size[i]) << i;
  }
}

TEST(Linear, EqualsTheReferenceAtAwkwardSizes) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : kWeightTypes) {
    for (const int64_t in : {1, 3, 31, 32, 33, 48, 80, 255, 256, 257, 1000}) {
      for (const int64_t out : {1, 3, 31, 33, 48, 80, 255, 257}) {
        for (const int64_t rows : {1, 7, 16, 17, 31, 33}) {
          if (in * out * rows > 1'000'000) continue;
          expect_parity(dtype, rows, in, out, rows % 2 == 1, in % 2 == 1, stream);
        }
      }
    }
  }
}

TEST(Linear, EqualsTheReferenceForEveryNumberOfRows) {
  ThreadPool pool(3);
  Stream stream(pool);
  for (const DType dtype : kWeightTypes) {
    for (int64_t rows = 1; rows <= 34; ++rows) {
      expect_parity(dtype, rows, 83, 37, true, rows % 2 == 0, stream);
    }
  }
}

TEST(Linear, EqualsTheReferenceAtTheSizesOfAVisionTower) {
  ThreadPool pool(2);
  Stream stream(pool);
  expect_parity(DType::kBF16, 577, 256, 1000, true, false, stream);
  expect_parity(DType::kF16, 577, 1000, 80, true, true, stream);
  expect_parity(DType::kF32, 577, 1000, 257, false, true, stream);
}

TEST(Linear, AddsToWhatIsThereWithAndWithoutBias) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : kWeightTypes) {
    for (const bool with_bias : {false, true}) {
      for (const bool add : {false, true}) {
        expect_parity(dtype, 5, 600, 300, with_bias, add, stream);
        expect_parity(dtype, 40, 600, 300, with_bias, add, stream);
      }
    }
  }
}

TEST(Linear, ARowHasTheSameBitsInABatchOfAnySizeUpToTheDecodeLimit) {
  for (const DType dtype : kWeightTypes) {
    for (const int64_t in : {1, 33, 80, 1000}) {
      const int64_t out = 131;
      const Tensor x = normal_tensor(DType::kF32, {kMaxDecodeRows, in}, 5);
      const Tensor w = normal_tensor(dtype, {out, in}, 6);
      const Tensor bias = normal_tensor(DType::kF32, {out}, 7);
      const Tensor together = run_linear(x, w, bias, 1);
      for (int64_t rows = 1; rows < kMaxDecodeRows; ++rows) {
        for (const int64_t begin : {int64_t{0}, kMaxDecodeRows - rows}) {
          const Tensor some = run_linear(x.view().slice(begin, rows), w, bias, 1);
          EXPECT_TRUE(same_bits(some, together.view().slice(begin, rows)))
              << dtype_name(dtype) << " in " << in << " rows " << rows << " from " << begin;
        }
      }
    }
  }
}

TEST(Linear, HasTheSameBitsWithAnyNumberOfThreads) {
  for (const DType dtype : kWeightTypes) {
    for (const int64_t rows : {1, 8, 16, 17, 577}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, 700}, 8);
      const Tensor w = normal_tensor(dtype, {530, 700}, 9);
      const Tensor bias = normal_tensor(DType::kF32, {530}, 10);
      const Tensor one = run_linear(x, w, bias, 1);
      for (const int threads : {2, 3, 5}) {
        EXPECT_TRUE(same_bits(run_linear(x, w, bias, threads), one))
            << dtype_name(dtype) << " rows " << rows << " threads " << threads;
      }
    }
  }
}

TEST(Linear, NanAndInfinityReachTheirRowAndNoOther) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const int64_t rows : {3, 20}) {
    for (const DType dtype : kWeightTypes) {
      for (const int64_t at : {0, 40}) {  // in a whole vector and in the short last one
        Tensor x = normal_tensor(DType::kF32, {rows, 41}, 11);
        const Tensor w = make_tensor(dtype, {19, 41}, std::vector<float>(19 * 41, 1.0f));
        x.as<float>()[41 + at] = std::numeric_limits<float>::quiet_NaN();
        x.as<float>()[2 * 41 + at] = -kInf;
        const Tensor y = run_linear(x, w, {}, 2);
        for (int64_t o = 0; o < 19; ++o) {
          EXPECT_TRUE(std::isfinite(y.as<float>()[o]));
          EXPECT_TRUE(std::isnan(y.as<float>()[19 + o]));
          EXPECT_EQ(y.as<float>()[2 * 19 + o], -kInf);
        }
      }
    }
  }
}

TEST(Linear, NanAndInfinityInTheWeightsReachTheirOutput) {
  for (const int64_t rows : {2, 20}) {
    for (const DType dtype : kWeightTypes) {
      std::vector<float> weights(5 * 41, 0.5f);
      weights[41 + 3] = std::numeric_limits<float>::quiet_NaN();
      weights[2 * 41 + 40] = std::numeric_limits<float>::infinity();
      const Tensor x = make_tensor(DType::kF32, {rows, 41},
                                   std::vector<float>(static_cast<size_t>(rows) * 41, 1.0f));
      const Tensor y = run_linear(x, make_tensor(dtype, {5, 41}, weights), {}, 1);
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(y.as<float>()[r * 5], 20.5f);
        EXPECT_TRUE(std::isnan(y.as<float>()[r * 5 + 1]));
        EXPECT_TRUE(std::isinf(y.as<float>()[r * 5 + 2]));
        EXPECT_EQ(y.as<float>()[r * 5 + 3], 20.5f);
      }
    }
  }
}

TEST(Linear, NoChannelsGiveTheBias) {
  for (const int64_t rows : {2, 20}) {
    const Tensor x(DType::kF32, {rows, 0});
    const Tensor w(DType::kBF16, {3, 0});
    const Tensor bias = make_tensor(DType::kF32, {3}, {1, 2, 3});
    const Tensor y = run_linear(x, w, bias, 1);
    for (int64_t i = 0; i < rows * 3; ++i) EXPECT_EQ(y.as<float>()[i], float(i % 3 + 1));
  }
}

TEST(Linear, NoRowsAreNoWork) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor y(DType::kF32, {0, 3});
  linear(y, Tensor(DType::kF32, {0, 4}), normal_tensor(DType::kF32, {3, 4}, 1), {}, true, stream);
}

TEST(Linear, AGatedProductIsItsParts) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t rows : {1, 3, 17}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, 50}, 1);
      const Tensor w = normal_tensor(dtype, {31, 50}, 3);
      const Tensor up = normal_tensor(dtype, {31, 50}, 4);
      const Tensor bias = normal_tensor(DType::kF32, {31}, 5);
      EXPECT_EQ(operand_dtype({w}, rows), DType::kF32);
      Tensor a(DType::kF32, {rows, 31});
      Tensor b(DType::kF32, {rows, 31});
      linear(a, x, w, bias, false, stream);
      linear(b, x, up, {}, false, stream);
      activate_gate(a, a, b, Activation::kSilu, stream);

      Tensor gate_y(DType::kF32, {rows, 31});
      Tensor up_y(DType::kF32, {rows, 31});
      Tensor y(DType::kF32, {rows, 31});
      const Projection gate_part{gate_y, w, bias};
      const Projection up_part{up_y, up, {}};
      gated_linears(y, gate_part, up_part, Activation::kSilu, x, stream);
      EXPECT_TRUE(same_bits(y.view(), a.view()));
      gated_linears(gate_y, gate_part, up_part, Activation::kSilu, x, stream);
      EXPECT_TRUE(same_bits(gate_y.view(), a.view()));
    }
  }
}

TEST(Linear, AGatedProductSaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {2, 8}, 1);
  const Tensor w = normal_tensor(DType::kF16, {5, 8}, 3);
  Tensor gate(DType::kF32, {2, 5});
  Tensor other(DType::kF32, {2, 5});
  const auto refused = [&](TensorView to, const Projection& up) {
    return message_of(ErrorCode::kInvalidArgument, [&] {
      gated_linears(to, {gate, w, {}}, up, Activation::kSilu, x, stream);
    });
  };
  Tensor wide(DType::kF32, {2, 6});
  const Tensor wide_w = normal_tensor(DType::kF16, {6, 8}, 3);
  EXPECT_THAT(refused(gate, {wide, wide_w, {}}), HasSubstr("up.w has shape (6, 8)"));
  EXPECT_THAT(refused(wide, {other, w, {}}), HasSubstr("y has shape (2, 6)"));
  EXPECT_THAT(refused(other, {other, w, {}}), HasSubstr("y and up.y overlap"));
  EXPECT_THAT(refused(other, {gate, w, {}}), HasSubstr("gate.y and up.y overlap"));
  Tensor both(DType::kF32, {3, 5});
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] {
                           gated_linears(both.view().slice(1, 2), {both.view().slice(0, 2), w, {}},
                                         {other, w, {}}, Activation::kSilu, x, stream);
                         }),
              HasSubstr("y and gate.y overlap"));
  Tensor rounded(DType::kBF16, {2, 5});
  EXPECT_THAT(refused(rounded, {other, w, {}}),
              HasSubstr("gated_linears: y holds bf16, but activations on cpu are f32"));
}

struct TailCase {
  bool bias = false;
  std::optional<Activation> activation = {};
  bool gated = false;
  bool scale = false;
  bool add = false;
};

/// Every tail, so many rows by so many columns of a product over `in`, in plain double arithmetic.
void expect_tails(DType dtype, int64_t rows, int64_t in, int64_t columns, Stream& stream) {
  std::vector<TailCase> cases;
  for (const bool bias : {false, true}) {
    for (const bool scale : {false, true}) {
      for (const bool add : {false, true}) {
        cases.push_back({bias, {}, false, scale, add});
        for (const Activation activation : {Activation::kQuickGelu, Activation::kGelu,
                                            Activation::kGeluTanh, Activation::kSilu}) {
          cases.push_back({bias, activation, false, scale, add});
          cases.push_back({bias, activation, true, scale, add});
        }
      }
    }
  }
  for (const TailCase& one : cases) {
    SCOPED_TRACE(::testing::Message()
                 << dtype_name(dtype) << " rows " << rows << " in " << in << " columns " << columns
                 << " bias " << one.bias << " activation "
                 << (one.activation ? static_cast<int>(*one.activation) : -1) << " gated "
                 << one.gated << " scale " << one.scale << " add " << one.add);
    const int64_t out = one.gated ? 2 * columns : columns;
    const Tensor x = normal_tensor(DType::kF32, {rows, in}, 1);
    const Tensor w = normal_tensor(dtype, {out, in}, 2, 0.3f);
    const Tensor bias = normal_tensor(DType::kF32, {out}, 3);
    const Tensor scale = normal_tensor(DType::kF32, {columns}, 4);
    Tensor y = normal_tensor(DType::kF32, {rows, columns}, 5);
    const reference::Values before = values_of(y.view());
    if (!one.add) std::memset(y.view().data(), 0xff, y.bytes());  // NaN: not to be read

    LinearTail tail{.activation = one.activation, .gated = one.gated, .add = one.add};
    if (one.bias) tail.bias = bias;
    if (one.scale) tail.scale = scale;
    linear(y, x, w, tail, stream);

    const auto product_of = [&](auto&& change) {
      return reference::linear(change(values_of(x)), change(values_of(w)),
                               change(one.bias ? values_of(bias) : reference::Values{}),
                               static_cast<size_t>(rows), static_cast<size_t>(in),
                               static_cast<size_t>(out));
    };
    const reference::Values product = product_of([](reference::Values same) { return same; });
    const reference::Values size = product_of(magnitudes);  // what rounding is in proportion to
    const reference::Values factor = values_of(scale);
    const reference::Values got = values_of(y.view());
    for (size_t i = 0; i < got.size(); ++i) {
      double made = product[one.gated ? 2 * i : i];
      double allowed = one.gated ? size[2 * i] * size[2 * i + 1] : size[i];
      if (one.activation) made = reference::activation(made, *one.activation);
      if (one.gated) made *= product[2 * i + 1];
      const double by = one.scale ? factor[i % factor.size()] : 1;
      const double there = one.add ? before[i] : 0;
      allowed = 1e-6 * (allowed * std::abs(by) + std::abs(there));
      ASSERT_NEAR(got[i], made * by + there, allowed) << i;
    }
  }
}

TEST(Linear, ATailIsWhatItSaysInThatOrder) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : kWeightTypes) {
    for (const int64_t rows : {1, 17}) {
      for (const int64_t columns : {1, 7, 33}) {
        expect_tails(dtype, rows, 41, columns, stream);
      }
    }
  }
}

TEST(Linear, ATailSaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {3, 9}, 1);
  const Tensor w = normal_tensor(DType::kBF16, {6, 9}, 2);
  Tensor y(DType::kF32, {3, 6});
  Tensor narrow(DType::kF32, {3, 3});
  const auto refused = [&](TensorView to, ConstTensorView weights, const LinearTail& tail) {
    return message_of(ErrorCode::kInvalidArgument, [&] { linear(to, x, weights, tail, stream); });
  };
  const Tensor six = normal_tensor(DType::kF32, {6}, 3);
  const LinearTail gated{.activation = Activation::kSilu, .gated = true};
  EXPECT_THAT(refused(y, w, gated), HasSubstr("y has shape (3, 6)"));
  EXPECT_THAT(refused(narrow, w, {}), HasSubstr("y has shape (3, 3)"));
  EXPECT_THAT(refused(narrow, normal_tensor(DType::kBF16, {7, 9}, 2), gated),
              HasSubstr("w has shape (7, 9)"));
  EXPECT_THAT(refused(y, normal_tensor(DType::kBF16, {6, 8}, 2), {}),
              HasSubstr("w has shape (6, 8)"));
  EXPECT_THAT(refused(narrow, w, {.gated = true}),
              HasSubstr("a gated product needs an activation"));
  LinearTail wide_scale = gated;
  wide_scale.scale = six;
  EXPECT_THAT(refused(narrow, w, wide_scale), HasSubstr("scale has shape (6)"));
  const Tensor five = normal_tensor(DType::kF32, {5}, 3);
  EXPECT_THAT(refused(y, w, {.bias = five}), HasSubstr("bias has shape (5)"));
  const Tensor halves(DType::kF16, {6});
  EXPECT_THAT(refused(y, w, {.bias = halves}), HasSubstr("bias holds f16"));
  Tensor rounded(DType::kBF16, {3, 6});
  EXPECT_THAT(refused(rounded, w, {}), HasSubstr("y holds bf16"));
  Tensor both(DType::kF32, {3, 9});
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] {
                           linear(both.view().reshape({27}).slice(0, 18).reshape({3, 6}), both, w,
                                  LinearTail{}, stream);
                         }),
              HasSubstr("overlap"));
}

TEST(Linear, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {7, 32}, 1);
  const Tensor w = normal_tensor(DType::kBF16, {5, 32}, 1);
  Tensor y(DType::kF32, {7, 5});
  const auto refused = [&](TensorView to, ConstTensorView from, ConstTensorView weights,
                           ConstTensorView bias) {
    return message_of(ErrorCode::kInvalidArgument,
                      [&] { linear(to, from, weights, bias, false, stream); });
  };
  EXPECT_THAT(refused(y, x, normal_tensor(DType::kBF16, {5, 33}, 1), {}),
              ::testing::AllOf(HasSubstr("w has shape (5, 33)"), HasSubstr("(5, 32)")));
  Tensor wide(DType::kF32, {7, 6});
  EXPECT_THAT(refused(wide, x, w, {}), HasSubstr("y has shape (7, 6)"));
  EXPECT_THAT(refused(y, x.view().reshape({7, 4, 8}), w, {}), HasSubstr("2 dimensions"));
  EXPECT_THAT(refused(y, x, Tensor(DType::kI32, {5, 32}), {}), HasSubstr("w holds i32"));
  EXPECT_THAT(refused(y, Tensor(DType::kF16, {7, 32}), w, {}), HasSubstr("x holds f16"));
  EXPECT_THAT(refused(y, x, w, Tensor(DType::kF32, {6})), HasSubstr("bias has shape (6)"));
  EXPECT_THAT(refused(y, x, w, Tensor(DType::kBF16, {5})), HasSubstr("bias holds bf16"));
  const ConstTensorView elsewhere(w.view().data(), DType::kBF16, {5, 32}, {DeviceKind::kCuda, 1});
  EXPECT_THAT(refused(y, x, elsewhere, {}), HasSubstr("w is on cuda:1"));
  Tensor both(DType::kF32, {7, 32});
  EXPECT_THAT(refused(both.view().reshape({224}).slice(0, 35).reshape({7, 5}), both, w, {}),
              HasSubstr("overlap"));
}

}  // namespace
}  // namespace kvlm
