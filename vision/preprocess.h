#pragma once

#include <array>
#include <cstdint>

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
  kPil,         ///< Pillow: 22 fractional bits (models.md 4.2)
  kTorchvision  ///< torch's native uint8 kernel with antialias: int16 weights (models.md 4.3)
};

/// Which float path rescales and normalises (models.md 4.5).
enum class NormalizeBackend : uint8_t { kPil, kTorchvision, kToTensor };

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
/// Throws Error{kUnsupported} for a filter that the backend's integer path does not have here.
Image resize(const Image& image, int height, int width, Resample resample, ResizeBackend backend);

/// The size of which the shorter side is `edge` (models.md 4.4). {height, width}.
std::array<int, 2> shortest_edge_size(int height, int width, int edge);

/// Cuts the centre; a smaller image is zero-padded first (models.md 4.4).
Image center_crop(const Image& image, int height, int width, ResizeBackend backend);

/// Pads the shorter axis to a square with one colour, centred (models.md 4.4).
Image pad_to_square(const Image& image, std::array<uint8_t, 3> fill);

/// Rescales and normalises to (3, height, width) f32.
Tensor normalize(const Image& image, const PreprocessSpec& spec);

/// pad, resize, crop, rescale and normalise as the spec says: pixel values (3, height, width) f32.
Tensor preprocess(const Image& image, const PreprocessSpec& spec);

}  // namespace kvlm
