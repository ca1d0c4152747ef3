#include "kernels/cuda/store_rows.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void store_rows(std::span<const RowDestination>, DType, ConstTensorView, Stream&) {
  refuse("store_rows");
}

}  // namespace kvlm::cuda
