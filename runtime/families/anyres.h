#pragma once

#include <array>
#include <vector>

#include "runtime/loading/config.h"
#include "runtime/model.h"
#include "vision/normalization.h"
#include "vision/preprocess.h"
#include "vision/tiling.h"

namespace kvlm {

/// Canvases {height, width}.
using Pinpoints = std::vector<std::array<int, 2>>;

/// image_grid_pinpoints of the image processor, in its order, or `absent`. The model's
/// configuration must have the same ones. Throws Error{kCorruptFile} naming the files if it has
/// others, and for canvases that are not made of whole tiles.
Pinpoints read_pinpoints(const ConfigReader& config, const ConfigReader& processor, int tile,
                         const Pinpoints& absent);

/// How LLaVA-NeXT and LLaVA-OneVision see a picture: all of it as one tile, then the tiles of a
/// canvas, whose features lose the canvas's black rim and get a newline behind every row.
class AnyresPictures {
 public:
  /// `spec` says how tiles of tiling.tile pixels are resized and normalised; patches of `patch`
  /// pixels.
  AnyresPictures(const PreprocessSpec& spec, AnyresTiling tiling, int patch);

  /// Rows of a picture of that shape.
  int64_t rows(const PictureShape& shape) const;
  /// Throws Error{kInvalidArgument} and Error{kOutOfMemory} naming the picture.
  VisualInput prepare(const Image& image) const;

 private:
  AnyresLayout layout(int height, int width) const;

  PreprocessSpec spec_;
  NormalizationTable normalization_;
  AnyresTiling tiling_;
  PatchLayout patches_;
};

}  // namespace kvlm
