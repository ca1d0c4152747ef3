#include "kernels/cuda/hadamard.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void hadamard(std::span<const HadamardRows>, Stream&) { refuse("hadamard"); }

}  // namespace kvlm::cuda
