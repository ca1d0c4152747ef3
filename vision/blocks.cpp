#include "vision/blocks.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/qkv.h"
#include "kernels/rope.h"

// The transformer blocks that all towers share: norm, q, k and v in one product, attention among
// the rows of a segment, output product, norm and MLP. Between products rows have the weights'
// type, the residual is f32, and each addition happens in the norm behind it. Weights are taken and
// their workspace is sized here.
namespace kvlm {

namespace {

/// Columns that products of halves can be multiplied by.
constexpr int kEvenColumns = 8;

int rounded_up(int columns) { return (columns + kEvenColumns - 1) / kEvenColumns * kEvenColumns; }

}  // namespace

BlockTaker::BlockTaker(const BlockShape& shape, WeightMap& weights)
    : shape_(shape), weights_(weights) {}

Affine BlockTaker::norm(const std::string& name, int width) const {
  Affine norm{weights_.take_f32(name + ".weight", {width}), {}};
  if (!shape_.rms_norm) norm.bias = weights_.take_f32(name + ".bias", {width});
  return norm;
}

Affine BlockTaker::product(const std::string& name, int out, int in, bool bias) const {
  Affine product{weights_.take(name + ".weight", {out, in}), {}};
  if (bias) product.bias = weights_.take_f32(name + ".bias", {out});
  return product;
}

Affine BlockTaker::patches(const std::string& name, const Shape& shape, bool bias) const {
  const auto out = static_cast<int>(shape[0]);
  const auto in = static_cast<int>(shape.elements() / shape[0]);
  Affine made;
  if (on_gpu() && rounded_up(in) != in) {
    const WeightMap::SubTensor part{name + ".weight", shape};
    made.weight = weights_.take_together({out, rounded_up(in)}, {&part, 1});
  } else {
    made.weight = weights_.take(name + ".weight", shape).reshape({out, in});
  }
  if (bias) made.bias = weights_.take_f32(name + ".bias", {out});
  return made;
}

ConstTensorView BlockTaker::vector(const std::string& name, int width) const {
  return weights_.take_f32(name, {width});
}

Affine BlockTaker::together(std::span<const WeightMap::SubTensor> parts, int rows, int columns,
                            bool bias) const {
  std::vector<WeightMap::SubTensor> named(parts.begin(), parts.end());
  for (WeightMap::SubTensor& part : named) part.name += ".weight";
  Affine made{weights_.take_together({rows, columns}, named), {}};
  if (!bias) return made;
  for (size_t i = 0; i < named.size(); ++i) {
    named[i].name = parts[i].name + ".bias";
    named[i].shape = {parts[i].shape[0]};
  }
  made.bias = weights_.take_together_f32({rows}, named);
  return made;
}

void BlockTaker::take_qkv(BlockWeights& block, const std::string& q, const std::string& k,
                          const std::string& v, bool bias) const {
  const int hidden = shape_.hidden;
  if (!on_gpu()) {
    block.q = product(q, hidden, hidden, bias);
    block.k = product(k, hidden, hidden, bias);
    block.v = product(v, hidden, hidden, bias);
    return;
  }
  const Shape square{hidden, hidden};
  const WeightMap::SubTensor parts[] = {
      {q, square, 0}, {k, square, hidden}, {v, square, 2 * hidden}};
  block.qkv = together(parts, 3 * hidden, hidden, bias);
  const auto third = [&](int part) {
    return Affine{block.qkv.weight.slice(part * hidden, hidden),
                  bias ? block.qkv.bias.slice(part * hidden, hidden) : ConstTensorView()};
  };
  block.q = third(0);
  block.k = third(1);
  block.v = third(2);
}

void BlockTaker::take_qkv(BlockWeights& block, const std::string& qkv, bool bias) const {
  const int hidden = shape_.hidden;
  const Affine all = product(qkv, 3 * hidden, hidden, bias);
  const auto third = [&](int part) {
    return Affine{all.weight.slice(part * hidden, hidden),
                  bias ? all.bias.slice(part * hidden, hidden) : ConstTensorView()};
  };
  block.q = third(0);
  block.k = third(1);
  block.v = third(2);
  if (on_gpu()) block.qkv = all;
}

void BlockTaker::take_mlp(BlockWeights& block, const std::string& gate, const std::string& up,
                          const std::string& down) const {
  const int hidden = shape_.hidden;
  const int inner = shape_.intermediate;
  if (!on_gpu()) {
    if (!gate.empty()) block.gate = product(gate, inner, hidden);
    block.up = product(up, inner, hidden);
    block.down = product(down, hidden, inner);
    return;
  }
  const int even = rounded_up(inner);
  const Shape shape{inner, hidden};
  if (!gate.empty()) {
    const WeightMap::SubTensor parts[] = {{gate, shape, 0, 2}, {up, shape, 1, 2}};
    block.up = together(parts, 2 * even, hidden, true);
  } else if (even != inner) {
    const WeightMap::SubTensor part{up, shape};
    block.up = together({&part, 1}, even, hidden, true);
  } else {
    block.up = product(up, inner, hidden);
  }
  if (even == inner) {
    block.down = product(down, hidden, inner);
    return;
  }
  const WeightMap::SubTensor part{down + ".weight", {hidden, inner}};
  block.down.weight = weights_.take_together({hidden, even}, {&part, 1});
  block.down.bias = weights_.take_f32(down + ".bias", {hidden});
}

size_t weight_bytes(const BlockWeights& block) noexcept {
  size_t bytes = 0;
  for (const Affine* affine : {&block.norm1, &block.norm2, &block.q, &block.k, &block.v, &block.out,
                               &block.gate, &block.up, &block.down}) {
    bytes += weight_bytes(*affine);
  }
  for (const ConstTensorView& vector : {block.q_norm, block.k_norm, block.scale1, block.scale2}) {
    bytes += vector.bytes();
  }
  return bytes;
}

Blocks::Blocks(const BlockShape& shape, Device device, std::vector<BlockWeights> blocks)
    : shape_(shape), device_(device), blocks_(std::move(blocks)) {
  if (blocks_.empty()) return;
  const BlockWeights& first = blocks_.front();
  intermediate_ = first.down.weight.shape()[1];
  const DType dtype = first.qkv.weight.dtype();
  if (device.kind == DeviceKind::kCpu || dtype == DType::kF32) return;
  // What the tensor cores take as it is.
  const bool even = shape.head_dim() % 8 == 0 && shape.head_dim() <= 256 && shape.hidden % 16 == 0;
  const bool alike = std::ranges::all_of(blocks_, [&](const BlockWeights& block) {
    return block.qkv.weight.dtype() == dtype && block.out.weight.dtype() == dtype &&
           block.up.weight.dtype() == dtype && block.down.weight.dtype() == dtype;
  });
  if (even && alike) dtype_ = dtype;
}

int64_t Blocks::wide() const noexcept {
  const int64_t hidden = shape_.hidden;
  if (dtype_ != DType::kF32) return std::max(4 * hidden, intermediate_) + 2 * hidden;
  const bool apart = shape_.gated_mlp && device_.kind == DeviceKind::kCpu;
  return std::max(3 * hidden, (apart ? 2 : 1) * intermediate_);
}

size_t Blocks::bytes_per_row() const noexcept {
  return dtype_bytes(dtype_) * static_cast<size_t>(shape_.hidden + wide());
}

void Blocks::reserve(int64_t rows) {
  if (rows <= reserved_) return;
  reserved_ = 0;  // as long as there may be no memory for more
  waiting_.clear();
  workspace_ = Tensor();
  normed_ = Tensor(dtype_, {rows, shape_.hidden}, device_);
  workspace_ = Tensor(dtype_, {rows * wide()}, device_);
  reserved_ = rows;
}

TensorView Blocks::workspace(const Shape& shape) {
  reserve(shape[0]);
  return {workspace_.view().data(), DType::kF32, shape, device_};
}

TensorView Blocks::part(int64_t rows, int64_t before, int64_t columns) {
  return workspace_.view().slice(rows * before, rows * columns).reshape({rows, columns});
}

void Blocks::norm(TensorView y, ConstTensorView x, const Affine& norm, Stream& stream) const {
  if (shape_.rms_norm) return rms_norm(y, x, norm.weight, shape_.eps, stream);
  layer_norm(y, x, norm.weight, norm.bias, shape_.eps, stream);
}

TensorView Blocks::attend(const BlockWeights& block, ConstTensorView normed,
                          const Segments& segments, const BlockAngles& angles, Stream& stream) {
  const int64_t rows = normed.shape()[0];
  const int64_t hidden = shape_.hidden;
  const TensorView q = part(rows, 0, hidden);
  const TensorView k = part(rows, hidden, hidden);
  const TensorView v = part(rows, 2 * hidden, hidden);
  const Projection qkv[] = {{q, block.q.weight, block.q.bias},
                            {k, block.k.weight, block.k.bias},
                            {v, block.v.weight, block.v.bias}};
  linears(qkv, normed, stream);
  if (!block.q_norm.empty()) {
    rms_norm(q, q, block.q_norm, shape_.eps, stream);
    rms_norm(k, k, block.k_norm, shape_.eps, stream);
  }
  const Shape by_head{rows, shape_.heads, shape_.head_dim()};
  const TensorView rotated[] = {q.reshape(by_head), k.reshape(by_head)};
  if (!angles.cos.empty()) rotate(rotated, angles.cos, angles.sin, stream);
  segment_attention(rotated[0], rotated[0], rotated[1], v.reshape(by_head), segments,
                    1.0f / std::sqrt(static_cast<float>(shape_.head_dim())), block.q.weight.dtype(),
                    stream);
  return q;
}

TensorView Blocks::attend_halves(const BlockWeights& block, ConstTensorView normed,
                                 const Segments& segments, const BlockAngles& angles,
                                 Stream& stream) {
  const int64_t rows = normed.shape()[0];
  const int64_t hidden = shape_.hidden;
  const TensorView product = part(rows, 0, 3 * hidden);
  linear(product, normed, block.qkv.weight, LinearTail{.bias = block.qkv.bias}, stream);
  const TensorView qkv = product.reshape({rows, 3, shape_.heads, shape_.head_dim()});
  if (!block.q_norm.empty()) {
    norm_queries_and_keys(qkv, block.q_norm, block.k_norm, shape_.eps, stream);
  }
  if (!angles.cos.empty()) rotate_queries_and_keys(qkv, angles.cos, angles.sin, stream);
  const TensorView attended = part(rows, 3 * hidden, hidden);
  segment_attention(attended.reshape({rows, shape_.heads, shape_.head_dim()}), qkv, segments,
                    1.0f / std::sqrt(static_cast<float>(shape_.head_dim())), stream);
  return attended;
}

void Blocks::run_halves(const BlockWeights& block, TensorView x, const Segments& segments,
                        const BlockAngles& angles, Stream& stream) {
  const int64_t rows = x.shape()[0];
  const int64_t hidden = shape_.hidden;
  const int64_t behind = wide() - 2 * hidden;  // what is overwritten from layer to layer
  const TensorView normed = normed_.view().slice(0, rows);
  if (waiting_.empty()) {
    norm(normed, x, block.norm1, stream);
  } else {
    add_norm(normed, x, Residual::kSum, waiting_, block.norm1.weight, block.norm1.bias, shape_.eps,
             stream);
  }
  const TensorView attended = attend_halves(block, normed, segments, angles, stream);
  const TensorView out = part(rows, behind, hidden);
  linear(out, attended, block.out.weight, LinearTail{}, stream);
  // x itself gets both sums of the layer at once, so that it is written once.
  waiting_.assign({{out, block.out.bias, block.scale1}});
  add_norm(normed, x, Residual::kSame, waiting_, block.norm2.weight, block.norm2.bias, shape_.eps,
           stream);
  const TensorView inner = part(rows, 0, intermediate_);
  linear(
      inner, normed, block.up.weight,
      LinearTail{.bias = block.up.bias, .activation = shape_.activation, .gated = shape_.gated_mlp},
      stream);
  const TensorView down = part(rows, behind + hidden, hidden);
  linear(down, inner, block.down.weight, LinearTail{}, stream);
  waiting_.push_back({down, block.down.bias, block.scale2});
}

void Blocks::settle(TensorView x, Stream& stream) {
  if (waiting_.empty()) return;
  add_norm({}, x, Residual::kSum, waiting_, {}, {}, shape_.eps, stream);
  waiting_.clear();
}

void Blocks::add_product(TensorView x, ConstTensorView rows, const Affine& affine,
                         ConstTensorView scale, Stream& stream) {
  if (scale.empty()) return linear(x, rows, affine.weight, affine.bias, /*add=*/true, stream);
  const TensorView product = normed_.view().slice(0, x.shape()[0]);
  linear(product, rows, affine.weight, affine.bias, /*add=*/false, stream);
  add_scaled(x, product, scale, stream);
}

void Blocks::run(size_t i, TensorView x, const Segments& segments, const BlockAngles& angles,
                 Stream& stream) {
  const BlockWeights& block = blocks_[i];
  const int64_t rows = x.shape()[0];
  reserve(rows);
  if (i == 0) waiting_.clear();  // of pictures that were given up
  if (dtype_ != DType::kF32) return run_halves(block, x, segments, angles, stream);
  const TensorView normed = normed_.view().slice(0, rows);
  norm(normed, x, block.norm1, stream);
  const TensorView attended = attend(block, normed, segments, angles, stream);
  add_product(x, attended, block.out, block.scale1, stream);

  norm(normed, x, block.norm2, stream);
  const TensorView inner = part(rows, 0, intermediate_);
  if (!block.gate.weight.empty()) {
    const Projection gate{inner, block.gate.weight, block.gate.bias};
    const Projection up{part(rows, intermediate_, intermediate_), block.up.weight, block.up.bias};
    gated_linears(inner, gate, up, shape_.activation, normed, stream);
  } else {
    linear(inner, normed, block.up.weight,
           LinearTail{
               .bias = block.up.bias, .activation = shape_.activation, .gated = shape_.gated_mlp},
           stream);
  }
  add_product(x, inner, block.down, block.scale2, stream);
}

}  // namespace kvlm
