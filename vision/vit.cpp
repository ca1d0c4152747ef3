#include "vision/vit.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/tile_rows.h"
#include "vision/blocks.h"

// A vision transformer over tiles of one size: patches are multiplied, positions added, blocks run
// (blocks.h), and the states of the chosen layers are joined. Tiles of all pictures go through
// together, as many at a time as the workspace holds.
namespace kvlm {

namespace {

/// Tile `tile` of a picture.
struct PictureTile {
  const VisualPatches* picture;
  int64_t tile;
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
  using VisionEncoder::encode;
  Tensor encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                const VisionTap& tap, Tensor space) override;

 private:
  void check(const VisualPatches& picture) const;
  /// Makes room for this many tiles.
  void reserve(int64_t tiles, Stream& stream);
  size_t bytes_per_tile() const;
  /// Encodes tiles into `features` of all pictures, from row `first` on.
  void encode_piece(std::span<const PictureTile> tiles, Tensor& features, const Shape& shape,
                    int64_t first, Stream& stream, const VisionTap& tap);
  /// Patches of `tiles` in the format of products.
  TensorView place(std::span<const PictureTile> tiles, Stream& stream);
  void embed(std::span<const PictureTile> tiles, Stream& stream, const VisionTap& tap);
  bool selects(int state) const { return std::ranges::find(selected_, state) != selected_.end(); }
  /// Copies hidden state `state` into its columns of `features`, where it is one of the selected.
  void select(int state, int64_t tiles, TensorView features, Stream& stream);
  DType placed_dtype() const noexcept {
    return device_.kind == DeviceKind::kCpu ? DType::kF32 : patch_.weight.dtype();
  }
  int64_t class_rows() const noexcept { return config_.class_token ? 1 : 0; }
  int64_t rows_per_tile() const noexcept { return patches_ + class_rows(); }
  /// Of a tile's rows, those that are features.
  int64_t kept_rows() const noexcept {
    return patches_ + (config_.keep_class_token ? class_rows() : 0);
  }
  TensorView used(Tensor& tensor, int64_t tiles) const {
    return tensor.view().slice(0, tiles * rows_per_tile());
  }

  VitConfig config_;
  size_t workspace_bytes_;     // at most, if one tile does not need more
  int64_t patches_;            // of a tile
  std::vector<int> selected_;  // hidden states to return, 0-based, in order
  std::vector<std::shared_ptr<const void>> owners_;
  size_t weight_bytes_ = 0;
  Affine patch_;                     // (hidden, 3 * patch * patch), filled up on a GPU
  int64_t columns_ = 0;              // 3 * patch * patch
  ConstTensorView class_embedding_;  // (1, hidden) f32, or empty
  ConstTensorView positions_;        // (rows of a tile, hidden) f32
  Affine pre_norm_;
  Affine final_norm_;
  Blocks blocks_;
  Device device_;

  // Rows of a tile: its class token, then its patches.
  int64_t reserved_ = 0;            // tiles
  Tensor placed_;                   // (tiles * patches, columns of patch_) as products take them
  Tensor x_;                        // (tiles * rows_per_tile(), hidden)
  std::vector<Segments> segments_;  // those of i + 1 tiles
};

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

  BlockShape shape;
  shape.hidden = config.hidden;
  shape.heads = config.heads;
  shape.intermediate = config.intermediate;
  shape.eps = config.eps;
  shape.rms_norm = config.norm == VitConfig::Norm::kRms;
  shape.activation = config.activation;
  const BlockTaker taker(shape, weights);

  const int hidden = config.hidden;
  const auto named = [&](std::string_view name) { return prefix + std::string(name); };
  columns_ = int64_t{3} * config.patch_size * config.patch_size;
  patch_ = taker.patches(named(names.patch), {hidden, 3, config.patch_size, config.patch_size},
                         config.patch_bias);
  // Some files keep tables as batches of one.
  const auto table = [&](std::string_view name, Shape wanted, int rank) {
    const Shape stored = rank == 1   ? Shape{wanted[1]}
                         : rank == 3 ? Shape{1, wanted[0], wanted[1]}
                                     : wanted;
    return weights.take_f32(named(name), stored).reshape(wanted);
  };
  if (config.class_token) {
    class_embedding_ = table(names.class_token, {1, hidden}, names.batched_tables ? 3 : 1);
  }
  positions_ = table(names.positions, {rows_per_tile(), hidden}, names.batched_tables ? 3 : 2);
  if (config.pre_norm) pre_norm_ = taker.norm(named(names.pre_norm));
  std::vector<BlockWeights> blocks;
  for (int i = 0; i < needed; ++i) {
    const auto in_layer = [&](std::string_view name) {
      return fmt::format("{}{}.{}.{}", prefix, names.layer, i, name);
    };
    BlockWeights block;
    block.norm1 = taker.norm(in_layer(names.norm1));
    block.norm2 = taker.norm(in_layer(names.norm2));
    taker.take_qkv(block, in_layer(names.q), in_layer(names.k), in_layer(names.v), config.qkv_bias);
    block.out = taker.product(in_layer(names.out), hidden, hidden);
    taker.take_mlp(block, {}, in_layer(names.fc1), in_layer(names.fc2));
    if (config.qk_norm) {
      block.q_norm = taker.vector(in_layer(names.q_norm) + ".weight", hidden);
      block.k_norm = taker.vector(in_layer(names.k_norm) + ".weight", hidden);
    }
    if (config.layer_scale) {
      block.scale1 = taker.vector(in_layer(names.scale1), hidden);
      block.scale2 = taker.vector(in_layer(names.scale2), hidden);
    }
    weight_bytes_ += kvlm::weight_bytes(block);
    blocks.push_back(block);
  }
  if (config.final_norm) final_norm_ = taker.norm(named(names.final_norm));
  weight_bytes_ += kvlm::weight_bytes(patch_) + kvlm::weight_bytes(pre_norm_) +
                   kvlm::weight_bytes(final_norm_) + class_embedding_.bytes() + positions_.bytes();
  owners_ = weights.owners();
  device_ = weights.device();
  blocks_ = Blocks(shape, device_, std::move(blocks));
}

size_t Vit::bytes_per_tile() const {
  const auto hidden = static_cast<size_t>(config_.hidden);
  return (sizeof(float) * hidden + blocks_.bytes_per_row()) * static_cast<size_t>(rows_per_tile()) +
         static_cast<size_t>(patches_ * patch_.weight.shape()[1]) * dtype_bytes(placed_dtype());
}

void Vit::reserve(int64_t tiles, Stream& stream) {
  while (std::ssize(segments_) < tiles) {
    std::vector<int32_t> bounds;
    for (int64_t i = 0; i <= std::ssize(segments_) + 1; ++i) {
      bounds.push_back(static_cast<int32_t>(i * rows_per_tile()));
    }
    segments_.emplace_back(bounds, stream);
  }
  if (tiles <= reserved_) return;
  reserved_ = 0;  // as long as there may be no memory for more
  x_ = Tensor(DType::kF32, {tiles * rows_per_tile(), config_.hidden}, device_);
  placed_ = Tensor(placed_dtype(), {tiles * patches_, patch_.weight.shape()[1]}, device_);
  reserved_ = tiles;
}

TensorView Vit::place(std::span<const PictureTile> tiles, Stream& stream) {
  const TensorView placed = placed_.view().slice(0, std::ssize(tiles) * patches_);
  // A picture's tiles lie one behind the other: the fewer uploads, the fewer waits between them.
  for (size_t first = 0, next = 1; first < tiles.size(); first = next++) {
    while (next < tiles.size() && tiles[next].picture == tiles[first].picture &&
           tiles[next].tile == tiles[next - 1].tile + 1) {
      ++next;
    }
    place_patches(placed.slice(static_cast<int64_t>(first) * patches_,
                               static_cast<int64_t>(next - first) * patches_),
                  *tiles[first].picture, tiles[first].tile * patches_, stream);
  }
  return placed;
}

void Vit::embed(std::span<const PictureTile> tiles, Stream& stream, const VisionTap& tap) {
  const int64_t count = std::ssize(tiles);
  const TensorView x = used(x_, count);
  const TensorView placed = place(tiles, stream);
  const TensorView products = blocks_.workspace({count * patches_, config_.hidden});
  // On the CPU the bits of a product may depend on its rows.
  const int64_t rows = device_.kind == DeviceKind::kCpu ? patches_ : count * patches_;
  for (int64_t row = 0; row < count * patches_; row += rows) {
    linear(products.slice(row, rows), placed.slice(row, rows), patch_.weight, patch_.bias, false,
           stream);
  }
  if (tap) tap("vision.patch_embed", products);
  scatter_tiles(x, products, class_embedding_, positions_, stream);
  if (tap) tap("vision.embeddings", x);
  if (!config_.pre_norm) return;
  blocks_.norm(x, x, pre_norm_, stream);
  if (tap) tap("vision.pre_norm", x);
}

void Vit::select(int state, int64_t tiles, TensorView features, Stream& stream) {
  for (size_t i = 0; i < selected_.size(); ++i) {
    if (selected_[i] != state) continue;
    take_tiles(features, static_cast<int64_t>(i) * config_.hidden, used(x_, tiles), rows_per_tile(),
               config_.keep_class_token ? 0 : class_rows(), stream);
  }
}

void Vit::encode_piece(std::span<const PictureTile> tiles, Tensor& features, const Shape& shape,
                       int64_t first, Stream& stream, const VisionTap& tap) {
  const size_t total = blocks_.size() + 1;  // the patches are the first
  const int64_t count = std::ssize(tiles);
  const int64_t rows = count * kept_rows();
  const auto take = [&](int state) {
    if (!selects(state)) return;
    // A GPU is busy meanwhile: memory for them takes a while to be had.
    if (features.empty()) features = Tensor(DType::kF32, shape, device_);
    select(state, count, features.view().slice(first, rows), stream);
  };
  reserve(count, stream);
  report_progress(stream.watch(), "vision", 0, total);
  embed(tiles, stream, tap);
  take(0);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    report_progress(stream.watch(), "vision", i + 1, total);
    blocks_.run(i, used(x_, count), segments_[static_cast<size_t>(count) - 1], {}, stream);
    const int state = static_cast<int>(i) + 1;
    if (selects(state) || tap) blocks_.settle(used(x_, count), stream);
    if (tap) tap(fmt::format("vision.layer.{}", i), used(x_, count));
    if (config_.final_norm && state == config_.layers) {
      blocks_.norm(used(x_, count), used(x_, count), final_norm_, stream);
    }
    take(state);
  }
  if (tap) tap("vision.selected", features.view().slice(first, rows));
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
  const Shape expected{std::ssize(picture.grids) * patches_, columns_};
  if (picture.rows.shape() == expected) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the vision tower takes {} tiles as patches of shape {}, found {}",
                          picture.grids.size(), expected.str(), picture.rows.shape().str()));
}

Tensor Vit::encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                   const VisionTap& tap, Tensor space) {
  std::vector<PictureTile> tiles;
  for (const VisualPatches* picture : pictures) {
    check(*picture);
    for (int64_t i = 0; i < std::ssize(picture->grids); ++i) tiles.push_back({picture, i});
  }
  const int64_t kept = kept_rows();
  const Shape shape{std::ssize(tiles) * kept, width()};
  Tensor features = std::move(space);
  if (features.empty() || features.shape() != shape) features = Tensor();
  const size_t fitting = std::max<size_t>(1, workspace_bytes_ / bytes_per_tile());
  const size_t pieces = (tiles.size() + fitting - 1) / fitting;
  const size_t most = (tiles.size() + pieces - 1) / std::max<size_t>(1, pieces);
  for (size_t piece = 0; piece < pieces; ++piece) {
    PieceWatch watch(stream.watch(), piece, pieces);
    const WatchScope scope(stream, &watch);
    const size_t first = std::min(tiles.size(), piece * most);
    const size_t count = std::min(most, tiles.size() - first);
    if (count == 0) break;
    encode_piece(std::span(tiles).subspan(first, count), features, shape,
                 static_cast<int64_t>(first) * kept, stream, tap);
  }
  if (features.empty()) features = Tensor(DType::kF32, shape, device_);  // of no pictures
  return features;
}

}  // namespace

std::unique_ptr<VisionEncoder> make_vit(const VitConfig& config, const VitNames& names,
                                        WeightMap& weights, const std::string& prefix,
                                        size_t workspace_bytes) {
  return std::make_unique<Vit>(config, names, weights, prefix, workspace_bytes);
}

}  // namespace kvlm
