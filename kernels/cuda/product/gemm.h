#pragma once

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"
#include "kernels/gemm.h"

// The CUDA implementation of kernels/gemm.h, which has checked the arguments.
namespace kvlm::cuda {

void linear(TensorView y, ConstTensorView x, const Weight& w, ConstTensorView bias, bool add,
            Stream& stream);

void linear(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
            Stream& stream);

void linears(std::span<const Projection> projections, ConstTensorView x, Stream& stream);

DType operand_dtype(const Weight& w, int64_t rows);

void gated_linears(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, ConstTensorView x, Stream& stream);

bool gates_alone(const Projection& gate, const Projection& up, Activation activation, DType dtype,
                 int64_t rows);

/// kvlm::measure_matrix_rate() on a GPU.
double measure_matrix_rate(int size, DType dtype, Stream& stream);

}  // namespace kvlm::cuda
