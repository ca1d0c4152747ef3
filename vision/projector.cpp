#include "vision/projector.h"

#include "kernels/gemm.h"

namespace kvlm {

MlpProjector::MlpProjector(int in, int out, Activation activation, bool has_bias,
                           WeightMap& weights, const std::string& prefix)
    : activation_(activation),
      weight1_(weights.take(prefix + "linear_1.weight", {out, in})),
      weight2_(weights.take(prefix + "linear_2.weight", {out, out})) {
  if (has_bias) {
    bias1_ = weights.take_f32(prefix + "linear_1.bias", {out});
    bias2_ = weights.take_f32(prefix + "linear_2.bias", {out});
  }
  owners_ = weights.owners();
}

size_t MlpProjector::weight_bytes() const noexcept { return weight1_.bytes() + weight2_.bytes(); }

Tensor MlpProjector::project(ConstTensorView features, Stream& stream) {
  const int64_t rows = features.shape()[0];
  const int64_t width = weight1_.shape()[0];
  if (inner_.empty() || inner_.shape()[0] < rows) {
    inner_ = Tensor();  // first, so that not both are held
    inner_ = Tensor(DType::kF32, {rows, width}, stream.device());
  }
  const TensorView inner = inner_.view().slice(0, rows);
  Tensor out(DType::kF32, {rows, width}, stream.device());
  linear(inner, features, weight1_, bias1_, false, stream);
  activate(inner, inner, activation_, stream);
  linear(out, inner, weight2_, bias2_, false, stream);
  return out;
}

}  // namespace kvlm
