#include "runtime/clip_file.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/base/error.h"
#include "runtime/prompt.h"

namespace kvlm {

DecodedClip OpenClip::decode() const {
  DecodedClip decoded{clip, {}};
  std::vector<std::string>& warnings = decoded.clip.info.warnings;
  file->decode(clip.frames, [&](Image frame) {
    for (std::string& warning : frame.warnings) {
      // A frame may be taken several times.
      if (warnings.empty() || warnings.back() != warning) warnings.push_back(std::move(warning));
    }
    frame.warnings.clear();
    decoded.frames.push_back(model->fit_frame(clip, std::move(frame)));
    const Image& fitted = decoded.frames.front();
    const int64_t pixels = int64_t{fitted.height} * fitted.width;
    if (std::ssize(clip.frames) <= kMaxRequestPixels / pixels) return;
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("video {} is {} x {} as the model sees it, and {} such frames exceed "
                            "the limit of {} pixels; take fewer frames, or scale it down first",
                            clip.info.name, fitted.width, fitted.height, clip.frames.size(),
                            kMaxRequestPixels));
  });
  return decoded;
}

std::vector<std::string> warnings_of(std::span<const Image> images,
                                     std::span<const DecodedClip> clips) {
  std::vector<std::string> warnings;
  const auto add = [&](const std::vector<std::string>& more) {
    warnings.insert(warnings.end(), more.begin(), more.end());
  };
  for (const Image& image : images) add(image.warnings);
  for (const DecodedClip& clip : clips) add(clip.clip.info.warnings);
  return warnings;
}

OpenClip choose_frames(const Model& model, std::unique_ptr<VideoFile> file,
                       const SamplingRequest& request) {
  Clip clip{file->info(), model.sample_frames(file->info(), request)};
  return {std::move(file), std::move(clip), &model};
}

DecodedClip load_clip(const Model& model, const std::filesystem::path& path,
                      const SamplingRequest& request) {
  return choose_frames(model, open_video(path), request).decode();
}

}  // namespace kvlm
