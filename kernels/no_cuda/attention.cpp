#include "kernels/cuda/attention.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
               std::span<const KeyValueRows>, bool, float, DType, Stream&) {
  refuse("attention");
}

void attend_rows(std::span<const DecodePiece>, int, int, float, Stream&) { refuse("attend_rows"); }

void merge_states(std::span<const MergeJob>, int, int, Stream&) { refuse("merge_states"); }

}  // namespace kvlm::cuda
