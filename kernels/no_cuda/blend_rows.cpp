#include "kernels/cuda/blend_rows.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void blend_rows(TensorView, ConstTensorView, const RowBlend&, Stream&) { refuse("blend_rows"); }

}  // namespace kvlm::cuda
