#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/weight_map.h"
#include "vision/patch_order.h"

namespace kvlm {

/// InternVL's projector: the features of merge x merge patches side by side are one row, which is
/// normed and taken to the decoder's width by two linear layers with a GELU between them. Source:
/// Chen et al. 2024, "How Far Are We to GPT-4V?", sec. 3.1 (pixel shuffle).
class ShuffleProjector {
 public:
  /// in   width of a patch's features; out  the decoder's width
  /// Takes `prefix` + "layer_norm", "linear_1" (out, merge^2 * in) and "linear_2" (out, out), all
  /// with biases. `columns_first` is the published code's older order of rows ("v1").
  ShuffleProjector(int in, int out, int merge, bool columns_first, WeightMap& weights,
                   const std::string& prefix);

  size_t weight_bytes() const noexcept;
  /// features (patches of all grids, in) f32 to (patches / merge^2, out) f32. Throws
  /// Error{kInvalidArgument} if merge does not divide a grid.
  Tensor project(ConstTensorView features, std::span<const PatchGrid> grids, Stream& stream);

 private:
  /// Makes room for rows of `cells` merged patches.
  void reserve(int64_t cells, DType dtype, Device device);

  int merge_;
  bool columns_first_;
  ConstTensorView norm_, norm_bias_, weight1_, bias1_, weight2_, bias2_;
  std::vector<std::shared_ptr<const void>> owners_;

  // Kept from call to call: a GPU's driver takes its time to give memory and to take it back.
  int64_t reserved_ = 0;  // rows
  Tensor gathered_;       // (rows, merge^2 * in) f32, patches side by side
  Tensor normed_;         // (rows, merge^2 * in), or empty where gathered_ is normed in place
  Tensor inner_;          // (rows, out)
};

}  // namespace kvlm
