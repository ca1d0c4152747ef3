#pragma once

#include <cstdint>

#include "runtime/families/qwen_vl/config.h"
#include "runtime/loading/source.h"
#include "vision/frame_sampling.h"
#include "vision/preprocess.h"
#include "vision/smart_resize.h"

namespace kvlm {

/// How the pictures or the frames of a checkpoint are resized and normalised.
struct QwenVlPixels {
  PreprocessSpec spec;  ///< without a size: every picture has its own
  PixelBudget budget;
};

/// What a video processor says beyond that.
struct QwenVlClips {
  bool samples = false;  ///< without a request; else all frames
  QwenSampling sampling;
  bool capped = false;  ///< cap_pixels_per_frame
  int64_t max_tokens = 0;
};

/// The image and the video processor of a Qwen-VL checkpoint.
struct QwenVlFiles {
  QwenVlPixels pictures;
  QwenVlPixels frames;
  QwenVlClips clips;
};

/// Reads what the reference reads: read_image_processor() and read_video_processor(). A budget of
/// `options` replaces that of pictures and, as in the reference, that of a frame of Qwen2-VL and
/// Qwen2.5-VL, not that of a Qwen3-VL clip. Throws Error{kCorruptFile} naming file and field,
/// Error{kUnsupported} for processors that are not built in, Error{kInvalidArgument} for options
/// out of range.
QwenVlFiles read_qwen_vl_files(const ModelSource& source, const QwenVlConfig& config,
                               const LoadOptions& options);

}  // namespace kvlm
