#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/norm.h"
#include "kernels/weight_map.h"

namespace kvlm {

/// A norm or a product with its bias.
struct Affine {
  ConstTensorView weight;
  ConstTensorView bias;  ///< f32, or empty
};

/// What the layers of a tower have in common.
struct BlockShape {
  int hidden = 768;
  int heads = 12;
  int intermediate = 3072;
  float eps = 1e-6f;
  bool rms_norm = false;  ///< else layer norms
  Activation activation = Activation::kGelu;
  bool gated_mlp = false;

  int head_dim() const noexcept { return hidden / heads; }
};

/// One layer's weights, as BlockTaker lays them out.
struct BlockWeights {
  Affine norm1, norm2;
  Affine qkv;                      ///< on a GPU, q, k and v below each other; else empty
  Affine q, k, v;                  ///< on a GPU, rows of qkv
  ConstTensorView q_norm, k_norm;  ///< (hidden,) f32, or empty
  Affine out;
  Affine gate;  ///< empty where the MLP has none, and on a GPU
  Affine up;    ///< on a GPU with a gate, rows of both in turn
  Affine down;
  ConstTensorView scale1, scale2;  ///< (hidden,) f32, or empty
};

/// Takes a layer's weights. On a GPU what is multiplied with the same rows is laid together, and a
/// width of the MLP that the tensor cores do not take is filled up with zeros.
class BlockTaker {
 public:
  BlockTaker(const BlockShape& shape, WeightMap& weights);

  Affine norm(const std::string& name) const { return norm(name, shape_.hidden); }
  Affine norm(const std::string& name, int width) const;
  Affine product(const std::string& name, int out, int in, bool bias = true) const;
  /// The product that patches go through first: (out, in) of a tensor of `shape` = (out, ...).
  Affine patches(const std::string& name, const Shape& shape, bool bias) const;
  /// (width,) f32.
  ConstTensorView vector(const std::string& name, int width) const;
  /// Of three products, or of one that is them below each other.
  void take_qkv(BlockWeights& block, const std::string& q, const std::string& k,
                const std::string& v, bool bias) const;
  void take_qkv(BlockWeights& block, const std::string& qkv, bool bias) const;
  /// `gate` is empty where the MLP has none.
  void take_mlp(BlockWeights& block, const std::string& gate, const std::string& up,
                const std::string& down) const;

 private:
  bool on_gpu() const noexcept { return weights_.device().kind != DeviceKind::kCpu; }
  Affine together(std::span<const WeightMap::SubTensor> parts, int rows, int columns,
                  bool bias) const;

  BlockShape shape_;
  WeightMap& weights_;
};

inline size_t weight_bytes(const Affine& affine) noexcept {
  return affine.weight.bytes() + affine.bias.bytes();
}
size_t weight_bytes(const BlockWeights& block) noexcept;

/// Rotations of queries and keys by row; empty for none.
struct BlockAngles {
  ConstTensorView cos, sin;  ///< (rows, head_dim / 2) f32
};

/// The layers of a vision tower with their workspaces:
///
///   x += scale1 * out(attention(norm1(x))); x += scale2 * down(act(up(norm2(x))))
///
/// x stays f32. On a GPU, and if all weights have one half-precision dtype, what is between one
/// addition and the next is of that dtype, else f32; an addition then takes its product's bias,
/// too. Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words".
class Blocks {
 public:
  Blocks() = default;
  Blocks(const BlockShape& shape, Device device, std::vector<BlockWeights> blocks);

  size_t size() const noexcept { return blocks_.size(); }
  /// Of the workspaces, of every row of x.
  size_t bytes_per_row() const noexcept;
  /// Applies layer `i`; x (rows, hidden) f32. What the layer adds to x may wait for the next layer,
  /// which normalises the sum anyway: whoever reads x calls settle() first.
  void run(size_t i, TensorView x, const Segments& segments, const BlockAngles& angles,
           Stream& stream);
  void settle(TensorView x, Stream& stream);
  /// Memory for (rows, hidden) f32 until the next run() or workspace().
  TensorView workspace(const Shape& shape);
  /// The norm that the shape says.
  void norm(TensorView y, ConstTensorView x, const Affine& norm, Stream& stream) const;
  /// In which rows of products are kept.
  DType dtype() const noexcept { return dtype_; }

 private:
  void reserve(int64_t rows);
  void run_halves(const BlockWeights& block, TensorView x, const Segments& segments,
                  const BlockAngles& angles, Stream& stream);
  TensorView attend(const BlockWeights& block, ConstTensorView normed, const Segments& segments,
                    const BlockAngles& angles, Stream& stream);
  TensorView attend_halves(const BlockWeights& block, ConstTensorView normed,
                           const Segments& segments, const BlockAngles& angles, Stream& stream);
  /// x += scale * (product of `rows`), by way of normed_, which holds none of `rows`.
  void add_product(TensorView x, ConstTensorView rows, const Affine& affine, ConstTensorView scale,
                   Stream& stream);
  /// Part of the workspace: rows of `columns`, behind `before` columns of as many rows.
  TensorView part(int64_t rows, int64_t before, int64_t columns);
  int64_t wide() const noexcept;

  BlockShape shape_;
  Device device_;
  std::vector<BlockWeights> blocks_;
  DType dtype_ = DType::kF32;
  int64_t intermediate_ = 0;     // as the weights have it
  int64_t reserved_ = 0;         // rows
  Tensor normed_;                // (rows, hidden)
  Tensor workspace_;             // (rows * wide(),): q, k, v and their result, or the MLP's inside
  std::vector<Addend> waiting_;  // of it, what x lacks
};

}  // namespace kvlm
