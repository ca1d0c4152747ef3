#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/model.h"

namespace kvlm {

/// A video whose frames a model, which must outlive this, has chosen. None is decoded: what a
/// prompt needs room for follows from `clip` alone.
struct OpenClip {
  std::unique_ptr<VideoFile> file;
  Clip clip;
  const Model* model;

  /// The frames, each resized by Model::fit_frame() as it is decoded; the warnings of the frames
  /// are among the clip's. Throws as VideoFile::decode(), and Error{kOutOfMemory} for more than
  /// kMaxRequestPixels in all.
  DecodedClip decode() const;
  /// Lets go of what decode() does not need, until it is called.
  void rest() { file->rest(clip.frames); }
};

/// Throws as Model::sample_frames(): also for a model that takes no videos.
OpenClip choose_frames(const Model& model, std::unique_ptr<VideoFile> file,
                       const SamplingRequest& request);

/// What of the files of a request is not in its pixels: Image::warnings and VideoInfo::warnings.
std::vector<std::string> warnings_of(std::span<const Image> images,
                                     std::span<const DecodedClip> clips);

/// The frames of a video that a model takes: open_video(), choose_frames(), decode().
DecodedClip load_clip(const Model& model, const std::filesystem::path& path,
                      const SamplingRequest& request = {});

}  // namespace kvlm
