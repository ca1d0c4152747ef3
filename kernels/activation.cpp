#include "kernels/activation.h"

#include "kernels/check.h"
#include "kernels/cpu/activation.h"
#include "kernels/cuda/activation.h"

namespace kvlm {

void activate(TensorView x, Activation activation, Stream& stream) {
  check::activation("activate", "x", x);
  check::on_stream("activate", "x", x, stream);
  if (x.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) return cuda::activate(x, activation, stream);
  cpu::activate(x, activation, stream);
}

void activate_gate(TensorView gate, ConstTensorView up, Activation activation, Stream& stream) {
  constexpr std::string_view kOp = "activate_gate";
  check::shape(kOp, "up", up, gate.shape(), "the shape of gate");
  check::activation(kOp, "gate", gate);
  check::dtype(kOp, "up", up, gate.dtype());
  check::on_stream(kOp, "gate", gate, stream);
  check::on_stream(kOp, "up", up, stream);
  if (gate.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::activate_gate(gate, up, activation, stream);
  }
  cpu::activate_gate(gate, up, activation, stream);
}

}  // namespace kvlm
