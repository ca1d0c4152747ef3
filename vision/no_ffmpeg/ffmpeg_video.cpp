#include "vision/video_sources.h"

namespace kvlm {

bool reads_video_files() noexcept { return false; }

std::unique_ptr<VideoFile> open_ffmpeg_video(RegularFile, const std::string& name) {
  throw_video(ErrorCode::kUnsupported, name,
              "is not an animated GIF or WebP, and this build has no FFmpeg, which other formats "
              "need; run tools/setup.sh --video and build again, or give a folder of frames");
}

}  // namespace kvlm
