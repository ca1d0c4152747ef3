#include "runtime/families/qwen_vl/processor.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

/// What `make` gives, its errors naming the picture or clip.
template <class Make>
auto naming(const std::string& name, const Make& make) {
  try {
    return make();
  } catch (const Error& error) {
    if (name.empty()) throw;
    throw Error(error.code(), fmt::format("{}: {}", name, error.what()));
  }
}

Image resized(const Image& image, PreprocessSpec spec, const std::array<int, 2>& size) {
  spec.resize_height = size[0];
  spec.resize_width = size[1];
  return fit(image, spec);
}

}  // namespace

QwenVlProcessor::QwenVlProcessor(const QwenVlConfig& config, QwenVlFiles files)
    : whole_clips_(config.generation == QwenVlGeneration::kQwen3),
      token_side_(config.token_side()),
      layout_{config.vision.patch_size, config.vision.merge, config.vision.depth},
      files_(std::move(files)),
      picture_table_(normalization_table(files_.pictures.spec)),
      frame_table_(normalization_table(files_.frames.spec)) {}

std::array<int, 2> QwenVlProcessor::size(const PictureShape& picture) const {
  return naming(picture.name, [&] {
    return smart_resize(picture.height, picture.width, token_side_, files_.pictures.budget);
  });
}

std::array<int, 2> QwenVlProcessor::size(const Clip& clip) const {
  const auto frames = static_cast<int>(clip.frames.size());
  const QwenVlClips& clips = files_.clips;
  PixelBudget budget = files_.frames.budget;
  return naming(clip.info.name, [&] {
    if (whole_clips_) {
      if (clips.capped) {
        budget = capped_clip_budget(budget, frames, token_side_, clips.max_tokens);
      }
      return smart_resize_clip(frames, clip.info.height, clip.info.width, layout_.depth,
                               token_side_, budget);
    }
    if (clips.capped) {
      budget = capped_frame_budget(budget, frames, layout_.depth, token_side_, clips.max_tokens);
    }
    return smart_resize(clip.info.height, clip.info.width, token_side_, budget);
  });
}

PatchGrid QwenVlProcessor::grid(const PictureShape& picture) const {
  const auto [height, width] = size(picture);
  return patches_of(1, height, width, layout_);
}

PatchGrid QwenVlProcessor::grid(const Clip& clip) const {
  const auto [height, width] = size(clip);
  return naming(clip.info.name, [&] {
    return patches_of(static_cast<int>(clip.frames.size()), height, width, layout_);
  });
}

VisualPatches QwenVlProcessor::cut(std::span<const Image> frames,
                                   const NormalizationTable& table) const {
  return cut_frames(frames, layout_, table);
}

VisualPatches QwenVlProcessor::cut(const Image& picture) const {
  const Image fitted =
      resized(picture, files_.pictures.spec, size({picture.height, picture.width, picture.name}));
  return cut({&fitted, 1}, picture_table_);
}

VisualPatches QwenVlProcessor::cut(const DecodedClip& clip) const {
  const std::array<int, 2> to = size(clip.clip);
  std::vector<Image> frames;
  frames.reserve(clip.frames.size());
  for (const Image& frame : clip.frames) frames.push_back(resized(frame, files_.frames.spec, to));
  return cut(frames, frame_table_);
}

Image QwenVlProcessor::fit(const Clip& clip, const Image& frame) const {
  return resized(frame, files_.frames.spec, size(clip));
}

std::vector<int64_t> QwenVlProcessor::sample_frames(const VideoInfo& info,
                                                    const SamplingRequest& request) const {
  const QwenVlClips& clips = files_.clips;
  if (!clips.samples && !request.fps && !request.frames) return kvlm::sample_frames(info, {});
  return whole_clips_ ? sample_frames_qwen3_vl(info, request, clips.sampling)
                      : sample_frames_qwen2_vl(info, request, clips.sampling);
}

}  // namespace kvlm
