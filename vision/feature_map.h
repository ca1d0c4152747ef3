#pragma once

#include "kernels/blend_rows.h"
#include "vision/tiling.h"

namespace kvlm {

/// A feature map of rows x columns, row-major, made to_rows x to_columns as torch's bilinear
/// interpolate() does without antialias. Four terms. OneVision makes 14 x 14 of 27 x 27 for a frame
/// of a clip. Throws as interpolation_axis().
RowBlend resample_map(int rows, int columns, int to_rows, int to_columns);

/// From the features of anyres tiles to the visual tokens of the picture: the first tile, then the
/// map of the others without its black rim, made smaller where the layout says so, and the newline
/// after each of its rows. layout.tokens() rows of one term, or of four if the map is made smaller.
///
/// The features are those of layout.tiles() tiles, tile_patches^2 rows each, one after another, and
/// behind them one row more: the newline.
///
/// Throws Error{kInvalidArgument} if there are 2^31 features or more.
/// Source: transformers, LlavaNextModel and LlavaOnevisionModel, pack_image_features.
RowBlend pack_anyres(const AnyresLayout& layout);

}  // namespace kvlm
