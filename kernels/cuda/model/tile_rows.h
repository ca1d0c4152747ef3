#pragma once

#include "kernels/base/tensor.h"

// The CUDA implementation of kernels/tile_rows.h, which has checked the arguments.
namespace kvlm::cuda {

void scatter_tiles(TensorView x, ConstTensorView patches, ConstTensorView class_token,
                   ConstTensorView positions, Stream& stream);

void take_tiles(TensorView y, int64_t first, ConstTensorView x, int64_t rows_per_tile,
                int64_t skipped, Stream& stream);

}  // namespace kvlm::cuda
