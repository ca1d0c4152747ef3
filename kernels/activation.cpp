#include "kernels/activation.h"

#include "kernels/check.h"
#include "kernels/cpu/activation.h"
#include "kernels/cuda/model/activation.h"

namespace kvlm {

namespace {

void check_elements(std::string_view op, std::string_view name, const TensorView& y,
                    const ConstTensorView& x, Stream& stream) {
  check::f32(op, name, x, stream);
  check::shape(op, "y", y, x.shape(), "the shape of the values");
  check::activation(op, "y", y);
  check::on_stream(op, "y", y, stream);
  if (y.dtype() != x.dtype() || y.data() != x.data()) check::disjoint(op, "y", y, name, x);
}

}  // namespace

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream) {
  check_elements("activate", "x", y, x, stream);
  if (x.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::activate(y, x, activation, stream);
  cpu::activate(y, x, activation, stream);
}

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream) {
  constexpr std::string_view kOp = "activate_gate";
  check_elements(kOp, "gate", y, gate, stream);
  check::f32(kOp, "up", up, gate.shape(), "the shape of gate", stream);
  check::disjoint(kOp, "y", y, "up", up);
  if (gate.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::activate_gate(y, gate, up, activation, stream);
  cpu::activate_gate(y, gate, up, activation, stream);
}

}  // namespace kvlm
