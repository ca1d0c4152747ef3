#pragma once

#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/qkv.h, which has checked the arguments.
namespace kvlm::cuda {

void norm_queries_and_keys(TensorView qkv, ConstTensorView q_weight, ConstTensorView k_weight,
                           float eps, Stream& stream);

void rotate_queries_and_keys(TensorView qkv, ConstTensorView cos, ConstTensorView sin,
                             Stream& stream);

}  // namespace kvlm::cuda
