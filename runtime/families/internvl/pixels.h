#pragma once

#include "runtime/families/internvl/config.h"
#include "runtime/loading/source.h"
#include "vision/frame_sampling.h"
#include "vision/preprocess.h"
#include "vision/tiling.h"

namespace kvlm {

/// How an InternVL makes tiles of pictures and of the frames of clips, each of which is one tile.
struct InternVlPixels {
  DynamicTiling tiling;
  PreprocessSpec picture;
  PreprocessSpec frame;
  SamplingRequest sampling;  ///< where the caller has no wish
};

/// What the processors of a checkpoint say (`-hf`). Throws Error{kCorruptFile} for files that do
/// not belong to the model, Error{kUnsupported} for another processor, Error{kInvalidArgument} for
/// a number of tiles that cannot be.
InternVlPixels read_internvl_pixels(const ModelSource& source, const InternVlConfig& model,
                                    const LoadOptions& options);

/// What the original code does to pictures, which knows its numbers by config.json and takes of
/// preprocessor_config.json at most the colours: Pillow's resize, torchvision's ToTensor. Throws as
/// read_internvl_pixels().
InternVlPixels read_internvl_chat_pixels(const ModelSource& source, const DynamicTiling& tiling,
                                         const LoadOptions& options);

}  // namespace kvlm
