#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

namespace kvlm::cuda {

/// A product of halves that is stored as halves: y = x w^T + bias, of which kGelu is taken where
/// `gelu` says so.
struct HalfProduct {
  TensorView y;       ///< (rows, out) of the dtype of w
  const void* x;      ///< (rows, in) of the dtype of w
  ConstTensorView w;  ///< (out, in) f16 | bf16
  const float* bias;  ///< (out,), or null
  bool gelu;
};

/// Whether the warpgroups of compute capability 9.0 multiply it, which depends on the GPU, on
/// alignment and on the shape of w, not on the number of rows: `in` is at least 961 and `out`, of
/// a product without GELU, at least 2048; both are multiples of 8.
bool fits_warpgroups(const HalfProduct& product);

/// Makes it, if it fits: sums in f32 in the order of `in`, rounded to the dtype before GELU and
/// after it. A row has the same bits in any company.
void multiply_by_warpgroups(const HalfProduct& product, Stream& stream);

}  // namespace kvlm::cuda
