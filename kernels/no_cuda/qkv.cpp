#include "kernels/cuda/qkv.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void norm_queries_and_keys(TensorView, ConstTensorView, ConstTensorView, float, Stream&) {
  refuse("norm_queries_and_keys");
}

void rotate_queries_and_keys(TensorView, ConstTensorView, ConstTensorView, Stream&) {
  refuse("rotate_queries_and_keys");
}

}  // namespace kvlm::cuda
