#include "kernels/cuda/expected_attention.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void expected_attention(const FutureQueries&, ConstTensorView, std::span<const StoredRows>,
                        std::span<double>, Stream&) {
  refuse("expected_attention");
}

}  // namespace kvlm::cuda
