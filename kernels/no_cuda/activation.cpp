#include "kernels/cuda/activation.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void activate(TensorView, ConstTensorView, Activation, Stream&) { refuse("activate"); }

void activate_gate(TensorView, ConstTensorView, ConstTensorView, Activation, Stream&) {
  refuse("activate_gate");
}

}  // namespace kvlm::cuda
