#include "kernels/cuda/attention.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
               std::span<const KeyValueRows>, bool, float, DType, Stream&) {
  refuse("attention");
}

void segment_attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
                       const Segments&, float, DType, Stream&) {
  refuse("segment_attention");
}

void segment_attention(TensorView, ConstTensorView, const Segments&, float, Stream&) {
  refuse("segment_attention");
}

}  // namespace kvlm::cuda
