#pragma once

#include <span>

#include "kernels/attention.h"

// The CUDA implementation of kernels/attention.h, which has checked the arguments.
namespace kvlm::cuda {

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream);

void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, DType multiply, Stream& stream);

void segment_attention(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                       Stream& stream);

}  // namespace kvlm::cuda
