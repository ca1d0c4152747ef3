// The tests beside this one run on the best instruction set of the machine; this one takes the
// operations through all that the build has and the machine can run.

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <array>
#include <bit>
#include <numeric>

#include "kernels/activation.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using testing::make_tensor;
using testing::normal_tensor;
using testing::normalised_error;
using testing::same_bits;
using testing::values_of;

class EveryTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  ThreadPool pool_{2};
  Stream stream_{pool_};
};

TEST_P(EveryTarget, LinearEqualsTheReferenceAndKeepsARowsBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t in : {1, 83, 200}) {
      const Tensor x = normal_tensor(DType::kF32, {16, in}, 1);
      const Tensor w = normal_tensor(dtype, {29, in}, 2);
      const Tensor bias = normal_tensor(DType::kF32, {29}, 3);
      const auto want = reference::linear(values_of(x), values_of(w), values_of(bias), 16,
                                          static_cast<size_t>(in), 29);
      Tensor all(DType::kF32, {16, 29});
      linear(all, x, w, bias, false, stream_);
      EXPECT_LT(normalised_error(values_of(all), want), 1e-6);
      for (int64_t rows = 1; rows < 16; ++rows) {
        Tensor some(DType::kF32, {rows, 29});
        linear(some, x.view().slice(0, rows), w, bias, false, stream_);
        EXPECT_TRUE(same_bits(some, all.view().slice(0, rows))) << dtype_name(dtype) << rows;
      }
    }
  }
}

TEST_P(EveryTarget, ConversionsAreExactOnEveryBitPattern) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Tensor x(dtype, {65536});
    auto* bits = reinterpret_cast<uint16_t*>(x.view().data());
    std::iota(bits, bits + 65536, uint16_t{0});
    Tensor wide(DType::kF32, {65536});
    Tensor back(dtype, {65536});
    convert(wide, x, stream_);
    convert(back, wide, stream_);
    for (int i = 0; i < 65536; ++i) {
      const bool half = dtype == DType::kF16;
      const float want = half ? to_float(x.as<f16>()[i]) : to_float(x.as<bf16>()[i]);
      const uint16_t again = half ? back.as<f16>()[i].bits : back.as<bf16>()[i].bits;
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(wide.as<float>()[i])) << i;
        ASSERT_TRUE(std::isnan(half ? to_float(f16{again}) : to_float(bf16{again}))) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(wide.as<float>()[i]), std::bit_cast<uint32_t>(want)) << i;
        ASSERT_EQ(again, i);
      }
    }
  }
  // Between the patterns: midway, and a float to either side.
  std::vector<float> values;
  for (uint32_t place = 0; place < 0x7f80'0000u; place += 0x1000u) {
    for (const uint32_t step : {0xfffu, 0u, 1u}) {
      values.push_back(std::bit_cast<float>(place + step));
    }
  }
  const Tensor x = make_tensor(DType::kF32, {static_cast<int64_t>(values.size())}, values);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Tensor narrow(dtype, x.shape());
    convert(narrow, x, stream_);
    EXPECT_TRUE(same_bits(narrow, make_tensor(dtype, x.shape(), values))) << dtype_name(dtype);
  }
}

TEST_P(EveryTarget, NormsAndRotationEqualTheReference) {
  const Tensor x = normal_tensor(DType::kF32, {5, 83}, 4);
  const Tensor weight = normal_tensor(DType::kF32, {83}, 5);
  const Tensor bias = normal_tensor(DType::kF32, {83}, 6);
  Tensor y(DType::kF32, {5, 83});
  const auto eps = static_cast<double>(1e-5f);
  rms_norm(y, x, weight, 1e-5f, stream_);
  const auto rms = reference::rms_norm(values_of(x), values_of(weight), eps);
  EXPECT_LT(normalised_error(values_of(y), rms), 1e-6);
  layer_norm(y, x, weight, bias, 1e-5f, stream_);
  const auto layer = reference::layer_norm(values_of(x), values_of(weight), values_of(bias), eps);
  EXPECT_LT(normalised_error(values_of(y), layer), 1e-6);

  Tensor heads = normal_tensor(DType::kF32, {4, 3, 48}, 7);
  const Tensor cos = normal_tensor(DType::kF32, {4, 23}, 8);
  const Tensor sin = normal_tensor(DType::kF32, {4, 23}, 9);
  const auto want =
      reference::rotate(values_of(heads), values_of(cos), values_of(sin), 4, 3, 48, 23);
  rotate(std::array{TensorView(heads)}, cos, sin, stream_);
  EXPECT_LT(normalised_error(values_of(heads), want), 1e-6);
}

TEST_P(EveryTarget, ActivationsEqualTheFormulas) {
  std::vector<float> values;
  for (int i = -800; i <= 800; ++i) values.push_back(static_cast<float>(i) * 0.01f);
  for (const Activation activation :
       {Activation::kQuickGelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    Tensor x = make_tensor(DType::kF32, {static_cast<int64_t>(values.size())}, values);
    activate(x, x, activation, stream_);
    for (size_t i = 0; i < values.size(); ++i) {
      const double want = reference::activation(static_cast<double>(values[i]), activation);
      // Without fused multiply-add the exponents of the tails are rounded more often.
      ASSERT_NEAR(static_cast<double>(x.as<float>()[i]), want, 2e-5 * std::abs(want) + 1e-12);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, EveryTarget, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return hwy::TargetName(test.param); });

}  // namespace
}  // namespace kvlm
