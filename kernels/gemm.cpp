#include "kernels/gemm.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/quantized_product.h"
#include "kernels/cuda/product/gemm.h"
#include "kernels/elementwise.h"

// Checks the operands of products and hands them to the CPU's or the GPU's implementation. On the
// CPU the tail of a product (activation, gate, scale, sum) is made of other operations.
namespace kvlm {

namespace {

constexpr std::string_view kLinear = "linear";

/// A matrix of weights as a tensor of the type that it is multiplied in, for checks alone.
ConstTensorView as_tensor(const Weight& w) { return {w.data(), w.dtype(), w.shape(), w.device()}; }

void check_factors(ConstTensorView x, const Weight& w, ConstTensorView bias, Stream& stream) {
  check::rank(kLinear, "x", x, 2, "(rows, in)");
  check::rank(kLinear, "w", as_tensor(w), 2, "(out, in)");
  const int64_t out = w.shape()[0];
  check::shape(kLinear, "w", as_tensor(w), {out, x.shape()[1]}, "(out, in) for the rows of x");
  check::activation(kLinear, "x", x);
  check::floating(kLinear, "w", as_tensor(w), stream);
  check::on_stream(kLinear, "x", x, stream);
  if (!bias.empty()) {
    check::f32(kLinear, "bias", bias, {out}, "(out,) of w", stream);
  }
}

void check_linear(TensorView y, ConstTensorView x, const Weight& w, ConstTensorView bias,
                  Stream& stream) {
  check_factors(x, w, bias, stream);
  check::f32(kLinear, "y", y, {x.shape()[0], w.shape()[0]}, "(rows, out) of x and w", stream);
  check::disjoint(kLinear, "y", y, "x", x);
}

/// What gated_linears() asks of its operands. `alone` is gates_alone(), which takes no place for
/// the products of gate and up; where there are such, they and y do not overlap.
void check_gated(TensorView y, const Projection& gate, const Projection& up, ConstTensorView x,
                 bool alone, Stream& stream) {
  constexpr std::string_view kOp = "gated_linears";
  for (const Projection* of : {&gate, &up}) {
    if (alone) {
      check_factors(x, of->w, of->bias, stream);
    } else {
      check_linear(of->y, x, of->w, of->bias, stream);
    }
  }
  check::shape(kOp, "up.w", as_tensor(up.w), gate.w.shape(), "the shape of gate.w");
  check::shape(kOp, "y", y, {x.shape()[0], gate.w.shape()[0]}, "(rows, out) of x and gate.w");
  check::activation(kOp, "y", y);
  check::on_stream(kOp, "y", y, stream);
  check::disjoint(kOp, "y", y, "x", x);
  if (alone) return;
  check::disjoint(kOp, "y", y, "up.y", up.y);
  check::disjoint(kOp, "gate.y", gate.y, "up.y", up.y);
  if (y.dtype() != DType::kF32 || y.data() != gate.y.data()) {
    check::disjoint(kOp, "y", y, "gate.y", gate.y);
  }
}

}  // namespace

void linear(TensorView y, ConstTensorView x, const Weight& w, ConstTensorView bias, bool add,
            Stream& stream) {
  check_linear(y, x, w, bias, stream);
  if (y.empty()) return;
  if (check::on_gpu(stream)) return cuda::linear(y, x, w, bias, add, stream);
  const Projection projection{y, w, bias};
  if (w.is_quantized()) return cpu::quantized_linears({&projection, 1}, x, add, stream);
  cpu::linears({&projection, 1}, x, add, stream);
}

namespace {

/// What linear() asks of its operands where a tail follows.
void check_tail(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
                Stream& stream) {
  check_factors(x, w, tail.bias, stream);
  const int64_t out = w.shape()[0];
  const int64_t columns = tail.gated ? out / 2 : out;
  if (tail.gated) {
    check::shape(kLinear, "w", as_tensor(w), {2 * columns, x.shape()[1]},
                 "(out, in) for the rows of x");
  }
  check::shape(kLinear, "y", y, {x.shape()[0], columns}, "the columns that the tail does not use");
  check::activation(kLinear, "y", y);
  check::on_stream(kLinear, "y", y, stream);
  check::disjoint(kLinear, "y", y, "x", x);
  if (!tail.scale.empty()) {
    check::f32(kLinear, "scale", tail.scale, {columns}, "a number a column", stream);
  }
  if ((tail.gated && !tail.activation) || (tail.add && y.dtype() != DType::kF32)) {
    check::refuse("{}: {}", kLinear,
                  tail.gated ? "a gated product needs an activation; set one"
                             : "results in f16 cannot be added to; use f32");
  }
}

/// What the columns of `product`, gates and what they open by turns, become.
Tensor gated(const Tensor& product, Activation activation, Stream& stream) {
  const Shape shape{product.shape()[0], product.shape()[1] / 2};
  Tensor gate(DType::kF32, shape);
  Tensor up(DType::kF32, shape);
  const float* from = product.as<float>();
  for (int64_t i = 0; i < shape.elements(); ++i) {
    gate.as<float>()[i] = from[2 * i];
    up.as<float>()[i] = from[2 * i + 1];
  }
  activate_gate(gate, gate, up, activation, stream);
  return gate;
}

/// linear() with a tail on the CPU, of operations that there are anyway.
void compose(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
             Stream& stream) {
  const bool plain = tail.scale.empty() && !tail.gated;
  if (plain && !(tail.add && tail.activation)) {
    linear(y, x, w, tail.bias, tail.add, stream);
    if (tail.activation) activate(y, y, *tail.activation, stream);
    return;
  }
  Tensor product(DType::kF32, {x.shape()[0], w.shape()[0]});
  linear(product, x, w, tail.bias, false, stream);
  if (tail.gated) {
    product = gated(product, *tail.activation, stream);
  } else if (tail.activation) {
    activate(product, product, *tail.activation, stream);
  }
  if (!tail.add) std::fill_n(y.as<float>(), y.elements(), 0.0f);
  if (tail.scale.empty()) return add(y, product, stream);
  add_scaled(y, product, tail.scale, stream);
}

}  // namespace

void linear(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
            Stream& stream) {
  check_tail(y, x, w, tail, stream);
  if (y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::linear(y, x, w, tail, stream);
  compose(y, x, w, tail, stream);
}

void linears(std::span<const Projection> projections, ConstTensorView x, Stream& stream) {
  for (const Projection& projection : projections) {
    check_linear(projection.y, x, projection.w, projection.bias, stream);
  }
  if (check::on_gpu(stream) && !x.empty()) {
    return cuda::linears(projections, x, stream);
  }
  const auto quantized =
      std::ranges::count_if(projections, [](const Projection& p) { return p.w.is_quantized(); });
  if (!x.empty() && quantized == std::ssize(projections)) {
    return cpu::quantized_linears(projections, x, false, stream);
  }
  if (!x.empty() && quantized == 0) return cpu::linears(projections, x, false, stream);
  for (const Projection& projection : projections) {
    linear(projection.y, x, projection.w, projection.bias, false, stream);
  }
}

DType operand_dtype(std::initializer_list<Weight> ws, int64_t rows) {
  const auto taken = [rows](const Weight& w) {
    return w.device().kind == DeviceKind::kCuda ? cuda::operand_dtype(w, rows) : DType::kF32;
  };
  if (ws.size() == 0) return DType::kF32;
  const DType first = taken(*ws.begin());
  const bool alike =
      std::all_of(ws.begin(), ws.end(), [&](const Weight& w) { return taken(w) == first; });
  return alike ? first : DType::kF32;
}

bool gates_alone(const Projection& gate, const Projection& up, Activation activation, DType dtype,
                 int64_t rows) {
  return gate.w.device().kind == DeviceKind::kCuda && gate.w.shape().rank() == 2 &&
         gate.w.shape() == up.w.shape() && cuda::gates_alone(gate, up, activation, dtype, rows);
}

void gated_linears(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, ConstTensorView x, Stream& stream) {
  const bool alone = gate.y.empty() && up.y.empty() && x.shape().rank() == 2 && !y.empty() &&
                     gates_alone(gate, up, activation, y.dtype(), x.shape()[0]);
  check_gated(y, gate, up, x, alone, stream);
  if (y.elements() > 0 && check::on_gpu(stream)) {
    return cuda::gated_linears(y, gate, up, activation, x, stream);
  }
  const Projection both[] = {gate, up};
  linears(both, x, stream);
  activate_gate(y, gate.y, up.y, activation, stream);
}

}  // namespace kvlm
