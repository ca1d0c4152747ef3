#include "kernels/qkv.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cuda/qkv.h"

namespace kvlm {

namespace {

void check_product(std::string_view op, TensorView qkv, Stream& stream) {
  check::rank(op, "qkv", qkv, 4, "(rows, 3, heads, head_dim)");
  const Shape& shape = qkv.shape();
  check::shape(op, "qkv", qkv, {shape[0], 3, shape[2], shape[3]}, "(rows, 3, heads, head_dim)");
  check::on_stream(op, "qkv", qkv, stream);
  if (qkv.dtype() != DType::kF16 && qkv.dtype() != DType::kBF16) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: qkv holds {}, expected f16 or bf16", op, dtype_name(qkv.dtype())));
  }
  if (stream.device().kind == DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: the CPU keeps queries, keys and values apart", op));
  }
}

void check_vector(std::string_view op, std::string_view name, ConstTensorView of,
                  const Shape& shape, std::string_view reason, Stream& stream) {
  check::shape(op, name, of, shape, reason);
  check::dtype(op, name, of, DType::kF32);
  check::on_stream(op, name, of, stream);
}

}  // namespace

void norm_queries_and_keys(TensorView qkv, ConstTensorView q_weight, ConstTensorView k_weight,
                           float eps, Stream& stream) {
  constexpr std::string_view kOp = "norm_queries_and_keys";
  check_product(kOp, qkv, stream);
  const Shape width{qkv.shape()[2] * qkv.shape()[3]};
  check_vector(kOp, "q_weight", q_weight, width, "(heads * head_dim,) of qkv", stream);
  check_vector(kOp, "k_weight", k_weight, width, "(heads * head_dim,) of qkv", stream);
  if (qkv.elements() == 0) return;
  cuda::norm_queries_and_keys(qkv, q_weight, k_weight, eps, stream);
}

void rotate_queries_and_keys(TensorView qkv, ConstTensorView cos, ConstTensorView sin,
                             Stream& stream) {
  constexpr std::string_view kOp = "rotate_queries_and_keys";
  check_product(kOp, qkv, stream);
  const Shape angles{qkv.shape()[0], qkv.shape()[3] / 2};
  check_vector(kOp, "cos", cos, angles, "(rows, head_dim / 2) of qkv", stream);
  check_vector(kOp, "sin", sin, angles, "(rows, head_dim / 2) of qkv", stream);
  if (qkv.elements() == 0 || cos.elements() == 0) return;
  cuda::rotate_queries_and_keys(qkv, cos, sin, stream);
}

}  // namespace kvlm
