#include "vision/qwen_vit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/blend_rows.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "vision/blocks.h"
#include "vision/patch_order.h"
#include "vision/position_table.h"

// Qwen's towers over pictures and clips of any size: patches in the order of merge blocks, rotary
// angles by row and column, attention within a frame or, in most layers of Qwen2.5-VL, within
// windows, then a merger that makes one row of merge x merge patches. Pictures go through together,
// as many at a time as the workspace holds.
namespace kvlm {

namespace {

constexpr float kEps = 1e-6f;
constexpr double kTheta = 10000;

/// Cells to the decoder's width.
struct Merger {
  Affine norm;
  bool norm_of_cells = false;  // else of patches
  Affine fc1, fc2;
};

/// What the rows of a piece have in common with no other piece.
struct Places {
  Tensor cos, sin;  // (patches, head_dim / 2)
  Segments slices;
  Segments windows;              // of no rows where there are none
  std::vector<int32_t> patches;  // the order of patches; empty: as they come
  std::vector<int32_t> cells;    // which row of the mergers is cell i; empty: i
};

}  // namespace

class QwenVit::Impl {
 public:
  Impl(const QwenVitConfig& config, WeightMap& weights, const std::string& prefix,
       size_t workspace_bytes);

  size_t weight_bytes() const noexcept { return weight_bytes_; }
  QwenFeatures encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                      const VisionTap& tap);

 private:
  int head_dim() const noexcept { return config_.hidden / config_.heads; }
  int64_t cell() const noexcept { return int64_t{config_.merge} * config_.merge; }
  Merger take_merger(const BlockTaker& taker, const std::string& name, bool norm_of_cells);
  void check(const VisualPatches& picture) const;
  /// How products take patches.
  DType placed_dtype() const noexcept {
    const bool on_cpu = patch_.weight.device().kind == DeviceKind::kCpu;
    return on_cpu ? DType::kF32 : patch_.weight.dtype();
  }
  size_t workspace_of(int64_t patches) const;
  Places places_of(std::span<const PatchGrid> grids, Stream& stream) const;
  /// Encodes pictures into rows of `features`, from `first` on.
  void encode_piece(std::span<const VisualPatches* const> pictures, QwenFeatures& features,
                    int64_t first, Stream& stream, const VisionTap& tap);
  Tensor embed(std::span<const VisualPatches* const> pictures, std::span<const PatchGrid> grids,
               const Places& places, Stream& stream, const VisionTap& tap) const;
  void merge(const Merger& merger, ConstTensorView x, const Places& places, TensorView out,
             Stream& stream) const;

  QwenVitConfig config_;
  size_t workspace_bytes_;
  size_t weight_bytes_ = 0;
  Affine patch_;               // (hidden, 3 * depth * patch * patch), filled up on a GPU
  int64_t columns_ = 0;        // 3 * depth * patch * patch
  ConstTensorView positions_;  // (side * side, hidden) f32, or empty
  Blocks blocks_;
  Merger merger_;
  std::vector<Merger> deepstack_;  // as config_.deepstack
  std::vector<std::shared_ptr<const void>> owners_;
};

Merger QwenVit::Impl::take_merger(const BlockTaker& taker, const std::string& name,
                                  bool norm_of_cells) {
  const int wide = config_.hidden * static_cast<int>(cell());
  const bool renamed = config_.linear_names;
  Merger merger;
  merger.norm_of_cells = norm_of_cells;
  merger.norm =
      taker.norm(name + (renamed ? ".norm" : ".ln_q"), norm_of_cells ? wide : config_.hidden);
  merger.fc1 = taker.product(name + (renamed ? ".linear_fc1" : ".mlp.0"), wide, wide);
  merger.fc2 = taker.product(name + (renamed ? ".linear_fc2" : ".mlp.2"), config_.out, wide);
  for (const Affine* affine : {&merger.norm, &merger.fc1, &merger.fc2}) {
    weight_bytes_ += kvlm::weight_bytes(*affine);
  }
  return merger;
}

QwenVit::Impl::Impl(const QwenVitConfig& config, WeightMap& weights, const std::string& prefix,
                    size_t workspace_bytes)
    : config_(config), workspace_bytes_(workspace_bytes) {
  if (config.hidden % config.heads != 0 || head_dim() % 4 != 0) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("config.json: a vision tower of {} channels has {} heads; expected "
                            "heads of a multiple of 4 channels, for angles of two axes",
                            config.hidden, config.heads));
  }
  BlockShape shape;
  shape.hidden = config.hidden;
  shape.heads = config.heads;
  shape.intermediate = config.intermediate;
  shape.eps = kEps;
  shape.rms_norm = config.rms_norm;
  shape.activation = config.activation;
  shape.gated_mlp = config.gated_mlp;
  const BlockTaker taker(shape, weights);

  const int hidden = config.hidden;
  columns_ = int64_t{3} * config.depth * config.patch_size * config.patch_size;
  patch_ = taker.patches(prefix + "patch_embed.proj", {hidden, columns_}, config.patch_bias);
  weight_bytes_ += kvlm::weight_bytes(patch_);
  if (config.position_side > 0) {
    positions_ = weights.take_f32(prefix + "pos_embed.weight",
                                  {int64_t{config.position_side} * config.position_side, hidden});
    weight_bytes_ += positions_.bytes();
  }
  const std::string_view up = config.gated_mlp      ? "mlp.up_proj"
                              : config.linear_names ? "mlp.linear_fc1"
                                                    : "mlp.fc1";
  const std::string_view down = config.gated_mlp      ? "mlp.down_proj"
                                : config.linear_names ? "mlp.linear_fc2"
                                                      : "mlp.fc2";
  std::vector<BlockWeights> blocks;
  for (int i = 0; i < config.layers; ++i) {
    const std::string name = fmt::format("{}blocks.{}.", prefix, i);
    BlockWeights block;
    block.norm1 = taker.norm(name + "norm1");
    block.norm2 = taker.norm(name + "norm2");
    taker.take_qkv(block, name + "attn.qkv", /*bias=*/true);
    block.out = taker.product(name + "attn.proj", hidden, hidden);
    taker.take_mlp(block, config.gated_mlp ? name + "mlp.gate_proj" : std::string(),
                   name + std::string(up), name + std::string(down));
    weight_bytes_ += kvlm::weight_bytes(block);
    blocks.push_back(block);
  }
  blocks_ = Blocks(shape, weights.device(), std::move(blocks));
  merger_ = take_merger(taker, prefix + "merger", false);
  for (size_t i = 0; i < config.deepstack.size(); ++i) {
    deepstack_.push_back(
        take_merger(taker, fmt::format("{}deepstack_merger_list.{}", prefix, i), true));
  }
  owners_ = weights.owners();
}

void QwenVit::Impl::check(const VisualPatches& picture) const {
  int64_t patches = 0;
  for (const PatchGrid& grid : picture.grids) {
    check_merge(grid, config_.merge);
    patches += grid.patches();
  }
  const Shape expected{patches, columns_};
  if (picture.rows.shape() == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the vision tower takes the patches of an image as {}, found {}; "
                          "preprocessor_config.json and config.json do not belong together",
                          expected.str(), picture.rows.shape().str()));
}

size_t QwenVit::Impl::workspace_of(int64_t patches) const {
  const auto hidden = static_cast<size_t>(config_.hidden);
  const size_t placed = static_cast<size_t>(patch_.weight.shape()[1]) * dtype_bytes(placed_dtype());
  return static_cast<size_t>(patches) *
         (2 * sizeof(float) * hidden + placed + blocks_.bytes_per_row());
}

Places QwenVit::Impl::places_of(std::span<const PatchGrid> grids, Stream& stream) const {
  Places places;
  places.slices.assign(slice_bounds(grids), stream);
  std::vector<std::array<int32_t, 2>> at;
  for (const PatchGrid& grid : grids) {
    const auto of_grid = patch_places(grid, config_.merge);
    at.insert(at.end(), of_grid.begin(), of_grid.end());
  }
  if (config_.window > 0) {
    const WindowOrder order = window_order(grids, config_.merge, config_.window);
    places.windows.assign(order.bounds, stream);
    places.cells = inverse_order(order.cells);
    for (const int32_t from : order.cells) {
      for (int32_t i = 0; i < cell(); ++i) {
        places.patches.push_back(from * static_cast<int32_t>(cell()) + i);
      }
    }
    std::vector<std::array<int32_t, 2>> moved;
    for (const int32_t patch : places.patches) moved.push_back(at[static_cast<size_t>(patch)]);
    at = std::move(moved);
  }
  const int half = head_dim() / 2;
  const int quarter = half / 2;
  Tensor cos(DType::kF32, {std::ssize(at), half});
  Tensor sin(DType::kF32, {std::ssize(at), half});
  for (int i = 0; i < quarter; ++i) {
    const auto exponent = static_cast<float>(2 * i) / static_cast<float>(half);
    const float inverse =
        1.0f / static_cast<float>(std::pow(kTheta, static_cast<double>(exponent)));
    for (size_t row = 0; row < at.size(); ++row) {
      for (size_t axis = 0; axis < 2; ++axis) {
        const float angle = static_cast<float>(at[row][axis]) * inverse;
        const auto place =
            static_cast<int64_t>(row) * half + static_cast<int64_t>(axis) * quarter + i;
        cos.as<float>()[place] = std::cos(angle);
        sin.as<float>()[place] = std::sin(angle);
      }
    }
  }
  if (stream.device().kind == DeviceKind::kCpu) {
    places.cos = std::move(cos);
    places.sin = std::move(sin);
    return places;
  }
  places.cos = Tensor(DType::kF32, cos.shape(), stream.device());
  places.sin = Tensor(DType::kF32, sin.shape(), stream.device());
  copy(places.cos, cos, stream);
  copy(places.sin, sin, stream);
  return places;
}

Tensor QwenVit::Impl::embed(std::span<const VisualPatches* const> pictures,
                            std::span<const PatchGrid> grids, const Places& places, Stream& stream,
                            const VisionTap& tap) const {
  const Device device = stream.device();
  Tensor x(DType::kF32, {places.cos.shape()[0], config_.hidden}, device);
  Tensor placed(placed_dtype(), {x.shape()[0], patch_.weight.shape()[1]}, device);
  int64_t row = 0;
  for (const VisualPatches* picture : pictures) {
    const int64_t patches = picture->rows.shape()[0];
    place_patches(placed.view().slice(row, patches), *picture, 0, stream);
    if (device.kind == DeviceKind::kCpu) {  // the bits of a product may depend on its rows
      linear(x.view().slice(row, patches), placed.view().slice(row, patches), patch_.weight,
             patch_.bias, false, stream);
    }
    row += patches;
  }
  if (device.kind != DeviceKind::kCpu) {
    linear(x, placed, patch_.weight, patch_.bias, false, stream);
  }
  if (tap) tap("vision.patch_embed", x);
  if (!positions_.empty()) {
    Tensor learned(DType::kF32, x.shape(), device);
    row = 0;
    for (const PatchGrid& grid : grids) {
      blend_rows(learned.view().slice(row, grid.patches()), positions_,
                 learned_positions(config_.position_side, grid, config_.merge), stream);
      row += grid.patches();
    }
    add(x, learned, stream);
    if (tap) tap("vision.embeddings", x);
  }
  if (places.patches.empty()) return x;
  Tensor moved(DType::kF32, x.shape(), device);
  gather_rows(moved, x, places.patches, stream);
  return moved;
}

void QwenVit::Impl::merge(const Merger& merger, ConstTensorView x, const Places& places,
                          TensorView out, Stream& stream) const {
  const int64_t cells = x.shape()[0] / cell();
  const int64_t wide = config_.hidden * cell();
  const Device device = stream.device();
  Tensor normed(blocks_.dtype(), {cells, wide}, device);
  if (merger.norm_of_cells) {
    blocks_.norm(normed, x.reshape({cells, wide}), merger.norm, stream);
  } else {
    blocks_.norm(normed.view().reshape(x.shape()), x, merger.norm, stream);
  }
  Tensor inner(blocks_.dtype(), {cells, wide}, device);
  linear(inner, normed, merger.fc1.weight,
         LinearTail{.bias = merger.fc1.bias, .activation = Activation::kGelu}, stream);
  if (places.cells.empty()) {
    return linear(out, inner, merger.fc2.weight, merger.fc2.bias, false, stream);
  }
  Tensor merged(DType::kF32, out.shape(), device);
  linear(merged, inner, merger.fc2.weight, merger.fc2.bias, false, stream);
  gather_rows(out, merged, places.cells, stream);
}

void QwenVit::Impl::encode_piece(std::span<const VisualPatches* const> pictures,
                                 QwenFeatures& features, int64_t first, Stream& stream,
                                 const VisionTap& tap) {
  std::vector<PatchGrid> grids;
  for (const VisualPatches* picture : pictures) {
    grids.insert(grids.end(), picture->grids.begin(), picture->grids.end());
  }
  const size_t total = blocks_.size() + 1;  // the patches are the first
  report_progress(stream.watch(), "vision", 0, total);
  const Places places = places_of(grids, stream);
  Tensor x = embed(pictures, grids, places, stream, tap);
  const BlockAngles angles{places.cos, places.sin};
  const int64_t cells = x.shape()[0] / cell();
  for (int i = 0; i < config_.layers; ++i) {
    report_progress(stream.watch(), "vision", static_cast<size_t>(i) + 1, total);
    const bool windows = config_.window > 0 &&
                         std::find(config_.full_attention.begin(), config_.full_attention.end(),
                                   i) == config_.full_attention.end();
    blocks_.run(static_cast<size_t>(i), x, windows ? places.windows : places.slices, angles,
                stream);
    const bool taken = std::ranges::find(config_.deepstack, i) != config_.deepstack.end();
    if (tap || taken || i + 1 == config_.layers) blocks_.settle(x, stream);
    if (tap) tap(fmt::format("vision.layer.{}", i), x);
    for (size_t j = 0; j < deepstack_.size(); ++j) {
      if (config_.deepstack[j] != i) continue;
      merge(deepstack_[j], x, places, features.deepstack[j].view().slice(first, cells), stream);
    }
  }
  if (tap) tap("vision.selected", x);
  merge(merger_, x, places, features.rows.view().slice(first, cells), stream);
  report_progress(stream.watch(), "vision", total, total);
}

QwenFeatures QwenVit::Impl::encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                                   const VisionTap& tap) {
  int64_t cells = 0;
  for (const VisualPatches* picture : pictures) {
    check(*picture);
    cells += picture->rows.shape()[0] / cell();
  }
  QwenFeatures features;
  features.rows = Tensor(DType::kF32, {cells, config_.out}, stream.device());
  for (size_t i = 0; i < deepstack_.size(); ++i) {
    features.deepstack.emplace_back(DType::kF32, Shape{cells, config_.out}, stream.device());
  }
  int64_t row = 0;
  for (size_t first = 0; first < pictures.size();) {
    int64_t patches = pictures[first]->rows.shape()[0];
    size_t end = first + 1;
    while (end < pictures.size() &&
           workspace_of(patches + pictures[end]->rows.shape()[0]) <= workspace_bytes_) {
      patches += pictures[end++]->rows.shape()[0];
    }
    PieceWatch piece(stream.watch(), first, pictures.size());
    const WatchScope scope(stream, &piece);
    encode_piece(pictures.subspan(first, end - first), features, row, stream, tap);
    row += patches / cell();
    first = end;
  }
  return features;
}

QwenVit::QwenVit(const QwenVitConfig& config, WeightMap& weights, const std::string& prefix,
                 size_t workspace_bytes)
    : impl_(std::make_unique<Impl>(config, weights, prefix, workspace_bytes)) {}

QwenVit::~QwenVit() = default;

size_t QwenVit::weight_bytes() const noexcept { return impl_->weight_bytes(); }

QwenFeatures QwenVit::encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                             const VisionTap& tap) {
  return impl_->encode(pictures, stream, tap);
}

}  // namespace kvlm
