#include "kernels/cuda/rope.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void rotate(std::span<const TensorView>, ConstTensorView, ConstTensorView, Stream&) {
  refuse("rotate");
}

}  // namespace kvlm::cuda
