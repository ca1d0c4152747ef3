#include "kernels/cuda/tile_rows.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void scatter_tiles(TensorView, ConstTensorView, ConstTensorView, ConstTensorView, Stream&) {
  refuse("scatter_tiles");
}

void take_tiles(TensorView, int64_t, ConstTensorView, int64_t, int64_t, Stream&) {
  refuse("take_tiles");
}

}  // namespace kvlm::cuda
