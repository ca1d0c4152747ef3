#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"
#include "vision/normalization.h"
#include "vision/patch_order.h"

namespace kvlm {

/// How pictures become the rows that a tower's first product takes.
struct PatchLayout {
  int patch = 14;  ///< side of a patch, pixels
  int merge = 1;   ///< rows go block by block of merge x merge patches; 1: raster order
  int depth = 1;   ///< frames a patch is deep
};

/// What a tower takes of a picture or clip: its patches, cut, on the host. They stay bytes until a
/// tower takes them, so that what waits and what is uploaded is a quarter of what floats would be.
struct VisualPatches {
  Tensor rows;                   ///< (patches, columns) u8, see write_patches(); or f32
  std::vector<PatchGrid> grids;  ///< of its tiles, or of the whole; their patches follow each other
  Tensor values{};               ///< (3, 256) f32: what bytes are to the tower; empty for f32 rows
};

/// The patches of `frames` pictures of a size; pixels right of and below the last whole patch are
/// left out. Throws as patch_grid(), and as patch_places() where `merge` does not divide the grid.
PatchGrid patches_of(int frames, int height, int width, const PatchLayout& layout);

/// Cuts pictures to patch rows.
///
///   frames  one size, in order; the last is repeated until `depth` divides them, so a still
///           picture fills every frame of its patches
///   rows    (patches, 3 * depth * patch * patch) u8 on the CPU, in the order of patch_places();
///           columns (channel, frame, dy, dx)
///
/// Throws Error{kInvalidArgument} for frames of different sizes, naming the two, and rows of
/// another shape; and as patches_of(). Source: transformers, Qwen2VLImageProcessor.patchify and
/// Qwen2VLVideoProcessor.patchify; with merge and depth 1, a convolution of stride `patch` written
/// as a product.
void write_patches(TensorView rows, std::span<const Image> frames, const PatchLayout& layout);

/// The patches of frames as those of one picture or clip. Throws as write_patches().
VisualPatches cut_frames(std::span<const Image> frames, const PatchLayout& layout,
                         const NormalizationTable& table);

/// The patches of every tile, each a grid of its own. `layout.depth` is 1. Throws as
/// write_patches().
VisualPatches cut_tiles(std::span<const Image> tiles, const PatchLayout& layout,
                        const NormalizationTable& table);

/// Rows [first, first + to.shape()[0]) of the patches as the tower's first product takes them, on
/// the stream's device; columns of `to` beyond theirs become zero. Asynchronous on CUDA.
void place_patches(TensorView to, const VisualPatches& patches, int64_t first, Stream& stream);

/// What the patches are to the tower, (patches, columns) f32 on the CPU.
Tensor patch_values(const VisualPatches& patches);

}  // namespace kvlm
