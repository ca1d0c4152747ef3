#include "vision/preprocess.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "kernels/base/error.h"
#include "vision/normalization.h"

// A picture to the size that a tower takes, in the order of the reference's processors: pad,
// resize, crop. Pixel values are made in patches.cpp.
namespace kvlm {

namespace {

constexpr int64_t kMaxPixels = int64_t{1} << 28;

void check_not_empty(const Image& image) {
  if (image.height > 0 && image.width > 0) return;
  throw Error(ErrorCode::kInvalidArgument, "an image without pixels cannot be preprocessed");
}

/// A zeroed or filled image of that size, with `image` at (top, left).
Image place(const Image& image, int height, int width, int top, int left,
            std::array<uint8_t, 3> fill) {
  Image out;
  out.height = height;
  out.width = width;
  out.rgb.resize(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  if (fill[0] == fill[1] && fill[1] == fill[2]) {
    std::ranges::fill(out.rgb, fill[0]);
  } else {
    for (size_t i = 0; i < out.rgb.size(); ++i) out.rgb[i] = fill[i % 3];
  }
  const size_t row_bytes = static_cast<size_t>(image.width) * 3;
  for (int y = 0; y < image.height; ++y) {
    const auto from =
        image.rgb.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(y) * row_bytes);
    const size_t to =
        (static_cast<size_t>(top + y) * static_cast<size_t>(width) + static_cast<size_t>(left)) * 3;
    std::copy_n(from, row_bytes, out.rgb.begin() + static_cast<std::ptrdiff_t>(to));
  }
  return out;
}

}  // namespace

std::array<int, 2> shortest_edge_size(int height, int width, int edge) {
  const int64_t shorter = std::min(height, width);
  const int64_t longer = std::max(height, width);
  if (shorter < 1 || edge < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an image of {} x {} pixels cannot be resized to a shortest edge of {}",
                            width, height, edge));
  }
  const double scaled =
      std::trunc(static_cast<double>(edge * longer) / static_cast<double>(shorter));
  if (scaled > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an image of {} x {} pixels is too narrow to be resized to a shortest "
                            "edge of {}; crop it first",
                            width, height, edge));
  }
  const int long_edge = static_cast<int>(scaled);
  return width <= height ? std::array{long_edge, edge} : std::array{edge, long_edge};
}

Image center_crop(const Image& image, int height, int width, ResizeBackend backend) {
  check_not_empty(image);
  if (height < 1 || width < 1 || height > kMaxPixels / width) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a crop of {} x {} pixels is outside 1 to {} pixels; check crop_size",
                            width, height, kMaxPixels));
  }
  if (height > image.height || width > image.width) {
    const int taller = std::max(height, image.height);
    const int wider = std::max(width, image.width);
    // With an odd number of missing pixels Pillow's path puts the extra one before, torch's after.
    const int extra = backend == ResizeBackend::kPil ? 1 : 0;
    const Image padded = place(image, taller, wider, (taller - image.height + extra) / 2,
                               (wider - image.width + extra) / 2, {0, 0, 0});
    return center_crop(padded, height, width, backend);
  }
  if (height == image.height && width == image.width) return image;
  const int top = (image.height - height) / 2;
  const int left = (image.width - width) / 2;
  Image out;
  out.height = height;
  out.width = width;
  out.rgb.reserve(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  for (int y = 0; y < height; ++y) {
    const size_t from = (static_cast<size_t>(top + y) * static_cast<size_t>(image.width) +
                         static_cast<size_t>(left)) *
                        3;
    const auto begin = image.rgb.begin() + static_cast<std::ptrdiff_t>(from);
    out.rgb.insert(out.rgb.end(), begin, begin + std::ptrdiff_t{width} * 3);
  }
  return out;
}

Image pad_to_square(const Image& image, std::array<uint8_t, 3> fill) {
  check_not_empty(image);
  const int side = std::max(image.height, image.width);
  if (side > kMaxPixels / side) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an image of {} x {} pixels is too long to be padded to a square; crop "
                            "it or scale it down first",
                            image.width, image.height));
  }
  return place(image, side, side, (side - image.height) / 2, (side - image.width) / 2, fill);
}

namespace {

Image fit_unnamed(const Image& image, const PreprocessSpec& spec) {
  check_not_empty(image);
  Image changed;
  const Image* current = &image;
  const auto become = [&](Image next) {
    changed = std::move(next);
    current = &changed;
  };
  if (spec.do_pad) become(pad_to_square(*current, mean_colour(spec.mean)));
  if (spec.do_resize) {
    const auto [height, width] =
        spec.shortest_edge > 0
            ? shortest_edge_size(current->height, current->width, spec.shortest_edge)
            : std::array{spec.resize_height, spec.resize_width};
    become(resize(*current, height, width, spec.resample, spec.resize_backend));
  }
  if (spec.do_center_crop) {
    become(center_crop(*current, spec.crop_height, spec.crop_width, spec.resize_backend));
  }
  return current == &image ? image : std::move(changed);
}

}  // namespace

std::optional<std::array<int, 2>> fitted_size(const PreprocessSpec& spec) {
  if (spec.do_center_crop) return std::array{spec.crop_height, spec.crop_width};
  if (!spec.do_resize) return std::nullopt;
  if (spec.shortest_edge == 0) return std::array{spec.resize_height, spec.resize_width};
  if (spec.do_pad) return std::array{spec.shortest_edge, spec.shortest_edge};
  return std::nullopt;
}

Image fit(const Image& image, const PreprocessSpec& spec) {
  try {
    return fit_unnamed(image, spec);
  } catch (const Error& error) {
    if (image.name.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", image.name, error.what()));
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // more than a vector ever holds
  }
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format(
          "image {} of {} x {} pixels cannot be resized: out of memory; scale it down first",
          image.name, image.width, image.height));
}

}  // namespace kvlm
