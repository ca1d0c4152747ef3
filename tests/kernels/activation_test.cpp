#include "kernels/activation.h"

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
using testing::values_of;

constexpr Activation kAll[] = {Activation::kQuickGelu, Activation::kGelu, Activation::kGeluTanh,
                               Activation::kSilu};

/// Values from every part of the functions: around zero, the bend and far into both tails.
std::vector<float> telling_values() {
  std::vector<float> values = {0.0f, -0.0f, 1e-38f, -1e-38f, 1e-30f, -1e-20f};
  for (int i = -24000; i <= 24000; ++i) values.push_back(static_cast<float>(i) * 0x1p-10f);
  for (int i = -300; i <= 300; ++i) values.push_back(static_cast<float>(i));
  for (const float v : testing::normal_values(1001, 7)) values.push_back(v);
  return values;
}

TEST(Activate, EqualsTheFormulaInBothTails) {
  ThreadPool pool(2);
  Stream stream(pool);
  const std::vector<float> values = telling_values();
  for (const Activation activation : kAll) {
    const Shape shape{static_cast<int64_t>(values.size())};
    Tensor x = make_tensor(DType::kF32, shape, values);
    activate(x, x, activation, stream);
    double worst = 0;
    double worst_at = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<double>(values[i]);
      const double want = reference::activation(at, activation);
      // The exponent of the sigmoid forms is rounded before it is raised: |z| half ulps or so. They
      // end where exp(-z) leaves float, and erf where the result does.
      const bool sigmoid = activation != Activation::kGelu;
      const double z = sigmoid ? std::min(std::abs(at * at * at), 90.0) : 0;
      const double end = sigmoid ? 4e-37 : 1.2e-38;
      const double allowed = std::abs(want) * (5e-7 + 2e-7 * (at < 0 ? z : 0)) + end;
      const double error = std::abs(static_cast<double>(x.as<float>()[i]) - want) / allowed;
      if (!(error <= worst)) {
        worst = error;
        worst_at = at;
      }
    }
    EXPECT_LE(worst, 1) << "activation " << static_cast<int>(activation) << " at " << worst_at;
  }
}

TEST(Activate, EqualsTheFormulaForEveryLength) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (const Activation activation : kAll) {
    for (int64_t count = 1; count <= 70; ++count) {
      std::vector<float> values = testing::normal_values(static_cast<size_t>(count) + 1, 8);
      Tensor x = make_tensor(DType::kF32, {count + 1}, values);
      activate(x.view().slice(0, count), x.view().slice(0, count), activation, stream);
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        const double want = reference::activation(static_cast<double>(values[i]), activation);
        EXPECT_NEAR(static_cast<double>(x.as<float>()[i]), want, 1e-6 * std::abs(want) + 1e-12);
      }
      EXPECT_EQ(x.as<float>()[count], values.back());
    }
  }
}

TEST(Activate, KeepsNanAndTheLimits) {
  ThreadPool pool(1);
  Stream stream(pool);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation activation : kAll) {
    // A whole vector of the widest kind and a short one behind it.
    for (const int64_t count : {2, 64}) {
      std::vector<float> values(static_cast<size_t>(count) * 4);
      const float kinds[] = {kNan, kInf, 3e38f, -3e38f};
      for (size_t i = 0; i < values.size(); ++i) values[i] = kinds[i % 4];
      Tensor x = make_tensor(DType::kF32, {count * 4}, values);
      activate(x, x, activation, stream);
      for (size_t i = 0; i < values.size(); i += 4) {
        EXPECT_TRUE(std::isnan(x.as<float>()[i]));
        EXPECT_EQ(x.as<float>()[i + 1], kInf);
        EXPECT_EQ(x.as<float>()[i + 2], 3e38f);
        EXPECT_EQ(x.as<float>()[i + 3], 0.0f);
      }
    }
  }
}

TEST(ActivateGate, MultipliesByTheOtherBranch) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const Activation activation : kAll) {
    for (const int64_t dim : {1, 15, 16, 33, 1000, 20001}) {
      Tensor gate = normal_tensor(DType::kF32, {3, dim}, 9, 2.0f);
      const Tensor up = normal_tensor(DType::kF32, {3, dim}, 10);
      const auto before = values_of(gate.view());
      const auto factor = values_of(up);
      activate_gate(gate, gate, up, activation, stream);
      for (size_t i = 0; i < before.size(); ++i) {
        const double want = reference::activation(before[i], activation) * factor[i];
        ASSERT_NEAR(static_cast<double>(gate.as<float>()[i]), want, 2e-6 * std::abs(want) + 1e-12);
      }
    }
  }
}

TEST(Activate, SaysWhatDoesNotFit) {
  ThreadPool pool(1);
  Stream stream(pool);
  Tensor x = normal_tensor(DType::kF32, {2, 8}, 1);
  EXPECT_THAT(
      message_of(
          ErrorCode::kInvalidArgument,
          [&] {
            activate_gate(x, x, normal_tensor(DType::kF32, {2, 9}, 1), Activation::kSilu, stream);
          }),
      HasSubstr("activate_gate: up has shape (2, 9), expected (2, 8)"));
  Tensor half(DType::kF16, {2, 8});
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] { activate(half, half, Activation::kGelu, stream); }),
              HasSubstr("activate: x holds f16, expected f32"));
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] { activate_gate(half, x, x, Activation::kGelu, stream); }),
              HasSubstr("activate_gate: y holds f16, but activations on cpu are f32"));
  Tensor up = normal_tensor(DType::kF32, {2, 8}, 1);
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] { activate_gate(up, x, up, Activation::kGelu, stream); }),
              HasSubstr("activate_gate: y and up overlap"));
  Tensor long_x = normal_tensor(DType::kF32, {3, 8}, 1);
  EXPECT_THAT(message_of(ErrorCode::kInvalidArgument,
                         [&] {
                           activate(long_x.view().slice(1, 2), long_x.view().slice(0, 2),
                                    Activation::kGelu, stream);
                         }),
              HasSubstr("activate: y and x overlap"));
}

}  // namespace
}  // namespace kvlm
