#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "kernels/base/tensor.h"
#include "vision/image.h"

namespace kvlm {

/// Resampling filters, with Pillow's codes.
enum class Resample : uint8_t {
  kNearest = 0,
  kLanczos = 1,
  kBilinear = 2,
  kBicubic = 3,
  kBox = 4,
  kHamming = 5
};

/// Whose integer arithmetic a resize follows; both are bit-exact reproductions.
enum class ResizeBackend : uint8_t {
  kPil,         ///< Pillow 13: 22 fractional bits
  kTorchvision  ///< torch's native uint8 kernel on the CPU with antialias: int16 weights
};

/// Which float path rescales and normalises; u is the byte, all else is f32 unless it says double.
enum class NormalizeBackend : uint8_t {
  kPil,          ///< (f32(double(u) * rescale_factor) - mean) / std
  kTorchvision,  ///< (u - mean / rescale_factor) / (std / rescale_factor)
  kToTensor      ///< (u / 255 - mean) / std, whatever rescale_factor is
};

/// What a family's preprocessor_config.json asks for.
struct PreprocessSpec {
  bool do_resize = true;
  /// Shortest edge to resize to; 0 when resize_height and resize_width are given instead.
  int shortest_edge = 336;
  int resize_height = 0;
  int resize_width = 0;
  Resample resample = Resample::kBicubic;
  bool do_center_crop = true;
  int crop_height = 336;
  int crop_width = 336;
  bool do_pad = false;  ///< to a square, filled with trunc(mean * 255), before everything else
  bool do_rescale = true;
  double rescale_factor = 1.0 / 255.0;
  bool do_normalize = true;
  std::array<double, 3> mean{0.48145466, 0.4578275, 0.40821073};
  std::array<double, 3> std{0.26862954, 0.26130258, 0.27577711};
  ResizeBackend resize_backend = ResizeBackend::kTorchvision;
  NormalizeBackend normalize_backend = NormalizeBackend::kTorchvision;
};

/// Resizes to exactly (height, width), bit-exact to `backend`; a copy if the size is unchanged.
///
/// Both work in two passes with uint8 between them, the rows first, except that Pillow 13 begins
/// with the columns if the height shrinks by more than twice what the width shrinks by. Nearest is
/// Pillow's, or torch's "nearest-exact".
///
/// Throws Error{kUnsupported} for kBox and kHamming with kTorchvision, which has no such filter,
/// and Error{kInvalidArgument} for an empty image and a size outside 1 to 2^28 pixels.
Image resize(const Image& image, int height, int width, Resample resample, ResizeBackend backend);

/// The size of which the shorter side is `edge` and the longer one, by the same factor, rounded
/// down. {height, width}. Throws Error{kInvalidArgument} if that is no size.
std::array<int, 2> shortest_edge_size(int height, int width, int edge);

/// Cuts the centre, rounding the offset down; a smaller image is first padded with zeros, of which
/// an odd one goes before the image with kPil and after it with kTorchvision.
Image center_crop(const Image& image, int height, int width, ResizeBackend backend);

/// Pads the shorter axis to a square with one colour, centred; an odd pixel goes after the image.
Image pad_to_square(const Image& image, std::array<uint8_t, 3> fill);

/// {height, width} of what fit() returns if it is the same for every picture.
std::optional<std::array<int, 2>> fitted_size(const PreprocessSpec& spec);

/// pads, resizes and crops as the spec says. Throws, naming the picture, Error{kInvalidArgument} if
/// a step cannot be done to it and Error{kOutOfMemory}.
Image fit(const Image& image, const PreprocessSpec& spec);

}  // namespace kvlm
