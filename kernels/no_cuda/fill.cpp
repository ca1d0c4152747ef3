#include "kernels/cuda/fill.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void fill_random(TensorView, uint64_t, float, Stream&) { refuse("fill_random"); }

}  // namespace kvlm::cuda
