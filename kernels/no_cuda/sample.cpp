#include "kernels/cuda/sample.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void sample_rows(std::span<int32_t>, TensorView, std::span<const RowSampling>, Stream&) {
  refuse("sample_rows");
}

}  // namespace kvlm::cuda
