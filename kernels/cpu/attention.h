#pragma once

#include <span>

#include "kernels/attention.h"

// The CPU's implementation of kernels/attention.h, which has checked the arguments.
namespace kvlm::cpu {

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, Stream& stream);

void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       std::span<const int32_t> bounds, float scale, Stream& stream);

void attend_rows(std::span<const DecodeSplit> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream);

}  // namespace kvlm::cpu
