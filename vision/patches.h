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

/// What a tower takes of a picture or clip: its patches, cut and normalised, on the host.
struct VisualPatches {
  Tensor rows;                   ///< (patches, columns) f32, see write_patches()
  std::vector<PatchGrid> grids;  ///< of its tiles, or of the whole; their patches follow each other
};

/// The patches of `frames` pictures of a size; pixels right of and below the last whole patch are
/// left out. Throws as patch_grid(), and as patch_places() where `merge` does not divide the grid.
PatchGrid patches_of(int frames, int height, int width, const PatchLayout& layout);

/// Normalises bytes and cuts them to patch rows in one go, with the values of the table.
///
///   frames  one size, in order; the last is repeated until `depth` divides them, so a still
///           picture fills every frame of its patches
///   rows    (patches, 3 * depth * patch * patch) f32 on the CPU, in the order of patch_places();
///           columns (channel, frame, dy, dx)
///
/// Throws Error{kInvalidArgument} for frames of different sizes, naming the two, and rows of
/// another shape; and as patches_of(). Source: transformers, Qwen2VLImageProcessor.patchify and
/// Qwen2VLVideoProcessor.patchify; with merge and depth 1, a convolution of stride `patch` written
/// as a product.
void write_patches(TensorView rows, std::span<const Image> frames, const PatchLayout& layout,
                   const NormalizationTable& table);

/// The patches of every tile, each a grid of its own. `layout.depth` is 1. Throws as
/// write_patches().
VisualPatches cut_tiles(std::span<const Image> tiles, const PatchLayout& layout,
                        const NormalizationTable& table);

}  // namespace kvlm
