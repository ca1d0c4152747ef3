#include "kernels/cuda/gemm.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void linear(TensorView, ConstTensorView, ConstTensorView, ConstTensorView, bool, Stream&) {
  refuse("linear");
}

void linear(TensorView, ConstTensorView, ConstTensorView, const LinearTail&, Stream&) {
  refuse("linear");
}

void linears(std::span<const Projection>, ConstTensorView, Stream&) { refuse("linears"); }

DType operand_dtype(ConstTensorView, int64_t) { refuse("operand_dtype"); }

void gated_linears(TensorView, const Projection&, const Projection&, Activation, ConstTensorView,
                   Stream&) {
  refuse("gated_linears");
}

bool gates_alone(const Projection&, const Projection&, Activation, DType, int64_t) {
  refuse("gated_linears");
}

double measure_matrix_rate(int, DType, Stream&) { refuse("measure_matrix_rate"); }

}  // namespace kvlm::cuda
