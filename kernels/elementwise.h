#pragma once

#include <span>

#include "kernels/base/tensor.h"
#include "kernels/weight.h"

namespace kvlm {

/// y[r,:] = table[ids[r],:], widened to y's dtype.
///
///   table  (entries, dim)  f32 | f16 | bf16, or quantized
///   ids    (rows,)         each in [0, entries)
///   y      (rows, dim)     f32
///
/// Throws Error{kInvalidArgument} on a mismatch or an id outside the table.
void gather_rows(TensorView y, const Weight& table, std::span<const int32_t> ids, Stream& stream);

/// to = from between any devices, of which the stream's is one; equal shapes and dtypes. Memory of
/// the host may be reused, or read, when it returns.
void copy(TensorView to, ConstTensorView from, Stream& stream);

/// to[r,:] = from[r,:] from the host to a GPU, converted by the host's threads on the way; columns
/// beyond those of `from` become zero. Memory of the host may be reused when it returns.
///
///   from  (rows, columns)      f32, on the host
///   to    (rows, >= columns)   f32 | f16 | bf16, rounded to nearest even
///
/// Throws Error{kInvalidArgument} on a mismatch.
void upload_rows(TensorView to, ConstTensorView from, Stream& stream);

/// y += x, element by element; equal shapes, f32.
void add(TensorView y, ConstTensorView x, Stream& stream);

/// y[r,:] += x[r,:] * scale.
///
///   x, y   (rows, dim)  f32
///   scale  (dim,)       f32
///
/// Source: Touvron et al. 2021, "Going deeper with Image Transformers" (LayerScale), eq. 4.
void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream);

/// y = x, converted to y's dtype with round-to-nearest-even; f32 | f16 | bf16, equal shapes.
void convert(TensorView y, ConstTensorView x, Stream& stream);

}  // namespace kvlm
