#include "kernels/norm.h"

#include "kernels/check.h"
#include "kernels/cpu/norm.h"
#include "kernels/cuda/norm.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

void check_rows(std::string_view op, const TensorView& y, const ConstTensorView& x,
                Stream& stream) {
  check::rank(op, "x", x, 2, "(rows, dim)");
  check::shape(op, "y", y, x.shape(), "the shape of x");
  check::dtype(op, "x", x, DType::kF32);
  check::activation(op, "y", y);
  check::on_stream(op, "x", x, stream);
  check::on_stream(op, "y", y, stream);
  if (y.dtype() != x.dtype()) check::disjoint(op, "y", y, "x", x);
}

void check_vector(std::string_view op, std::string_view name, const ConstTensorView& vector,
                  const ConstTensorView& x, Stream& stream) {
  check::shape(op, name, vector, {x.shape()[1]}, "(dim,) of x");
  check::dtype(op, name, vector, DType::kF32);
  check::on_stream(op, name, vector, stream);
}

}  // namespace

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  check_rows("rms_norm", y, x, stream);
  check_vector("rms_norm", "weight", weight, x, stream);
  if (x.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) return cuda::rms_norm(y, x, weight, eps, stream);
  cpu::rms_norm(y, x, weight, eps, stream);
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  check_rows("layer_norm", y, x, stream);
  check_vector("layer_norm", "weight", weight, x, stream);
  check_vector("layer_norm", "bias", bias, x, stream);
  if (x.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::layer_norm(y, x, weight, bias, eps, stream);
  }
  cpu::layer_norm(y, x, weight, bias, eps, stream);
}

void add_norm(TensorView y, TensorView x, ConstTensorView p, ConstTensorView scale,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  constexpr std::string_view kOp = "add_norm";
  check::rank(kOp, "x", x, 2, "(rows, dim)");
  check::dtype(kOp, "x", x, DType::kF32);
  check::on_stream(kOp, "x", x, stream);
  check::shape(kOp, "p", p, x.shape(), "the shape of x");
  check::activation(kOp, "p", p);
  check::on_stream(kOp, "p", p, stream);
  check::disjoint(kOp, "x", x, "p", p);
  if (!scale.empty()) check_vector(kOp, "scale", scale, x, stream);
  if (!y.empty()) {
    check_rows(kOp, y, x, stream);
    check::disjoint(kOp, "y", y, "x", x);
    check::disjoint(kOp, "y", y, "p", p);
    check_vector(kOp, "weight", weight, x, stream);
    if (!bias.empty()) check_vector(kOp, "bias", bias, x, stream);
  }
  if (x.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::add_norm(y, x, p, scale, weight, bias, eps, stream);
  }
  if (scale.empty()) {
    add(x, p, stream);
  } else {
    add_scaled(x, p, scale, stream);
  }
  if (y.empty()) return;
  if (bias.empty()) return rms_norm(y, x, weight, eps, stream);
  layer_norm(y, x, weight, bias, eps, stream);
}

}  // namespace kvlm
