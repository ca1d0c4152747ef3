#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "kernels/base/device.h"
#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

// Argument checks shared by the operations; each throws Error{kInvalidArgument} with one sentence
// that names the operation, the argument, what was found and what was expected.
namespace kvlm::check {

/// Throws Error{kInvalidArgument} with a message as fmt makes it.
template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}

/// `dtype` is f32, f16 or bf16.
bool is_floating(DType dtype) noexcept;

/// `stream` runs on a GPU.
bool on_gpu(const Stream& stream) noexcept;

/// `view` is on the device of `stream`.
void on_stream(std::string_view op, std::string_view name, const ConstTensorView& view,
               const Stream& stream);

/// Decode attention `op` has a CPU's stream. Throws Error{kUnsupported}.
void attends_on_cpu(std::string_view op, const Stream& stream);

/// `view` has as many dimensions as `dims` names, for example 2 for "(rows, in)".
void rank(std::string_view op, std::string_view name, const ConstTensorView& view, int rank,
          std::string_view dims);

/// `view` has exactly `shape`, which `reason` explains, for example "(rows, dim) of x".
void shape(std::string_view op, std::string_view name, const ConstTensorView& view,
           const Shape& shape, std::string_view reason);

/// `view` holds `dtype`.
void dtype(std::string_view op, std::string_view name, const ConstTensorView& view, DType dtype);

/// `view` holds an activation: f32 on the CPU; f32, f16 or bf16 on CUDA.
void activation(std::string_view op, std::string_view name, const ConstTensorView& view);

/// `view` holds f32, f16 or bf16, on the device of `stream`.
void floating(std::string_view op, std::string_view name, const ConstTensorView& view,
              const Stream& stream);

/// `view` holds f32, on the device of `stream`.
void f32(std::string_view op, std::string_view name, const ConstTensorView& view,
         const Stream& stream);

/// The same, and it has exactly `shape`, as of shape().
void f32(std::string_view op, std::string_view name, const ConstTensorView& view,
         const Shape& shape, std::string_view reason, const Stream& stream);

/// `qkv` is on the device of `stream` and holds what one product made, f16 or bf16.
void made_together(std::string_view op, const ConstTensorView& qkv, const Stream& stream);

/// Decode attention `op` has queries and channels, and a finite scale.
void decode_sizes(std::string_view op, int q_per_kv, int head_dim, float scale);

/// `a` and `b` share no byte.
void disjoint(std::string_view op, std::string_view name_a, const ConstTensorView& a,
              std::string_view name_b, const ConstTensorView& b);

/// Of attention: `q` (n, q_heads, head_dim) and `k` (n, kv_heads, head_dim) are f32 and not empty,
/// query heads can share KV heads, `scale` is finite and `multiply` a type that is multiplied.
void queries_and_keys(std::string_view op, const ConstTensorView& q, const ConstTensorView& k,
                      float scale, DType multiply, const Stream& stream);

/// Then `v` is as `k`, and `out` as `q`, which may be in the same place.
void values_and_outputs(std::string_view op, const ConstTensorView& v, const ConstTensorView& out,
                        const ConstTensorView& q, const ConstTensorView& k, const Stream& stream);

}  // namespace kvlm::check
