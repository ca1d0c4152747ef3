#include "tools/run/videos.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/base/error.h"
#include "tools/common/file_name.h"
#include "tools/common/input_text.h"

namespace kvlm {

namespace {

constexpr const char* kKind = "video";

}  // namespace

std::unique_ptr<VideoFile> open_named_video(const std::string& name) {
  if (name == kStandardInput) {
    refuse_name(ErrorCode::kInvalidArgument, kKind, name,
                "is standard input, but frames are read in random access; give the path of a file "
                "or of a folder of frames");
  }
  return open_video(path_of_name(name, kKind));
}

std::string video_file_path(const std::string& name) { return path_of_file_name(name, kKind); }

std::vector<OpenClip> choose_frames(const Model& model, VideoFiles videos,
                                    const SamplingRequest& sampling) {
  std::vector<OpenClip> clips;
  for (std::unique_ptr<VideoFile>& video : videos) {
    clips.push_back(choose_frames(model, std::move(video), sampling));
  }
  return clips;
}

std::vector<Clip> clips_of(std::span<const OpenClip> clips) {
  std::vector<Clip> known;
  for (const OpenClip& open : clips) known.push_back(open.clip);
  return known;
}

std::vector<DecodedClip> decode_clips(std::span<const OpenClip> clips) {
  std::vector<DecodedClip> decoded;
  for (const OpenClip& open : clips) decoded.push_back(open.decode());
  return decoded;
}

std::string describe_clip(const Clip& clip) {
  const VideoInfo& info = clip.info;
  return fmt::format("{}: {} of {} frame{}{}, {} x {}", info.name, clip.frames.size(), info.frames,
                     info.frames == 1 ? "" : "s",
                     info.fps > 0 ? fmt::format(", {:.6g} a second", info.fps) : std::string(),
                     info.width, info.height);
}

}  // namespace kvlm
