#include "vision/clip_vit.h"

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
  ConstTensorView bias;  // (out,) f32
};

struct Layer {
  Affine norm1, norm2;
  Affine q, k, v, out, fc1, fc2;
};

/// Copies each patch to one row, columns in the order (channel, dy, dx), rows in raster order.
void cut_patches(ConstTensorView pixels, int patch, TensorView rows) {
  const int64_t height = pixels.shape()[1];
  const int64_t width = pixels.shape()[2];
  const int64_t grid_rows = height / patch;
  const int64_t grid_columns = width / patch;
  const float* in = pixels.as<float>();
  float* out = rows.as<float>();
  for (int64_t row = 0; row < grid_rows; ++row) {
    for (int64_t column = 0; column < grid_columns; ++column) {
      for (int64_t channel = 0; channel < 3; ++channel) {
        for (int64_t dy = 0; dy < patch; ++dy) {
          const float* line = in + (channel * height + row * patch + dy) * width + column * patch;
          out = std::copy(line, line + patch, out);
        }
      }
    }
  }
}

class ClipVit final : public VisionEncoder {
 public:
  ClipVit(const ClipConfig& config, WeightMap& weights, const std::string& prefix);

  int tokens() const noexcept override { return patches_ + (config_.keep_class_token ? 1 : 0); }
  int width() const noexcept override {
    return config_.hidden * static_cast<int>(selected_.size());
  }
  size_t weight_bytes() const noexcept override { return weight_bytes_; }
  ConstTensorView encode(ConstTensorView pixels, Stream& stream, const VisionTap& tap) override;

 private:
  Affine take(WeightMap& weights, const std::string& name, Shape shape);
  Affine take_norm(WeightMap& weights, const std::string& name);
  void embed(ConstTensorView pixels, Stream& stream, const VisionTap& tap);
  void run(const Layer& layer, Stream& stream);
  /// Copies hidden state `state` into its columns of features_, if it is one of the selected.
  void select(int state, Stream& stream);

  ClipConfig config_;
  int patches_;
  std::vector<int> selected_;  // hidden states to return, 0-based, in order
  std::vector<std::shared_ptr<const void>> owners_;
  size_t weight_bytes_ = 0;
  ConstTensorView patch_weight_;     // (hidden, 3 * patch * patch)
  ConstTensorView class_embedding_;  // (hidden,) f32
  ConstTensorView positions_;        // (patches + 1, hidden) f32
  Affine pre_norm_;
  std::vector<Layer> layers_;

  Tensor patch_rows_;     // (patches, 3 * patch * patch), cut on the host
  Tensor placed_rows_;    // the same on the model's device, where that is another
  Tensor x_, q_, k_, v_;  // (patches + 1, hidden)
  Tensor normed_;         // the same, as products take it
  Tensor inner_;          // (patches + 1, intermediate)
  Tensor activated_;      // the same, where products do not take f32
  Tensor features_;       // (tokens, width)
};

Affine ClipVit::take(WeightMap& weights, const std::string& name, Shape shape) {
  Affine affine{weights.take(name + ".weight", shape),
                weights.take_f32(name + ".bias", {shape[0]})};
  weight_bytes_ += affine.weight.bytes() + affine.bias.bytes();
  return affine;
}

Affine ClipVit::take_norm(WeightMap& weights, const std::string& name) {
  return {weights.take_f32(name + ".weight", {config_.hidden}),
          weights.take_f32(name + ".bias", {config_.hidden})};
}

ClipVit::ClipVit(const ClipConfig& config, WeightMap& weights, const std::string& prefix)
    : config_(config) {
  const int grid = config.image_size / config.patch_size;
  patches_ = grid * grid;
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
  patch_weight_ =
      weights.take(prefix + "embeddings.patch_embedding.weight", {hidden, 3, patch, patch})
          .reshape({hidden, 3 * patch * patch});
  class_embedding_ = weights.take_f32(prefix + "embeddings.class_embedding", {hidden});
  positions_ =
      weights.take_f32(prefix + "embeddings.position_embedding.weight", {patches_ + 1, hidden});
  pre_norm_ = take_norm(weights, prefix + "pre_layrnorm");
  for (int i = 0; i < needed; ++i) {
    const std::string name = fmt::format("{}encoder.layers.{}.", prefix, i);
    Layer layer;
    layer.norm1 = take_norm(weights, name + "layer_norm1");
    layer.norm2 = take_norm(weights, name + "layer_norm2");
    layer.q = take(weights, name + "self_attn.q_proj", {hidden, hidden});
    layer.k = take(weights, name + "self_attn.k_proj", {hidden, hidden});
    layer.v = take(weights, name + "self_attn.v_proj", {hidden, hidden});
    layer.out = take(weights, name + "self_attn.out_proj", {hidden, hidden});
    layer.fc1 = take(weights, name + "mlp.fc1", {config.intermediate, hidden});
    layer.fc2 = take(weights, name + "mlp.fc2", {hidden, config.intermediate});
    layers_.push_back(layer);
  }
  weight_bytes_ += patch_weight_.bytes() + positions_.bytes();
  owners_ = weights.owners();

  const int rows = patches_ + 1;
  const Device device = weights.device();
  patch_rows_ = Tensor(DType::kF32, {patches_, 3 * patch * patch});
  if (device.kind != DeviceKind::kCpu) {
    placed_rows_ = Tensor(DType::kF32, {patches_, 3 * patch * patch}, device);
  }
  for (Tensor* tensor : {&x_, &q_, &k_, &v_}) {
    *tensor = Tensor(DType::kF32, {rows, hidden}, device);
  }
  // The dtype in which all of these products, in all layers, take their rows.
  const auto taken_by = [&](std::initializer_list<const Affine Layer::*> products) {
    if (layers_.empty()) return DType::kF32;
    const Layer& first = layers_[0];
    const DType dtype = operand_dtype({(first.*(*products.begin())).weight}, rows);
    for (const Layer& layer : layers_) {
      for (const Affine Layer::*product : products) {
        if (operand_dtype({(layer.*product).weight}, rows) != dtype) return DType::kF32;
      }
    }
    return dtype;
  };
  normed_ =
      Tensor(taken_by({&Layer::q, &Layer::k, &Layer::v, &Layer::fc1}), {rows, hidden}, device);
  inner_ = Tensor(DType::kF32, {rows, config.intermediate}, device);
  if (const DType dtype = taken_by({&Layer::fc2}); dtype != DType::kF32) {
    activated_ = Tensor(dtype, inner_.shape(), device);
  }
  features_ = Tensor(DType::kF32, {tokens(), width()}, device);
}

void ClipVit::embed(ConstTensorView pixels, Stream& stream, const VisionTap& tap) {
  cut_patches(pixels, config_.patch_size, patch_rows_);
  ConstTensorView rows = patch_rows_;
  if (!placed_rows_.empty()) {
    copy(placed_rows_, patch_rows_, stream);
    rows = placed_rows_;
  }
  const TensorView x = x_.view();
  const TensorView patches = x.slice(1, patches_);
  linear(patches, rows, patch_weight_, {}, false, stream);
  if (tap) tap("vision.patch_embed", patches);
  copy(x.slice(0, 1), class_embedding_.reshape({1, config_.hidden}), stream);
  add(x, positions_, stream);
  if (tap) tap("vision.embeddings", x);
  layer_norm(x, x, pre_norm_.weight, pre_norm_.bias, config_.eps, stream);
  if (tap) tap("vision.pre_norm", x);
}

void ClipVit::run(const Layer& layer, Stream& stream) {
  const int rows = patches_ + 1;
  const int head_dim = config_.hidden / config_.heads;
  const Shape by_head{rows, config_.heads, head_dim};
  layer_norm(normed_, x_, layer.norm1.weight, layer.norm1.bias, config_.eps, stream);
  const LinearPart qkv[] = {{q_, layer.q.weight, layer.q.bias},
                            {k_, layer.k.weight, layer.k.bias},
                            {v_, layer.v.weight, layer.v.bias}};
  linears(qkv, normed_, stream);
  attention(q_.view().reshape(by_head), q_.view().reshape(by_head), k_.view().reshape(by_head),
            v_.view().reshape(by_head), {}, /*causal=*/false,
            1.0f / std::sqrt(static_cast<float>(head_dim)), layer.q.weight.dtype(), stream);
  linear(x_, q_, layer.out.weight, layer.out.bias, /*add=*/true, stream);

  layer_norm(normed_, x_, layer.norm2.weight, layer.norm2.bias, config_.eps, stream);
  linear(inner_, normed_, layer.fc1.weight, layer.fc1.bias, false, stream);
  const TensorView activated = activated_.empty() ? inner_.view() : activated_.view();
  activate(activated, inner_, config_.activation, stream);
  linear(x_, activated, layer.fc2.weight, layer.fc2.bias, /*add=*/true, stream);
}

void ClipVit::select(int state, Stream& stream) {
  const int skipped = config_.keep_class_token ? 0 : 1;
  for (size_t i = 0; i < selected_.size(); ++i) {
    if (selected_[i] != state) continue;
    copy_columns(features_, static_cast<int64_t>(i) * config_.hidden,
                 x_.view().slice(skipped, tokens()), stream);
  }
}

ConstTensorView ClipVit::encode(ConstTensorView pixels, Stream& stream, const VisionTap& tap) {
  const Shape expected{3, config_.image_size, config_.image_size};
  if (pixels.shape() != expected) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the vision tower takes pixel values of shape {}, found {}; "
                            "preprocessor_config.json and config.json do not belong together",
                            expected.str(), pixels.shape().str()));
  }
  const size_t total = layers_.size() + 1;  // the patches are the first
  report_progress(stream.watch(), "vision", 0, total);
  embed(pixels, stream, tap);
  select(0, stream);
  for (size_t i = 0; i < layers_.size(); ++i) {
    report_progress(stream.watch(), "vision", i + 1, total);
    run(layers_[i], stream);
    if (tap) tap(fmt::format("vision.layer.{}", i), x_);
    select(static_cast<int>(i) + 1, stream);
  }
  if (tap) tap("vision.selected", features_);
  report_progress(stream.watch(), "vision", total, total);
  return features_;
}

}  // namespace

std::unique_ptr<VisionEncoder> make_clip_vit(const ClipConfig& config, WeightMap& weights,
                                             const std::string& prefix) {
  return std::make_unique<ClipVit>(config, weights, prefix);
}

}  // namespace kvlm
