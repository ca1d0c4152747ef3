#include "kernels/norm.h"

#include "kernels/check.h"
#include "kernels/cpu/norm.h"
#include "kernels/cuda/norm.h"

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

}  // namespace kvlm
