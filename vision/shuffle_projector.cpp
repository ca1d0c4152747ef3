#include "vision/shuffle_projector.h"

#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"

namespace kvlm {

namespace {

constexpr float kEps = 1e-5f;  // not the tower's 1e-6

}  // namespace

ShuffleProjector::ShuffleProjector(int in, int out, int merge, bool columns_first,
                                   WeightMap& weights, const std::string& prefix)
    : merge_(merge), columns_first_(columns_first) {
  const int wide = in * merge * merge;
  norm_ = weights.take_f32(prefix + "layer_norm.weight", {wide});
  norm_bias_ = weights.take_f32(prefix + "layer_norm.bias", {wide});
  weight1_ = weights.take(prefix + "linear_1.weight", {out, wide});
  bias1_ = weights.take_f32(prefix + "linear_1.bias", {out});
  weight2_ = weights.take(prefix + "linear_2.weight", {out, out});
  bias2_ = weights.take_f32(prefix + "linear_2.bias", {out});
  owners_ = weights.owners();
}

size_t ShuffleProjector::weight_bytes() const noexcept {
  return weight1_.bytes() + weight2_.bytes();
}

void ShuffleProjector::reserve(int64_t cells, DType dtype, Device device) {
  if (cells <= reserved_ && !gathered_.empty()) return;
  reserved_ = 0;         // as long as there may be no memory for more
  gathered_ = Tensor();  // first, so that not both are held
  normed_ = Tensor();
  inner_ = Tensor();
  const int64_t wide = norm_.shape()[0];
  gathered_ = Tensor(DType::kF32, {cells, wide}, device);
  if (dtype != DType::kF32) normed_ = Tensor(dtype, {cells, wide}, device);
  inner_ = Tensor(dtype, {cells, weight1_.shape()[0]}, device);
  reserved_ = cells;
}

Tensor ShuffleProjector::project(ConstTensorView features, std::span<const PatchGrid> grids,
                                 Stream& stream) {
  std::vector<int32_t> order;
  for (const PatchGrid& grid : grids) {
    const std::vector<int32_t> in_slice =
        merge_block_order(grid.rows, grid.columns, merge_, columns_first_);
    for (int slice = 0; slice < grid.slices; ++slice) {
      const auto first = static_cast<int32_t>(order.size());
      for (const int32_t patch : in_slice) order.push_back(first + patch);
    }
  }
  const int64_t cells = std::ssize(order) / (int64_t{merge_} * merge_);
  const Device device = stream.device();
  reserve(cells, device.kind == DeviceKind::kCpu ? DType::kF32 : weight1_.dtype(), device);
  const TensorView wide = gathered_.view().slice(0, cells);
  gather_rows(wide.reshape(features.shape()), features, order, stream);
  const TensorView normed = normed_.empty() ? wide : normed_.view().slice(0, cells);
  layer_norm(normed, wide, norm_, norm_bias_, kEps, stream);
  const TensorView inner = inner_.view().slice(0, cells);
  linear(inner, normed, weight1_, LinearTail{.bias = bias1_, .activation = Activation::kGelu},
         stream);
  Tensor out(DType::kF32, {cells, weight2_.shape()[0]}, device);
  linear(out, inner, weight2_, bias2_, false, stream);
  return out;
}

}  // namespace kvlm
