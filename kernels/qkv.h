#pragma once

#include "kernels/base/tensor.h"

// What happens to queries and keys between the product that makes them and segment_attention(), on
// a GPU in half precision. `qkv` is (rows, 3, heads, head_dim) f16 | bf16; values stay as they are,
// arithmetic is f32, results are rounded to nearest even. Asynchronous.
namespace kvlm {

/// rms_norm() of each row's queries, and of its keys, over all heads together.
///
///   q_weight, k_weight  (heads * head_dim,) f32
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch, Error{kUnsupported} on the
/// CPU. Source: Chen et al. 2024, "InternVL", sec. 3.1 (QK-norm: Dehghani et al. 2023).
void norm_queries_and_keys(TensorView qkv, ConstTensorView q_weight, ConstTensorView k_weight,
                           float eps, Stream& stream);

/// rotate() of queries and keys.
///
///   cos, sin  (rows, head_dim / 2) f32
///
/// Throws as norm_queries_and_keys().
void rotate_queries_and_keys(TensorView qkv, ConstTensorView cos, ConstTensorView sin,
                             Stream& stream);

}  // namespace kvlm
