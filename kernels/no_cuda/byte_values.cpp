#include "kernels/cuda/byte_values.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void place_bytes(TensorView, ConstTensorView, ConstTensorView, Stream&) { refuse("place_bytes"); }

}  // namespace kvlm::cuda
