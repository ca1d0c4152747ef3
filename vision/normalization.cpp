#include "vision/normalization.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

std::array<float, 256> channel_table(const PreprocessSpec& spec, size_t channel) {
  auto mean = static_cast<float>(spec.mean[channel]);
  auto std = static_cast<float>(spec.std[channel]);
  const bool torch_fuses = spec.normalize_backend == NormalizeBackend::kTorchvision &&
                           spec.do_rescale && spec.do_normalize;
  if (torch_fuses) {  // torch scales the two constants instead of every pixel
    const auto inverse = static_cast<float>(1.0 / spec.rescale_factor);
    mean *= inverse;
    std *= inverse;
  }

  std::array<float, 256> table;
  for (int value = 0; value < 256; ++value) {
    auto y = static_cast<float>(value);
    if (spec.do_rescale && !torch_fuses) {
      switch (spec.normalize_backend) {
        case NormalizeBackend::kPil:
          y = static_cast<float>(value * spec.rescale_factor);
          break;
        case NormalizeBackend::kTorchvision:
          y *= static_cast<float>(spec.rescale_factor);
          break;
        case NormalizeBackend::kToTensor:
          y /= 255.0f;
          break;
      }
    }
    if (spec.do_normalize) y = (y - mean) / std;
    table[static_cast<size_t>(value)] = y;
  }
  return table;
}

}  // namespace

NormalizationTable normalization_table(const PreprocessSpec& spec) {
  if (spec.do_rescale && !(spec.rescale_factor > 0.0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rescale_factor is {}; expected a positive number, usually 1/255",
                            spec.rescale_factor));
  }
  NormalizationTable table;
  for (size_t channel = 0; channel < 3; ++channel) {
    if (spec.do_normalize && !(spec.std[channel] > 0.0)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("image_std of channel {} is {}; expected a positive number", channel,
                              spec.std[channel]));
    }
    table[channel] = channel_table(spec, channel);
  }
  return table;
}

std::array<uint8_t, 3> mean_colour(const std::array<double, 3>& mean) {
  std::array<uint8_t, 3> colour{};
  std::ranges::transform(mean, colour.begin(), [](double value) {
    return static_cast<uint8_t>(std::clamp(value * 255.0, 0.0, 255.0));
  });
  return colour;
}

}  // namespace kvlm
