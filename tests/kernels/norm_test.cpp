#include "kernels/norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;
using testing::normal_tensor;
using testing::normalised_error;
using testing::same_bits;
using testing::values_of;

TEST(RmsNorm, EqualsTheReference) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t dim : {1, 3, 31, 32, 33, 48, 80, 96, 255, 256, 257, 1000, 4097}) {
    for (const int64_t rows : {1, 7, 577}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, dim}, 1, 3.0f);
      const Tensor weight = normal_tensor(DType::kF32, {dim}, 2);
      Tensor y(DType::kF32, {rows, dim});
      rms_norm(y, x, weight, 1e-5f, stream);
      const auto want =
          reference::rms_norm(values_of(x), values_of(weight), static_cast<double>(1e-5f));
      EXPECT_LT(normalised_error(values_of(y.view()), want), 5e-7) << dim << " x " << rows;
    }
  }
}

TEST(LayerNorm, EqualsTheReference) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const int64_t dim : {3, 31, 32, 33, 48, 80, 96, 255, 256, 257, 1000, 4097}) {
    for (const int64_t rows : {1, 7, 577}) {
      Tensor x = normal_tensor(DType::kF32, {rows, dim}, 3);
      for (int64_t i = 0; i < x.view().elements(); ++i) x.as<float>()[i] += dim > 3 ? 5.0f : 0.0f;
      const Tensor weight = normal_tensor(DType::kF32, {dim}, 4);
      const Tensor bias = normal_tensor(DType::kF32, {dim}, 5);
      Tensor y(DType::kF32, {rows, dim});
      layer_norm(y, x, weight, bias, 1e-5f, stream);
      const auto want = reference::layer_norm(values_of(x.view()), values_of(weight),
                                              values_of(bias), static_cast<double>(1e-5f));
      EXPECT_LT(normalised_error(values_of(y), want), 4e-6) << dim << " x " << rows;
    }
  }
}

TEST(Norm, WorksInPlaceWithTheSameBits) {
  ThreadPool pool(3);
  Stream stream(pool);
  const Tensor weight = normal_tensor(DType::kF32, {83}, 6);
  const Tensor bias = normal_tensor(DType::kF32, {83}, 7);
  for (const bool mean : {false, true}) {
    Tensor x = normal_tensor(DType::kF32, {600, 83}, 8);
    Tensor y(DType::kF32, {600, 83});
    const auto norm = [&](TensorView to, ConstTensorView from) {
      mean ? layer_norm(to, from, weight, bias, 1e-6f, stream)
           : rms_norm(to, from, weight, 1e-6f, stream);
    };
    norm(y, x);
    norm(x, x);
    EXPECT_TRUE(same_bits(x.view(), y.view()));
  }
}

TEST(Norm, ARowOfZerosStaysFiniteAndNanStaysInItsRow) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor x(DType::kF32, {3, 40});
  std::fill_n(x.as<float>(), 120, 0.0f);
  x.as<float>()[40 + 39] = std::numeric_limits<float>::quiet_NaN();
  const Tensor weight = normal_tensor(DType::kF32, {40}, 9);
  const Tensor bias = normal_tensor(DType::kF32, {40}, 10);
  Tensor y(DType::kF32, {3, 40});
  rms_norm(y, x, weight, 1e-6f, stream);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(y.as<float>()[i], 0.0f);
    EXPECT_TRUE(std::isnan(y.as<float>()[40 + i]));
    EXPECT_EQ(y.as<float>()[80 + i], 0.0f);
  }
  layer_norm(y, x, weight, bias, 1e-6f, stream);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(y.as<float>()[i], bias.as<float>()[i]);
    EXPECT_TRUE(std::isnan(y.as<float>()[40 + i]));
  }
}

/// What stands in x afterwards, and the norm of the sum, in plain double arithmetic.
TEST(AddNorm, EqualsASumAndItsNorm) {
  ThreadPool pool(2);
  Stream stream(pool);
  constexpr float kEps = 1e-5f;
  for (const int64_t dim : {1, 3, 31, 33, 83, 257}) {
    for (const int64_t rows : {1, 7, 130}) {
      for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const bool scaled = variant % 2 != 0;
        const bool biased = variant / 2 % 2 != 0;
        const bool centred = variant / 4 != 0;
        if (centred && dim == 1) continue;  // a row less its mean is nothing but rounding
        const Tensor p[] = {normal_tensor(DType::kF32, {rows, dim}, 1),
                            normal_tensor(DType::kF32, {rows, dim}, 6)};
        const Tensor p_bias = normal_tensor(DType::kF32, {dim}, 7);
        const Tensor scale = normal_tensor(DType::kF32, {dim}, 2);
        const Tensor weight = normal_tensor(DType::kF32, {dim}, 3);
        const Tensor bias = normal_tensor(DType::kF32, {dim}, 4);
        for (const size_t count : {1, 2}) {
          for (const Residual residual : {Residual::kSum, Residual::kSame}) {
            Tensor x = normal_tensor(DType::kF32, {rows, dim}, 5, 3.0f);
            const reference::Values before = values_of(x.view());
            reference::Values sum = before;
            std::vector<Addend> addends;
            for (size_t a = 0; a < count; ++a) {
              // The second is added as it is.
              const bool plain = a == 1;
              addends.push_back({p[a], biased && !plain ? p_bias.view() : ConstTensorView(),
                                 scaled && !plain ? scale.view() : ConstTensorView()});
              const reference::Values added = values_of(p[a]);
              const reference::Values factor = values_of(scale);
              const reference::Values shift = values_of(p_bias);
              for (size_t i = 0; i < sum.size(); ++i) {
                const size_t column = i % factor.size();
                sum[i] += (added[i] + (biased && !plain ? shift[column] : 0)) *
                          (scaled && !plain ? factor[column] : 1);
              }
            }
            const auto eps = static_cast<double>(kEps);
            const reference::Values want =
                centred ? reference::layer_norm(sum, values_of(weight), values_of(bias), eps)
                        : reference::rms_norm(sum, values_of(weight), eps);
            Tensor y(DType::kF32, {rows, dim});
            add_norm(y, x, residual, addends, weight, centred ? bias.view() : ConstTensorView(),
                     kEps, stream);
            SCOPED_TRACE(::testing::Message() << dim << " x " << rows << ", variant " << variant
                                              << ", " << count << " addends");
            if (residual == Residual::kSame) {
              EXPECT_EQ(values_of(x.view()), before);
            } else {
              EXPECT_LT(normalised_error(values_of(x.view()), sum), 3e-7);
            }
            EXPECT_LT(normalised_error(values_of(y.view()), want), 4e-6);
          }
        }
      }
    }
  }
}

TEST(AddNorm, AddsAloneWhereNoNormIsWanted) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor p = make_tensor(DType::kF32, {2, 3}, {1, 2, 3, 4, 5, 6});
  const Tensor scale = make_tensor(DType::kF32, {3}, {2, 0, -1});
  Tensor x = make_tensor(DType::kF32, {2, 3}, {10, 20, 30, 40, 50, 60});
  const Addend plain[] = {{p}};
  add_norm({}, x, Residual::kSum, plain, {}, {}, 1e-5f, stream);
  EXPECT_EQ(values_of(x.view()), (reference::Values{11, 22, 33, 44, 55, 66}));
  const Addend scaled[] = {{p, {}, scale}};
  add_norm({}, x, Residual::kSum, scaled, {}, {}, 1e-5f, stream);
  EXPECT_EQ(values_of(x.view()), (reference::Values{13, 22, 30, 52, 55, 60}));
}

TEST(AddNorm, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor p = normal_tensor(DType::kF32, {2, 8}, 1);
  const Tensor weight = normal_tensor(DType::kF32, {8}, 2);
  Tensor x = normal_tensor(DType::kF32, {2, 8}, 3);
  Tensor y(DType::kF32, {2, 8});
  const auto refused = [&](TensorView to, ConstTensorView added, ConstTensorView scale,
                           ConstTensorView norm, ConstTensorView bias) {
    return message_of(ErrorCode::kInvalidArgument, [&] {
      const Addend addend[] = {{added, {}, scale}};
      add_norm(to, x, Residual::kSum, addend, norm, bias, 1e-5f, stream);
    });
  };
  const Tensor nine(DType::kF32, {9});
  EXPECT_THAT(refused(y, Tensor(DType::kF32, {2, 7}), {}, weight, {}),
              HasSubstr("add_norm: p has shape (2, 7)"));
  EXPECT_THAT(refused(y, Tensor(DType::kF16, {2, 8}), {}, weight, {}), HasSubstr("p holds f16"));
  EXPECT_THAT(refused(y, p, nine, weight, {}), HasSubstr("scale has shape (9)"));
  EXPECT_THAT(refused(y, p, {}, nine, {}), HasSubstr("weight has shape (9)"));
  EXPECT_THAT(refused(y, p, {}, {}, {}), HasSubstr("weight has shape ()"));
  EXPECT_THAT(refused(y, p, {}, weight, nine), HasSubstr("bias has shape (9)"));
  EXPECT_THAT(refused(y.view().slice(0, 1), p, {}, weight, {}), HasSubstr("y has shape (1, 8)"));
  EXPECT_THAT(refused(x, p, {}, weight, {}), HasSubstr("y and x overlap"));
  EXPECT_THAT(refused(y, x, {}, weight, {}), HasSubstr("x and p overlap"));
  EXPECT_THAT(refused(y, y, {}, weight, {}), HasSubstr("y and p overlap"));
  const auto counted = [&](TensorView to, Residual residual, std::vector<Addend> addends) {
    return message_of(ErrorCode::kInvalidArgument,
                      [&] { add_norm(to, x, residual, addends, weight, {}, 1e-5f, stream); });
  };
  EXPECT_THAT(counted(y, Residual::kSum, {}), HasSubstr("0 tensors to add and y"));
  EXPECT_THAT(counted(y, Residual::kSum, {{p}, {p}, {p}}), HasSubstr("3 tensors to add and y"));
  EXPECT_THAT(counted({}, Residual::kSame, {{p}}), HasSubstr("1 tensors to add and no y"));
  EXPECT_THAT(counted(y, Residual::kSum, {{p, nine}}), HasSubstr("p's bias has shape (9)"));
}

TEST(Norm, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {2, 8}, 1);
  const Tensor weight = normal_tensor(DType::kF32, {8}, 1);
  Tensor y(DType::kF32, {2, 8});
  const auto code = ErrorCode::kInvalidArgument;
  EXPECT_THAT(message_of(code, [&] { rms_norm(y, x, Tensor(DType::kF32, {9}), 1e-5f, stream); }),
              ::testing::AllOf(HasSubstr("rms_norm: weight has shape (9)"), HasSubstr("(8)")));
  EXPECT_THAT(message_of(code, [&] { rms_norm(y, x, Tensor(DType::kF16, {8}), 1e-5f, stream); }),
              HasSubstr("weight holds f16"));
  EXPECT_THAT(message_of(code, [&] { rms_norm(y.view().slice(0, 1), x, weight, 1e-5f, stream); }),
              HasSubstr("y has shape (1, 8)"));
  Tensor half(DType::kF16, {2, 8});
  EXPECT_THAT(message_of(code, [&] { rms_norm(half, x, weight, 1e-5f, stream); }),
              HasSubstr("rms_norm: y holds f16, but activations on cpu are f32"));
  EXPECT_THAT(message_of(code, [&] { layer_norm(y, x, weight, {}, 1e-5f, stream); }),
              HasSubstr("layer_norm: bias has shape ()"));
}

}  // namespace
}  // namespace kvlm
