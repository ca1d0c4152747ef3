#pragma once

#include <memory>
#include <string>

#include "kernels/activation.h"
#include "kernels/weight_map.h"

namespace kvlm {

/// LLaVA's projector: visual features to the decoder's width by two linear layers with an
/// activation between them. Source: Liu et al. 2023, "Improved Baselines with Visual Instruction
/// Tuning", sec. 3.
class MlpProjector {
 public:
  /// Takes `prefix` + "linear_1" (out, in) and "linear_2" (out, out), with biases if has_bias.
  MlpProjector(int in, int out, Activation activation, bool has_bias, WeightMap& weights,
               const std::string& prefix);

  size_t weight_bytes() const noexcept;
  /// features (rows, in) f32 to (rows, out) f32. Keeps what it needs in between.
  Tensor project(ConstTensorView features, Stream& stream);

 private:
  Activation activation_;
  ConstTensorView weight1_, bias1_, weight2_, bias2_;
  Tensor inner_;  // (rows, out) or more
  std::vector<std::shared_ptr<const void>> owners_;
};

}  // namespace kvlm
