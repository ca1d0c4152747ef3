#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/tensor.h"
#include "tests/reference/ops.h"

namespace kvlm::testing {

/// `count` normal values, the same for the same seed.
inline std::vector<float> normal_values(size_t count, uint32_t seed, float sigma = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

/// A tensor that holds `values`, rounded to `dtype`.
inline Tensor make_tensor(DType dtype, const Shape& shape, const std::vector<float>& values) {
  Tensor tensor(dtype, shape);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF16) {
      tensor.as<f16>()[i] = to_f16(values[i]);
    } else if (dtype == DType::kBF16) {
      tensor.as<bf16>()[i] = to_bf16(values[i]);
    } else {
      tensor.as<float>()[i] = values[i];
    }
  }
  return tensor;
}

inline Tensor normal_tensor(DType dtype, const Shape& shape, uint32_t seed, float sigma = 1.0f) {
  return make_tensor(dtype, shape,
                     normal_values(static_cast<size_t>(shape.elements()), seed, sigma));
}

/// What the tensor holds, exactly.
inline reference::Values values_of(ConstTensorView view) {
  reference::Values values(static_cast<size_t>(view.elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    switch (view.dtype()) {
      case DType::kF16:
        values[i] = static_cast<double>(to_float(view.as<f16>()[i]));
        break;
      case DType::kBF16:
        values[i] = static_cast<double>(to_float(view.as<bf16>()[i]));
        break;
      default:
        values[i] = static_cast<double>(view.as<float>()[i]);
    }
  }
  return values;
}

/// Largest difference over largest magnitude of `want`.
inline double normalised_error(const reference::Values& got, const reference::Values& want) {
  double error = 0;
  double size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    error = std::isnan(difference) ? HUGE_VAL : std::max(error, difference);
    size = std::max(size, std::abs(want[i]));
  }
  return error / size;
}

inline bool same_bits(ConstTensorView a, ConstTensorView b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

/// The message of the Error that `action` throws with `code`.
template <class Action>
std::string message_of(ErrorCode code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace kvlm::testing
