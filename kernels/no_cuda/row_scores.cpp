#include "kernels/cuda/row_scores.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void row_norms(std::span<const StoredRows>, int, std::span<double>, Stream&) {
  refuse("row_norms");
}

void cosines_to_mean(std::span<const StoredRows>, int, std::span<double>, Stream&) {
  refuse("cosines_to_mean");
}

}  // namespace kvlm::cuda
