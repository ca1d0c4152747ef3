#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llm/decoder.h"

namespace kvlm::test {

// How far from the reference an output may be: pixels, and logits in f32.
inline constexpr double kPixelGate = 2e-6;
inline constexpr double kLogitGate = 1e-3;

struct Difference {
  double error = 0;
  size_t index = 0;
};

/// max |ours - reference|; NaN counts as infinite.
inline Difference largest_difference(std::span<const float> ours,
                                     std::span<const float> reference) {
  Difference largest;
  for (size_t i = 0; i < reference.size(); ++i) {
    double error = std::abs(static_cast<double>(ours[i]) - static_cast<double>(reference[i]));
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    if (error > largest.error) largest = {error, i};
  }
  return largest;
}

inline double deviation(std::span<const float> values) {
  double sum = 0;
  double squares = 0;
  for (const float x : values) {
    sum += static_cast<double>(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
  }
  const auto n = static_cast<double>(values.size());
  return std::sqrt(std::max(0.0, squares / n - sum / n * (sum / n)));
}

inline testing::AssertionResult within(const std::string& name, std::span<const float> ours,
                                       std::span<const float> reference, double gate) {
  if (ours.size() != reference.size()) {
    return testing::AssertionFailure() << fmt::format("{} has {} values, the reference {}", name,
                                                      ours.size(), reference.size());
  }
  const Difference difference = largest_difference(ours, reference);
  if (difference.error <= gate) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << fmt::format("{} differs by {:.3g} (gate {:.3g}) at element {}: {} instead of {}", name,
                        difference.error, gate, difference.index, ours[difference.index],
                        reference[difference.index]);
}

inline std::vector<int32_t> narrow(const std::vector<int64_t>& ids) {
  return {ids.begin(), ids.end()};
}

/// Every activation of a prefill by name, those of several pictures one after the other.
using Taps = std::map<std::string, std::vector<float>>;

inline Tap collect(Taps& taps) {
  return [&taps](std::string_view name, ConstTensorView view) {
    const float* values = view.as<float>();
    std::vector<float>& all = taps[std::string(name)];
    all.insert(all.end(), values, values + view.elements());
  };
}

}  // namespace kvlm::test
