#include "vision/frame_sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "kernels/base/error.h"

// Which frames of a video a family looks at: by count or by rate, with the reference's arithmetic,
// rounding included.
namespace kvlm {

namespace {

constexpr int64_t kMaxFrames = 32768;  // a prompt's pictures
constexpr double kAssumedFps = 24;

[[noreturn]] void refuse(const VideoInfo& info, std::string_view why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("video {} {}", info.name, why));
}

void check_request(const VideoInfo& info, const SamplingRequest& request) {
  if (request.fps && request.frames) {
    refuse(info, fmt::format("was asked for {} frames a second and for {} frames; give one of both",
                             *request.fps, *request.frames));
  }
  if (request.fps && !(std::isfinite(*request.fps) && *request.fps > 0)) {
    refuse(info, fmt::format("cannot be sampled at {} frames a second; give a rate above 0",
                             *request.fps));
  }
  if (request.frames && (*request.frames < 1 || *request.frames > kMaxFrames)) {
    refuse(info, fmt::format("cannot be sampled to {} frames; give a number from 1 to {}",
                             *request.frames, kMaxFrames));
  }
}

/// How many frames `fps` a second are, not rounded.
double frames_at(const VideoInfo& info, double fps) {
  if (info.fps <= 0) {
    refuse(info, fmt::format("has no frame rate (it is a {}), so it cannot be sampled at {} frames "
                             "a second; give a number of frames instead (--frames {})",
                             info.format, fps, std::min<int64_t>(info.frames, 8)));
  }
  return static_cast<double>(info.frames) / info.fps * fps;
}

/// trunc, within what a count can be.
int64_t truncated(double count) {
  return static_cast<int64_t>(std::min(count, static_cast<double>(int64_t{1} << 53)));
}

/// How many frames are asked for; a rate above the video's is refused as the reference does it, a
/// number beyond its frames is not.
int64_t asked_count(const VideoInfo& info, const SamplingRequest& request) {
  if (request.frames) return *request.frames;
  const int64_t count = truncated(frames_at(info, *request.fps));
  if (count > info.frames) {
    refuse(info, fmt::format("has {:.6g} frames a second, fewer than the requested {:.6g}; ask for "
                             "at most that rate, or for a number of frames",
                             info.fps, *request.fps));
  }
  return count;
}

std::vector<int64_t> all_frames(const VideoInfo& info) {
  std::vector<int64_t> frames(static_cast<size_t>(info.frames));
  std::iota(frames.begin(), frames.end(), 0);
  return frames;
}

template <class Number>
std::vector<int64_t> count_frames(int64_t count, Number&& number) {
  std::vector<int64_t> frames(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) frames[static_cast<size_t>(i)] = number(i);
  return frames;
}

/// torch.arange(start, frames, frames / count).int(), which computes in double and rounds to
/// float32; `count` of them, where rounding may give it one more.
std::vector<int64_t> float_steps(const VideoInfo& info, double start, int64_t count) {
  const double step = static_cast<double>(info.frames) / static_cast<double>(count);
  return count_frames(count, [&](int64_t i) {
    const auto number = static_cast<float>(start + static_cast<double>(i) * step);
    return std::min(static_cast<int64_t>(number), info.frames - 1);
  });
}

}  // namespace

std::vector<int64_t> sample_frames(const VideoInfo& info, const SamplingRequest& request) {
  check_request(info, request);
  if (!request.frames && !request.fps) return all_frames(info);
  const int64_t count = std::max<int64_t>(1, asked_count(info, request));
  return count_frames(count, [&](int64_t i) { return i * info.frames / count; });
}

std::vector<int64_t> sample_frames_internvl(const VideoInfo& info, const SamplingRequest& request) {
  check_request(info, request);
  if (!request.frames && !request.fps) return all_frames(info);
  const int64_t count = asked_count(info, request);
  if (count == 0) {
    refuse(info, fmt::format("has {} frames at {:.6g} a second, and at {} none is sampled; give a "
                             "higher rate, or a number of frames",
                             info.frames, info.fps, *request.fps));
  }
  const double half = static_cast<double>(info.frames) / static_cast<double>(count) / 2;
  return float_steps(info, half, count);
}

std::vector<int64_t> sample_frames_internvl_original(const VideoInfo& info,
                                                     const SamplingRequest& request) {
  check_request(info, request);
  if (!request.frames && !request.fps) return all_frames(info);
  const int64_t count = request.frames
                            ? *request.frames
                            : std::max<int64_t>(1, truncated(frames_at(info, *request.fps)));
  check_request(info, {.fps = {}, .frames = count});
  const double segment = static_cast<double>(info.frames - 1) / static_cast<double>(count);
  return count_frames(count, [&](int64_t i) {
    return static_cast<int64_t>(segment / 2 + std::nearbyint(segment * static_cast<double>(i)));
  });
}

std::vector<int64_t> sample_frames_qwen2_vl(const VideoInfo& info, const SamplingRequest& request,
                                            const QwenSampling& sampling) {
  check_request(info, request);
  const int64_t patch = sampling.temporal_patch_size;
  int64_t count = 0;
  if (request.frames) {
    const double patches = static_cast<double>(*request.frames) / static_cast<double>(patch);
    count = static_cast<int64_t>(std::nearbyint(patches)) * patch;
    if (count == 0) {
      refuse(info, fmt::format("was asked for {} frame, but the model takes them in groups of {}; "
                               "ask for {} or more",
                               *request.frames, patch, patch));
    }
  } else if (request.fps || sampling.default_fps > 0) {
    const double wanted = frames_at(info, request.fps.value_or(sampling.default_fps));
    const int64_t most = std::min(sampling.max_frames, info.frames) / patch * patch;
    const double bounded = std::min({std::max(wanted, static_cast<double>(sampling.min_frames)),
                                     static_cast<double>(most), static_cast<double>(info.frames)});
    count = static_cast<int64_t>(bounded) / patch * patch;
    if (count == 0) return all_frames(info);
  } else {
    return all_frames(info);
  }
  return float_steps(info, 0, count);
}

std::vector<int64_t> sample_frames_qwen3_vl(const VideoInfo& info, const SamplingRequest& request,
                                            const QwenSampling& sampling) {
  check_request(info, request);
  const double fps = request.fps.value_or(sampling.default_fps);
  int64_t count = info.frames;
  if (request.frames) {
    count = *request.frames;
  } else if (fps > 0) {
    VideoInfo known = info;
    if (known.fps <= 0) known.fps = kAssumedFps;
    count = std::min({std::max(truncated(frames_at(known, fps)), sampling.min_frames),
                      sampling.max_frames, info.frames});
  } else {
    count = std::min(std::max(count, sampling.min_frames), sampling.max_frames);
  }
  const auto last = static_cast<double>(info.frames - 1);
  const double step = count > 1 ? last / static_cast<double>(count - 1) : 0;
  return count_frames(count, [&](int64_t i) {
    const bool end = i > 0 && i == count - 1;
    return end ? info.frames - 1
               : static_cast<int64_t>(std::nearbyint(static_cast<double>(i) * step));
  });
}

double sampled_fps(const VideoInfo& info, size_t count) {
  if (info.fps <= 0) return kAssumedFps;
  return static_cast<double>(count) / static_cast<double>(info.frames) * info.fps;
}

std::vector<double> temporal_patch_times_s(const VideoInfo& info, std::span<const int64_t> frames,
                                           int64_t temporal_patch_size) {
  const double fps = info.fps > 0 ? info.fps : kAssumedFps;
  const auto patch = static_cast<size_t>(temporal_patch_size);
  std::vector<double> times_s;
  for (size_t first = 0; first < frames.size(); first += patch) {
    const size_t last = std::min(first + patch, frames.size()) - 1;
    times_s.push_back(
        (static_cast<double>(frames[first]) / fps + static_cast<double>(frames[last]) / fps) / 2);
  }
  return times_s;
}

std::string timestamp_text(double time_s) { return fmt::format("<{:.1f} seconds>", time_s); }

}  // namespace kvlm
