#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/families/qwen_vl/config.h"
#include "runtime/families/qwen_vl/files.h"
#include "runtime/model.h"
#include "vision/normalization.h"
#include "vision/patches.h"

namespace kvlm {

/// Pictures and clips to patches, as the image and the video processor of a Qwen-VL checkpoint do
/// it.
class QwenVlProcessor {
 public:
  QwenVlProcessor(const QwenVlConfig& config, QwenVlFiles files);

  /// Of a picture, of a clip's frames taken, after they are resized. Throw Error{kInvalidArgument}
  /// naming what cannot be.
  PatchGrid grid(const PictureShape& picture) const;
  PatchGrid grid(const Clip& clip) const;
  VisualPatches cut(const Image& picture) const;
  VisualPatches cut(const DecodedClip& clip) const;
  /// A frame of a clip, resized.
  Image fit(const Clip& clip, const Image& frame) const;

  std::vector<int64_t> sample_frames(const VideoInfo& info, const SamplingRequest& request) const;

 private:
  std::array<int, 2> size(const PictureShape& picture) const;
  std::array<int, 2> size(const Clip& clip) const;
  VisualPatches cut(std::span<const Image> frames, const NormalizationTable& table) const;

  bool whole_clips_;  ///< a clip's budget is that of all its frames (Qwen3-VL)
  int token_side_;
  PatchLayout layout_;
  QwenVlFiles files_;
  NormalizationTable picture_table_;
  NormalizationTable frame_table_;
};

}  // namespace kvlm
