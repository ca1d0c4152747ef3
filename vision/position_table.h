#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/blend_rows.h"
#include "vision/patch_order.h"

namespace kvlm {

enum class Interpolation : uint8_t {
  kBilinear,
  kBicubic  ///< Keys' kernel with a = -0.75, not the -0.5 of pictures
};

/// What each sample of an axis is made of: `taps` weighted samples of another.
struct AxisTaps {
  int taps = 2;
  std::vector<int32_t> indices;  // (output, taps)
  std::vector<float> weights;    // (output, taps)
};

/// The axis of torch's interpolate() with align_corners=False and antialias=False, in float as
/// there. Which of torch's products are fused with sums depends on its kernel and processor, so the
/// last bit of a weight does; none are here. An axis that keeps its length is copied.
///
/// Throws Error{kInvalidArgument} unless both lengths are 1 to 2^24.
/// Source: torch, aten/src/ATen/native/UpSample.h.
AxisTaps interpolation_axis(int input, int output, Interpolation interpolation);

/// How Qwen3-VL's learned table of side x side positions becomes those of a grid: the corners of
/// the table are those of the grid, bilinear between, rows in the order of patch_places(). Four
/// terms.
///
/// In the float arithmetic of transformers 5.23, whose position on an axis is i * (side - 1) /
/// (length - 1); until 5.0 it was torch's linspace, an ulp from that.
///
/// Throws as patch_places(), and if `side` is not 1 to 46340.
/// Source: transformers, get_vision_interpolation_indices_and_weights.
RowBlend learned_positions(int side, const PatchGrid& grid, int merge);

/// A table of side x side positions resampled to rows x columns, both row-major.
///
///   table    (side * side, dim)  f32 on the CPU; a class token's position is the caller's
///   returns  (rows * columns, dim)
///
/// Throws Error{kInvalidArgument} if the table has another shape or dtype, and as
/// interpolation_axis().
/// Source: transformers, InternVLVisionEmbeddings.interpolate_pos_encoding.
Tensor resample_positions(ConstTensorView table, int side, int rows, int columns,
                          Interpolation interpolation);

}  // namespace kvlm
