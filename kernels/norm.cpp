#include "kernels/norm.h"

#include "kernels/check.h"
#include "kernels/cpu/norm.h"
#include "kernels/cuda/model/norm.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

void check_rows(std::string_view op, const TensorView& y, const ConstTensorView& x,
                Stream& stream) {
  check::rank(op, "x", x, 2, "(rows, dim)");
  check::shape(op, "y", y, x.shape(), "the shape of x");
  check::f32(op, "x", x, stream);
  check::activation(op, "y", y);
  check::on_stream(op, "y", y, stream);
  if (y.dtype() != x.dtype()) check::disjoint(op, "y", y, "x", x);
}

void check_vector(std::string_view op, std::string_view name, const ConstTensorView& vector,
                  const ConstTensorView& x, Stream& stream) {
  check::f32(op, name, vector, {x.shape()[1]}, "(dim,) of x", stream);
}

}  // namespace

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  check_rows("rms_norm", y, x, stream);
  check_vector("rms_norm", "weight", weight, x, stream);
  if (x.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::rms_norm(y, x, weight, eps, stream);
  cpu::rms_norm(y, x, weight, eps, stream);
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  check_rows("layer_norm", y, x, stream);
  check_vector("layer_norm", "weight", weight, x, stream);
  check_vector("layer_norm", "bias", bias, x, stream);
  if (x.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::layer_norm(y, x, weight, bias, eps, stream);
  cpu::layer_norm(y, x, weight, bias, eps, stream);
}

namespace {

constexpr std::string_view kAddNorm = "add_norm";

/// What add_norm() asks of the residual and of what it adds to it.
void check_sum(const TensorView& y, const TensorView& x, std::span<const Addend> addends,
               Stream& stream) {
  check::rank(kAddNorm, "x", x, 2, "(rows, dim)");
  check::f32(kAddNorm, "x", x, stream);
  for (const Addend& addend : addends) {
    check::shape(kAddNorm, "p", addend.p, x.shape(), "the shape of x");
    check::activation(kAddNorm, "p", addend.p);
    check::on_stream(kAddNorm, "p", addend.p, stream);
    check::disjoint(kAddNorm, "x", x, "p", addend.p);
    if (!y.empty()) check::disjoint(kAddNorm, "y", y, "p", addend.p);
    if (!addend.bias.empty()) check_vector(kAddNorm, "p's bias", addend.bias, x, stream);
    if (!addend.scale.empty()) check_vector(kAddNorm, "scale", addend.scale, x, stream);
  }
}

/// What it asks of the norm of the sum, if that is wanted.
void check_norm(const TensorView& y, const TensorView& x, const ConstTensorView& weight,
                const ConstTensorView& bias, Stream& stream) {
  if (y.empty()) return;
  check_rows(kAddNorm, y, x, stream);
  check::disjoint(kAddNorm, "y", y, "x", x);
  check_vector(kAddNorm, "weight", weight, x, stream);
  if (!bias.empty()) check_vector(kAddNorm, "bias", bias, x, stream);
}

/// add_norm()'s sum on the CPU.
void add_to(TensorView x, const Addend& addend, Stream& stream) {
  Tensor biased;
  ConstTensorView p = addend.p;
  if (!addend.bias.empty()) {
    biased = Tensor(DType::kF32, x.shape());
    const int64_t dim = x.shape()[1];
    const float* bias = addend.bias.as<float>();
    for (int64_t i = 0; i < x.elements(); ++i) {
      biased.as<float>()[i] = p.as<float>()[i] + bias[i % dim];
    }
    p = biased;
  }
  if (addend.scale.empty()) return add(x, p, stream);
  add_scaled(x, p, addend.scale, stream);
}

/// add_norm() on the CPU, of operations that there are anyway.
void compose(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
             ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  Tensor sum;
  TensorView to = x;
  if (residual == Residual::kSame) {
    sum = Tensor(DType::kF32, x.shape());
    copy(sum, x, stream);
    to = sum;
  }
  for (const Addend& addend : addends) add_to(to, addend, stream);
  if (y.empty()) return;
  if (bias.empty()) return rms_norm(y, to, weight, eps, stream);
  layer_norm(y, to, weight, bias, eps, stream);
}

}  // namespace

void add_norm(TensorView y, TensorView x, Residual residual, std::span<const Addend> addends,
              ConstTensorView weight, ConstTensorView bias, float eps, Stream& stream) {
  if (addends.empty() || addends.size() > 2 || (y.empty() && residual == Residual::kSame)) {
    check::refuse("{}: {} tensors to add and {}; pass one or two, and y", kAddNorm, addends.size(),
                  y.empty() ? "no y" : "y");
  }
  check_sum(y, x, addends, stream);
  check_norm(y, x, weight, bias, stream);
  if (x.elements() == 0) return;
  if (check::on_gpu(stream)) {
    return cuda::add_norm(y, x, residual, addends, weight, bias, eps, stream);
  }
  compose(y, x, residual, addends, weight, bias, eps, stream);
}

}  // namespace kvlm
