#include "kernels/cuda/rope.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void rotate(TensorView, ConstTensorView, ConstTensorView, Stream&) { refuse("rotate"); }

}  // namespace kvlm::cuda
