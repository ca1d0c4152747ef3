#pragma once

#include <filesystem>
#include <memory>

#include "runtime/model.h"

namespace kvlm {

/// A video whose frames a model has chosen. None is decoded: what a prompt needs room for follows
/// from `clip` alone.
struct OpenClip {
  std::unique_ptr<VideoFile> file;
  Clip clip;

  /// Throws as VideoFile::read().
  DecodedClip decode() const;
  /// Lets go of what decode() does not need, until it is called.
  void rest() { file->rest(clip.frames); }
};

/// Throws as Model::sample_frames(): also for a model that takes no videos.
OpenClip choose_frames(const Model& model, std::unique_ptr<VideoFile> file,
                       const SamplingRequest& request);

/// The frames of a video that a model takes: open_video(), choose_frames(), decode().
DecodedClip load_clip(const Model& model, const std::filesystem::path& path,
                      const SamplingRequest& request = {});

}  // namespace kvlm
