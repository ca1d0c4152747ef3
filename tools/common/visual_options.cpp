#include "tools/common/visual_options.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/base/error.h"

namespace kvlm {

void add_size_options(CLI::App& app, SessionOptions& options) {
  app.add_option("--tiles", options.max_tiles,
                 "Most tiles that an image is cut into, without its thumbnail (InternVL)");
  app.add_option("--min-pixels", options.min_pixels,
                 "Smaller images are enlarged to this many pixels (Qwen-VL)");
  app.add_option("--max-pixels", options.max_pixels,
                 "Larger images are reduced to this many pixels (Qwen-VL)");
}

void add_sampling_options(CLI::App& app, SamplingRequest& sampling) {
  app.add_option("--fps", sampling.fps, "Frames sampled from a video, per second");
  app.add_option(
      "--frames", sampling.frames,
      "Frames sampled from a video, repeated if it has fewer; default: as the family does");
}

void check_sampling(const SamplingRequest& sampling) {
  constexpr int64_t kMost = 32768;  // a prompt's pictures
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::kInvalidArgument, text);
  };
  if (sampling.fps && sampling.frames) {
    refuse("--fps and --frames both set the frames of a video; give one of them");
  }
  if (sampling.fps && !(std::isfinite(*sampling.fps) && *sampling.fps > 0)) {
    refuse(fmt::format("--fps is {}; expected a rate above 0, such as 2 or 0.5", *sampling.fps));
  }
  if (sampling.frames && (*sampling.frames < 1 || *sampling.frames > kMost)) {
    refuse(fmt::format("--frames is {}; expected 1 to {}", *sampling.frames, kMost));
  }
}

std::string cure_of_long_prompt(std::span<const Clip> clips, const std::string& otherwise) {
  size_t frames = 0;
  for (const Clip& clip : clips) frames += clip.frames.size();
  if (frames <= clips.size()) return otherwise;
  return clips.size() == 1
             ? fmt::format("take fewer than {} frames of its video with --frames", frames)
             : fmt::format("take fewer frames of its videos, now {} in all, with --frames", frames);
}

}  // namespace kvlm
