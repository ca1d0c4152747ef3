#include "vision/resize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <utility>

#include "kernels/base/error.h"

// Resizes pictures with the weights and roundings of Pillow or of torch, to the bit. Weights of
// each axis are made here; resize_passes.cpp applies them.
namespace kvlm {

namespace {

constexpr int64_t kMaxPixels = int64_t{1} << 28;

double sinc(double x) noexcept {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

/// Half the width of a filter, in source samples when enlarging.
double filter_support(Resample resample) noexcept {
  switch (resample) {
    case Resample::kLanczos:
      return 3.0;
    case Resample::kBicubic:
      return 2.0;
    case Resample::kBilinear:
    case Resample::kHamming:
      return 1.0;
    case Resample::kBox:
    case Resample::kNearest:
      break;
  }
  return 0.5;
}

double filter_weight(Resample resample, double x) noexcept {
  const double u = std::abs(x);
  switch (resample) {
    case Resample::kLanczos:
      return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0;
    case Resample::kBicubic: {
      constexpr double kA = -0.5;
      if (u < 1.0) return ((kA + 2.0) * u - (kA + 3.0)) * u * u + 1.0;
      if (u < 2.0) return (((u - 5.0) * u + 8.0) * u - 4.0) * kA;
      return 0.0;
    }
    case Resample::kBilinear:
      return u < 1.0 ? 1.0 - u : 0.0;
    case Resample::kHamming: {
      if (u >= 1.0) return 0.0;
      // Pillow's two constants are single precision, which shows in the last bit of a weight.
      return sinc(u) * (0.54f + 0.46f * std::cos(u * std::numbers::pi));
    }
    case Resample::kBox:
    case Resample::kNearest:
      break;
  }
  return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
}

/// The bits after the point of torch's int16 weights: as many as keep the largest below 2^15.
int torch_precision(double largest_weight) noexcept {
  int bits = 0;
  while (bits < 22 && static_cast<int>(0.5 + largest_weight * (1 << (bits + 1))) < (1 << 15))
    ++bits;
  return bits;
}

Image blank(int height, int width) {
  Image image;
  image.height = height;
  image.width = width;
  image.rgb.resize(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  return image;
}

/// The source sample of every output sample without a filter.
std::vector<int> nearest_indices(int input, int output, ResizeBackend backend) {
  std::vector<int> indices(static_cast<size_t>(output));
  if (backend == ResizeBackend::kPil) {
    // Pillow adds the step again and again, in double.
    const double step = static_cast<double>(input) / output;
    double position = step * 0.5;
    for (int& index : indices) {
      index = std::min(static_cast<int>(position), input - 1);
      position += step;
    }
  } else {
    // torch's "nearest-exact", in float.
    const float step = static_cast<float>(input) / static_cast<float>(output);
    for (int i = 0; i < output; ++i) {
      const float position = (static_cast<float>(i) + 0.5f) * step;
      indices[static_cast<size_t>(i)] = std::min(static_cast<int>(position), input - 1);
    }
  }
  return indices;
}

Image resize_nearest(const Image& in, int height, int width, ResizeBackend backend) {
  const std::vector<int> rows = nearest_indices(in.height, height, backend);
  const std::vector<int> columns = nearest_indices(in.width, width, backend);
  Image out = blank(height, width);
  uint8_t* to = out.rgb.data();
  for (const int row : rows) {
    const uint8_t* from =
        in.rgb.data() + static_cast<size_t>(row) * static_cast<size_t>(in.width) * 3;
    for (const int column : columns)
      to = std::copy_n(from + static_cast<size_t>(column) * 3, 3, to);
  }
  return out;
}

/// Which pass comes first shows in the last bit, and in more where a pass clips. torch and older
/// Pillow always begin with the rows; Pillow 13 begins with the columns where this saves work.
bool columns_first(const Image& in, int height, int width, ResizeBackend backend) noexcept {
  const int64_t fewer_rows = int64_t{in.height} - height;
  const int64_t fewer_columns = int64_t{in.width} - width;
  return backend == ResizeBackend::kPil && fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
}

}  // namespace

ResizeAxis make_resize_axis(int input, int output, Resample resample, ResizeBackend backend) {
  const double scale = static_cast<double>(input) / output;
  const double filter_scale = std::max(scale, 1.0);
  const double support = filter_support(resample) * filter_scale;
  const double inverse_scale = 1.0 / filter_scale;

  ResizeAxis axis;
  const auto count = static_cast<size_t>(output);
  axis.first.resize(count);
  axis.taps.resize(count);
  for (int i = 0; i < output; ++i) {
    const double center = (i + 0.5) * scale;
    const int low = std::max(static_cast<int>(center - support + 0.5), 0);
    const int high = static_cast<int>(std::min(center + support + 0.5, static_cast<double>(input)));
    axis.first[static_cast<size_t>(i)] = low;
    axis.taps[static_cast<size_t>(i)] = high - low;
    axis.max_taps = std::max(axis.max_taps, high - low);
  }

  std::vector<double> weights(count * static_cast<size_t>(axis.max_taps));
  double largest = 0.0;
  for (int i = 0; i < output; ++i) {
    const double center = (i + 0.5) * scale;
    double* row = weights.data() + static_cast<size_t>(i) * static_cast<size_t>(axis.max_taps);
    const int taps = axis.taps[static_cast<size_t>(i)];
    double sum = 0.0;
    for (int t = 0; t < taps; ++t) {
      const double offset = t + axis.first[static_cast<size_t>(i)] - center + 0.5;
      row[t] = filter_weight(resample, offset * inverse_scale);
      sum += row[t];
    }
    for (int t = 0; t < taps; ++t) {
      if (sum != 0.0) row[t] /= sum;
      largest = std::max(largest, row[t]);
    }
  }

  axis.shift = backend == ResizeBackend::kPil ? 22 : torch_precision(largest);
  const double one = static_cast<double>(1 << axis.shift);
  axis.weights.resize(weights.size());
  std::ranges::transform(weights, axis.weights.begin(), [one](double weight) {
    return static_cast<int32_t>(weight * one + (weight < 0.0 ? -0.5 : 0.5));
  });
  return axis;
}

Image resize(const Image& image, int height, int width, Resample resample, ResizeBackend backend) {
  if (image.height < 1 || image.width < 1) {
    throw Error(ErrorCode::kInvalidArgument, "an image without pixels cannot be resized");
  }
  if (height < 1 || width < 1 || height > kMaxPixels / width) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an image of {} x {} pixels would be resized to {} x {}, outside 1 to "
                            "{} pixels; crop it first",
                            image.width, image.height, width, height, kMaxPixels));
  }
  if (height == image.height && width == image.width) return image;
  if (resample == Resample::kNearest) return resize_nearest(image, height, width, backend);
  if (backend == ResizeBackend::kTorchvision &&
      (resample == Resample::kBox || resample == Resample::kHamming)) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("torchvision does not resize with Pillow's filter {} ({}); use the PIL "
                    "backend",
                    static_cast<int>(resample), resample == Resample::kBox ? "box" : "hamming"));
  }
  const auto rows_of = [&](const Image& in) {
    return resize_rows(in, make_resize_axis(in.width, width, resample, backend));
  };
  const auto columns_of = [&](const Image& in) {
    return resize_columns(in, make_resize_axis(in.height, height, resample, backend));
  };
  if (width == image.width) return columns_of(image);
  if (height == image.height) return rows_of(image);
  if (columns_first(image, height, width, backend)) return rows_of(columns_of(image));
  return columns_of(rows_of(image));
}

}  // namespace kvlm
