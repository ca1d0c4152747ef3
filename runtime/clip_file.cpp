#include "runtime/clip_file.h"

#include <utility>

namespace kvlm {

DecodedClip OpenClip::decode() const { return {clip, file->read(clip.frames).frames}; }

OpenClip choose_frames(const Model& model, std::unique_ptr<VideoFile> file,
                       const SamplingRequest& request) {
  Clip clip{file->info(), model.sample_frames(file->info(), request)};
  return {std::move(file), std::move(clip)};
}

DecodedClip load_clip(const Model& model, const std::filesystem::path& path,
                      const SamplingRequest& request) {
  return choose_frames(model, open_video(path), request).decode();
}

}  // namespace kvlm
