#include "kernels/qkv.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cuda/model/qkv.h"

namespace kvlm {

namespace {

void check_product(std::string_view op, TensorView qkv, Stream& stream) {
  check::made_together(op, qkv, stream);
  if (!check::on_gpu(stream)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: queries, keys and values are separate tensors on the CPU", op));
  }
}

}  // namespace

void norm_queries_and_keys(TensorView qkv, ConstTensorView q_weight, ConstTensorView k_weight,
                           float eps, Stream& stream) {
  constexpr std::string_view kOp = "norm_queries_and_keys";
  check_product(kOp, qkv, stream);
  const Shape width{qkv.shape()[2] * qkv.shape()[3]};
  check::f32(kOp, "q_weight", q_weight, width, "(heads * head_dim,) of qkv", stream);
  check::f32(kOp, "k_weight", k_weight, width, "(heads * head_dim,) of qkv", stream);
  if (qkv.elements() == 0) return;
  cuda::norm_queries_and_keys(qkv, q_weight, k_weight, eps, stream);
}

void rotate_queries_and_keys(TensorView qkv, ConstTensorView cos, ConstTensorView sin,
                             Stream& stream) {
  constexpr std::string_view kOp = "rotate_queries_and_keys";
  check_product(kOp, qkv, stream);
  const Shape angles{qkv.shape()[0], qkv.shape()[3] / 2};
  check::f32(kOp, "cos", cos, angles, "(rows, head_dim / 2) of qkv", stream);
  check::f32(kOp, "sin", sin, angles, "(rows, head_dim / 2) of qkv", stream);
  if (qkv.elements() == 0 || cos.elements() == 0) return;
  cuda::rotate_queries_and_keys(qkv, cos, sin, stream);
}

}  // namespace kvlm
