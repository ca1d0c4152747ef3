#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/tensor.h"
#include "kernels/gemm.h"
#include "kernels/quantized/matrix.h"

// Products with quantized matrices. x is in f16 or bf16, codes become exact integers of that type
// on the way to the tensor cores, and the sum of each 32 inputs, in f32, is multiplied by its
// scale.
namespace kvlm::cuda {

/// Whether matrices of both formats can be multiplied in one launch.
bool is_launched_with(const QuantizedFormat& first, const QuantizedFormat& second);

/// y = x w^T + bias, or with `add` y += x w^T + bias, of 1 to 3 projections that
/// is_launched_with() allows. `x` is (rows, in) of `shape`, in their activations' type, aligned to
/// 16 bytes. Asynchronous.
void multiply_codes(std::span<const Projection> projections, const void* x, const Shape& shape,
                    bool add, Stream& stream);

/// y = activation(x gate^T) * (x up^T) of two matrices of one format; y in f32, f16 or bf16.
void multiply_gate(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, const void* x, int64_t rows, Stream& stream);

/// Rounds a quantized matrix to `to`, (out, in) of its activations' type. Asynchronous.
void widen_weights(TensorView to, const QuantizedMatrix& matrix, Stream& stream);

/// gather_rows() of a quantized table.
void gather_rows(TensorView y, const QuantizedMatrix& table, std::span<const int32_t> ids,
                 Stream& stream);

}  // namespace kvlm::cuda
