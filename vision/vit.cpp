#include "vision/vit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"

namespace kvlm {

namespace {

struct Affine {
  ConstTensorView weight;
  ConstTensorView bias;  // (out,) f32, or empty
};

struct Layer {
  Affine norm1, norm2;
  Affine q, k, v, out, fc1, fc2;
  ConstTensorView q_norm, k_norm;  // (hidden,) f32, or empty
  ConstTensorView scale1, scale2;  // (hidden,) f32, or empty
};

class Vit final : public VisionEncoder {
 public:
  Vit(const VitConfig& config, const VitNames& names, WeightMap& weights, const std::string& prefix,
      size_t workspace_bytes);

  int64_t tokens(const PatchGrid& grid) const noexcept override {
    return grid.patches() + (config_.keep_class_token ? class_rows() : 0);
  }
  int width() const noexcept override {
    return config_.hidden * static_cast<int>(selected_.size());
  }
  size_t weight_bytes() const noexcept override { return weight_bytes_; }
  Tensor encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                const VisionTap& tap) override;

 private:
  Affine take(WeightMap& weights, const std::string& name, Shape shape, bool bias = true);
  Affine take_norm(WeightMap& weights, const std::string& name);
  void check(const VisualPatches& picture) const;
  /// Makes room for this many tiles.
  void reserve(int64_t tiles);
  size_t bytes_per_tile() const;
  /// Encodes tiles, each (patches, columns), into rows of `features`.
  void encode_piece(std::span<const ConstTensorView> tiles, TensorView features, Stream& stream,
                    const VisionTap& tap);
  void embed(std::span<const ConstTensorView> tiles, Stream& stream, const VisionTap& tap);
  void norm(TensorView y, ConstTensorView x, const Affine& norm, Stream& stream) const;
  void run(const Layer& layer, int64_t tiles, Stream& stream);
  /// x += scale * (product of `rows`), by way of `product` where there is a scale.
  void add_block(TensorView x, TensorView product, ConstTensorView rows, const Affine& affine,
                 ConstTensorView scale, Stream& stream) const;
  /// Copies hidden state `state` into its columns of `features`, if it is one of the selected.
  void select(int state, int64_t tiles, TensorView features, Stream& stream);
  int64_t class_rows() const noexcept { return config_.class_token ? 1 : 0; }
  int64_t rows_per_tile() const noexcept { return patches_ + class_rows(); }
  TensorView used(Tensor& tensor, int64_t tiles) const {
    return tensor.view().slice(0, tiles * rows_per_tile());
  }

  VitConfig config_;
  size_t workspace_bytes_;     // at most, if one tile does not need more
  int64_t patches_;            // of a tile
  std::vector<int> selected_;  // hidden states to return, 0-based, in order
  std::vector<std::shared_ptr<const void>> owners_;
  size_t weight_bytes_ = 0;
  Affine patch_;                     // (hidden, 3 * patch * patch)
  ConstTensorView class_embedding_;  // (1, hidden) f32, or empty
  ConstTensorView positions_;        // (rows of a tile, hidden) f32
  Affine pre_norm_;
  std::vector<Layer> layers_;
  Device device_;
  DType normed_dtype_ = DType::kF32;     // in which products take rows of normed_
  DType activated_dtype_ = DType::kF32;  // and of activated_

  // Rows of a tile: its class token, then its patches.
  int64_t reserved_ = 0;  // tiles
  Tensor placed_;         // (patches, 3 * patch * patch) of one tile, where the device is no CPU
  Tensor x_, q_, k_, v_;  // (tiles * rows_per_tile(), hidden)
  Tensor normed_;         // the same, as products take it
  Tensor inner_;          // (tiles * rows_per_tile(), intermediate)
  Tensor activated_;      // the same, where products do not take f32
  std::vector<int32_t> bounds_;  // of the tiles, in rows
};

Affine Vit::take(WeightMap& weights, const std::string& name, Shape shape, bool bias) {
  Affine affine{weights.take(name + ".weight", shape), {}};
  weight_bytes_ += affine.weight.bytes();
  if (bias) {
    affine.bias = weights.take_f32(name + ".bias", {shape[0]});
    weight_bytes_ += affine.bias.bytes();
  }
  return affine;
}

Affine Vit::take_norm(WeightMap& weights, const std::string& name) {
  Affine norm{weights.take_f32(name + ".weight", {config_.hidden}), {}};
  if (config_.norm == VitConfig::Norm::kLayer) {
    norm.bias = weights.take_f32(name + ".bias", {config_.hidden});
  }
  return norm;
}

Vit::Vit(const VitConfig& config, const VitNames& names, WeightMap& weights,
         const std::string& prefix, size_t workspace_bytes)
    : config_(config), workspace_bytes_(workspace_bytes) {
  const int grid = config.image_size / config.patch_size;
  patches_ = int64_t{grid} * grid;
  int needed = 0;
  for (const int layer : config.feature_layers) {
    const int state = layer < 0 ? config.layers + 1 + layer : layer;
    if (state < 0 || state > config.layers) {
      throw Error(
          ErrorCode::kCorruptFile,
          fmt::format("config.json: vision_feature_layer is {}; expected {} to {} for a tower "
                      "of {} layers",
                      layer, -config.layers - 1, config.layers, config.layers));
    }
    selected_.push_back(state);
    needed = std::max(needed, state);
  }

  const int hidden = config.hidden;
  const int64_t patch = config.patch_size;
  const auto named = [&](std::string_view name) { return prefix + std::string(name); };
  patch_ = {weights.take(named(names.patch) + ".weight", {hidden, 3, patch, patch})
                .reshape({hidden, 3 * patch * patch}),
            {}};
  if (config.patch_bias) {
    patch_.bias = weights.take_f32(named(names.patch) + ".bias", {hidden});
  }
  // Some files keep tables as batches of one.
  const auto table = [&](std::string_view name, Shape shape, int rank) {
    const Shape stored = rank == 1   ? Shape{shape[1]}
                         : rank == 3 ? Shape{1, shape[0], shape[1]}
                                     : shape;
    return weights.take_f32(named(name), stored).reshape(shape);
  };
  if (config.class_token) {
    class_embedding_ = table(names.class_token, {1, hidden}, names.batched_tables ? 3 : 1);
  }
  positions_ = table(names.positions, {rows_per_tile(), hidden}, names.batched_tables ? 3 : 2);
  if (config.pre_norm) pre_norm_ = take_norm(weights, named(names.pre_norm));
  for (int i = 0; i < needed; ++i) {
    const auto in_layer = [&](std::string_view name) {
      return fmt::format("{}{}.{}.{}", prefix, names.layer, i, name);
    };
    Layer layer;
    layer.norm1 = take_norm(weights, in_layer(names.norm1));
    layer.norm2 = take_norm(weights, in_layer(names.norm2));
    layer.q = take(weights, in_layer(names.q), {hidden, hidden}, config.qkv_bias);
    layer.k = take(weights, in_layer(names.k), {hidden, hidden}, config.qkv_bias);
    layer.v = take(weights, in_layer(names.v), {hidden, hidden}, config.qkv_bias);
    layer.out = take(weights, in_layer(names.out), {hidden, hidden});
    layer.fc1 = take(weights, in_layer(names.fc1), {config.intermediate, hidden});
    layer.fc2 = take(weights, in_layer(names.fc2), {hidden, config.intermediate});
    if (config.qk_norm) {
      layer.q_norm = weights.take_f32(in_layer(names.q_norm) + ".weight", {hidden});
      layer.k_norm = weights.take_f32(in_layer(names.k_norm) + ".weight", {hidden});
    }
    if (config.layer_scale) {
      layer.scale1 = weights.take_f32(in_layer(names.scale1), {hidden});
      layer.scale2 = weights.take_f32(in_layer(names.scale2), {hidden});
    }
    layers_.push_back(layer);
  }
  weight_bytes_ += patch_.weight.bytes() + positions_.bytes();
  owners_ = weights.owners();

  device_ = weights.device();
  // The dtype in which all of these products, in all layers, take rows of one tile; more rows are
  // taken so too.
  const auto taken_by = [&](std::initializer_list<const Affine Layer::*> products) {
    if (layers_.empty()) return DType::kF32;
    const Layer& first = layers_[0];
    const DType dtype = operand_dtype({(first.*(*products.begin())).weight}, rows_per_tile());
    for (const Layer& layer : layers_) {
      for (const Affine Layer::*product : products) {
        if (operand_dtype({(layer.*product).weight}, rows_per_tile()) != dtype) return DType::kF32;
      }
    }
    return dtype;
  };
  normed_dtype_ = taken_by({&Layer::q, &Layer::k, &Layer::v, &Layer::fc1});
  activated_dtype_ = taken_by({&Layer::fc2});
}

size_t Vit::bytes_per_tile() const {
  const auto hidden = static_cast<size_t>(config_.hidden);
  const auto intermediate = static_cast<size_t>(config_.intermediate);
  size_t row = sizeof(float) * (4 * hidden + intermediate) + dtype_bytes(normed_dtype_) * hidden;
  if (activated_dtype_ != DType::kF32) row += dtype_bytes(activated_dtype_) * intermediate;
  return row * static_cast<size_t>(rows_per_tile());
}

void Vit::reserve(int64_t tiles) {
  if (tiles <= reserved_) return;
  reserved_ = 0;  // as long as there may be no memory for more
  const int64_t rows = tiles * rows_per_tile();
  for (Tensor* tensor : {&x_, &q_, &k_, &v_}) {
    *tensor = Tensor(DType::kF32, {rows, config_.hidden}, device_);
  }
  normed_ = Tensor(normed_dtype_, {rows, config_.hidden}, device_);
  inner_ = Tensor(DType::kF32, {rows, config_.intermediate}, device_);
  if (activated_dtype_ != DType::kF32) {
    activated_ = Tensor(activated_dtype_, inner_.shape(), device_);
  }
  if (device_.kind != DeviceKind::kCpu) {
    placed_ = Tensor(DType::kF32, {patches_, patch_.weight.shape()[1]}, device_);
  }
  bounds_.clear();
  for (int64_t i = 0; i <= tiles; ++i) {
    bounds_.push_back(static_cast<int32_t>(i * rows_per_tile()));
  }
  reserved_ = tiles;
}

void Vit::embed(std::span<const ConstTensorView> tiles, Stream& stream, const VisionTap& tap) {
  const TensorView x = used(x_, std::ssize(tiles));
  for (size_t i = 0; i < tiles.size(); ++i) {
    ConstTensorView rows = tiles[i];
    if (!placed_.empty()) {
      copy(placed_, rows, stream);
      rows = placed_;
    }
    const TensorView tile = x.slice(static_cast<int64_t>(i) * rows_per_tile(), rows_per_tile());
    const TensorView patches = tile.slice(class_rows(), patches_);
    linear(patches, rows, patch_.weight, patch_.bias, false, stream);
    if (tap) tap("vision.patch_embed", patches);
    if (config_.class_token) copy(tile.slice(0, 1), class_embedding_, stream);
    add(tile, positions_, stream);
  }
  if (tap) tap("vision.embeddings", x);
  if (!config_.pre_norm) return;
  norm(x, x, pre_norm_, stream);
  if (tap) tap("vision.pre_norm", x);
}

void Vit::norm(TensorView y, ConstTensorView x, const Affine& norm, Stream& stream) const {
  if (config_.norm == VitConfig::Norm::kRms) {
    return rms_norm(y, x, norm.weight, config_.eps, stream);
  }
  layer_norm(y, x, norm.weight, norm.bias, config_.eps, stream);
}

void Vit::add_block(TensorView x, TensorView product, ConstTensorView rows, const Affine& affine,
                    ConstTensorView scale, Stream& stream) const {
  if (!config_.layer_scale) {
    return linear(x, rows, affine.weight, affine.bias, /*add=*/true, stream);
  }
  linear(product, rows, affine.weight, affine.bias, /*add=*/false, stream);
  add_scaled(x, product, scale, stream);
}

void Vit::run(const Layer& layer, int64_t tiles, Stream& stream) {
  const int head_dim = config_.hidden / config_.heads;
  const TensorView x = used(x_, tiles);
  const TensorView q = used(q_, tiles);
  const TensorView k = used(k_, tiles);
  const TensorView v = used(v_, tiles);
  const TensorView normed = used(normed_, tiles);
  const Shape by_head{x.shape()[0], config_.heads, head_dim};
  norm(normed, x, layer.norm1, stream);
  const LinearPart qkv[] = {{q, layer.q.weight, layer.q.bias},
                            {k, layer.k.weight, layer.k.bias},
                            {v, layer.v.weight, layer.v.bias}};
  linears(qkv, normed, stream);
  if (config_.qk_norm) {
    rms_norm(q, q, layer.q_norm, config_.eps, stream);
    rms_norm(k, k, layer.k_norm, config_.eps, stream);
  }
  segment_attention(q.reshape(by_head), q.reshape(by_head), k.reshape(by_head), v.reshape(by_head),
                    std::span(bounds_).first(static_cast<size_t>(tiles) + 1),
                    1.0f / std::sqrt(static_cast<float>(head_dim)), layer.q.weight.dtype(), stream);
  add_block(x, k, q, layer.out, layer.scale1, stream);

  norm(normed, x, layer.norm2, stream);
  const TensorView inner = used(inner_, tiles);
  linear(inner, normed, layer.fc1.weight, layer.fc1.bias, false, stream);
  const TensorView activated = activated_.empty() ? inner : used(activated_, tiles);
  activate(activated, inner, config_.activation, stream);
  add_block(x, q, activated, layer.fc2, layer.scale2, stream);
}

void Vit::select(int state, int64_t tiles, TensorView features, Stream& stream) {
  const int64_t skipped = config_.keep_class_token ? 0 : class_rows();
  const int64_t kept = rows_per_tile() - skipped;
  for (size_t i = 0; i < selected_.size(); ++i) {
    if (selected_[i] != state) continue;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      copy_columns(features.slice(tile * kept, kept), static_cast<int64_t>(i) * config_.hidden,
                   x_.view().slice(tile * rows_per_tile() + skipped, kept), stream);
    }
  }
}

void Vit::encode_piece(std::span<const ConstTensorView> tiles, TensorView features, Stream& stream,
                       const VisionTap& tap) {
  const size_t total = layers_.size() + 1;  // the patches are the first
  const int64_t count = std::ssize(tiles);
  reserve(count);
  report_progress(stream.watch(), "vision", 0, total);
  embed(tiles, stream, tap);
  select(0, count, features, stream);
  for (size_t i = 0; i < layers_.size(); ++i) {
    report_progress(stream.watch(), "vision", i + 1, total);
    run(layers_[i], count, stream);
    if (tap) tap(fmt::format("vision.layer.{}", i), used(x_, count));
    select(static_cast<int>(i) + 1, count, features, stream);
  }
  if (tap) tap("vision.selected", features);
  report_progress(stream.watch(), "vision", total, total);
}

void Vit::check(const VisualPatches& picture) const {
  const int grid = config_.image_size / config_.patch_size;
  for (const PatchGrid& found : picture.grids) {
    if (found == PatchGrid{1, grid, grid}) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the vision tower takes tiles of {} x {} patches, found {} slices of "
                            "{} x {}; preprocessor_config.json and config.json do not belong "
                            "together",
                            grid, grid, found.slices, found.rows, found.columns));
  }
  const Shape expected{std::ssize(picture.grids) * patches_, patch_.weight.shape()[1]};
  if (picture.rows.shape() == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the vision tower takes {} tiles as patches of shape {}, found {}",
                          picture.grids.size(), expected.str(), picture.rows.shape().str()));
}

Tensor Vit::encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                   const VisionTap& tap) {
  std::vector<ConstTensorView> tiles;
  for (const VisualPatches* picture : pictures) {
    check(*picture);
    for (int64_t i = 0; i < std::ssize(picture->grids); ++i) {
      tiles.push_back(picture->rows.view().slice(i * patches_, patches_));
    }
  }
  const int64_t kept = patches_ + (config_.keep_class_token ? class_rows() : 0);
  Tensor features(DType::kF32, {std::ssize(tiles) * kept, width()}, device_);
  const size_t most = std::max<size_t>(1, workspace_bytes_ / bytes_per_tile());
  const size_t pieces = (tiles.size() + most - 1) / most;
  for (size_t piece = 0; piece < pieces; ++piece) {
    PieceWatch watch(stream.watch(), piece, pieces);
    const WatchScope scope(stream, &watch);
    const size_t first = piece * most;
    const size_t count = std::min(most, tiles.size() - first);
    encode_piece(std::span(tiles).subspan(first, count),
                 features.view().slice(static_cast<int64_t>(first) * kept,
                                       static_cast<int64_t>(count) * kept),
                 stream, tap);
  }
  return features;
}

}  // namespace

std::unique_ptr<VisionEncoder> make_vit(const VitConfig& config, const VitNames& names,
                                        WeightMap& weights, const std::string& prefix,
                                        size_t workspace_bytes) {
  return std::make_unique<Vit>(config, names, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
