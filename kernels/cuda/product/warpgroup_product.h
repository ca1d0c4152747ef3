#pragma once

#include <cstdint>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

namespace kvlm::cuda {

/// What follows a product of halves, in the same kernel.
enum class HalfTail : uint8_t { kNone, kGelu, kGated };

/// A product of halves that is stored as halves: y = x w^T + bias, of which kGelu is taken where
/// the tail says so, or with kGated y = SiLU(x w^T + bias) * (x up^T + up_bias).
struct HalfProduct {
  TensorView y;       ///< (rows, out) of the dtype of w
  const void* x;      ///< (rows, in) of the dtype of w
  ConstTensorView w;  ///< (out, in) f16 | bf16
  const float* bias;  ///< (out,), or null
  HalfTail tail = HalfTail::kNone;
  ConstTensorView up{};            ///< kGated: (out, in) of the dtype of w
  const float* up_bias = nullptr;  ///< kGated: (out,), or null
};

/// Whether the warpgroups of compute capability 9.0 multiply it, which depends on the GPU, on
/// alignment and on the shape of w, not on the number of rows: `in` is at least 961 and `out`, of
/// a product without a tail, at least 2048; both are multiples of 8.
bool fits_warpgroups(const HalfProduct& product);

/// Makes it, if it fits: sums in f32 in the order of `in`, rounded to the dtype before GELU and
/// after it, or once behind the gate. A row has the same bits in any company.
void multiply_by_warpgroups(const HalfProduct& product, Stream& stream);

}  // namespace kvlm::cuda
