#include "kernels/cuda/attention.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
               std::span<const KeyValueRows>, bool, float, DType, Stream&) {
  refuse("attention");
}

}  // namespace kvlm::cuda
