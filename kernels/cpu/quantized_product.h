#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/gemm.h"
#include "kernels/quantized/matrix.h"

// Products with quantized matrices on the CPU. Activations are rounded, per row and 32 inputs, to
// int8: sx = max|x| / 127, xq = rne(x / sx). Integer sums of 32 products are exact, and a row of y
// is one chain of f32 operations, y = fma(sx * sw, sum(code * xq) - zero * sum(xq), y) in the order
// of the inputs, then the bias. Its bits depend on nothing else: not on the other rows, the number
// of threads, or the instruction set.
//
// The error of an output is at most sum over blocks of 32 inputs of max|x| / 254 * sum|w|.
namespace kvlm::cpu {

/// linear() of every projection, all of quantized matrices, with or without add; x is rounded once.
void quantized_linears(std::span<const Projection> projections, ConstTensorView x, bool add,
                       Stream& stream);

/// gather_rows() of a quantized table.
void gather_rows(TensorView y, const QuantizedMatrix& table, std::span<const int32_t> ids,
                 Stream& stream);

}  // namespace kvlm::cpu
