#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

/// Rows of tiles from the products of their patches, with positions added: of tile t, the first row
/// is that of the class token where there is one, then patch p is
///   x[t * n + first + p,:] = patches[t * m + p,:] + positions[first + p,:]
/// with n = positions.shape()[0], first the rows of class_token and m = n - first.
///
///   patches      (tiles * m, dim)  f32
///   class_token  (1, dim) f32, or empty
///   positions    (n, dim)          f32
///   x            (tiles * n, dim)  f32, apart from patches
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void scatter_tiles(TensorView x, ConstTensorView patches, ConstTensorView class_token,
                   ConstTensorView positions, Stream& stream);

/// The rows of tiles but for the first `skipped` of each, to columns [first, first + dim) of y.
///
///   x  (tiles * rows_per_tile, dim)              f32
///   y  (tiles * (rows_per_tile - skipped), any)  f32
///
/// Throws as scatter_tiles(). Asynchronous on CUDA.
void take_tiles(TensorView y, int64_t first, ConstTensorView x, int64_t rows_per_tile,
                int64_t skipped, Stream& stream);

}  // namespace kvlm
