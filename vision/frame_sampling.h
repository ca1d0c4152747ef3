#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vision/video.h"

namespace kvlm {

/// Which frames of a video a caller wants: so many a second, or so many in all, or what the family
/// takes by itself. Not both.
struct SamplingRequest {
  std::optional<double> fps;
  std::optional<int64_t> frames;
};

// The functions below turn a request into frame numbers, which ascend, as the reference's video
// processors do (`sample_frames`, transformers 5.23). N is the number of all frames, n that of
// those taken. Where more frames are asked for than there are, some come several times: by the
// reference's rule in Qwen3-VL and the original InternVL, by the same formulas in the others, whose
// reference refuses that and so stops an evaluation at its first short clip.
//
// They throw Error{kInvalidArgument} for a request of both, of no frame, of more than 32768, or of
// a rate that is not positive; for a rate above the video's, where the reference refuses that; and
// for a rate where that of the video is unknown, unless the reference assumes one.

/// Neither fps nor frames: all. fps: n = max(1, trunc(N / video fps * fps)). Frame i is
/// floor(i * N / n). LLaVA-OneVision, and any family whose processor has no rule of its own.
std::vector<int64_t> sample_frames(const VideoInfo& info, const SamplingRequest& request);

/// The middles of n segments: trunc(N / n / 2 + i * N / n). fps: n = trunc(N / video fps * fps).
/// Neither: all. InternVL in the spelling of transformers (`-hf`).
std::vector<int64_t> sample_frames_internvl(const VideoInfo& info, const SamplingRequest& request);

/// The middles of n segments as the original InternVL's `get_index` has them:
/// trunc(s / 2 + rint(i * s)) with s = (N - 1) / n; more than there are repeat. fps: n =
/// max(1, trunc(N / video fps * fps)). Neither: all.
std::vector<int64_t> sample_frames_internvl_original(const VideoInfo& info,
                                                     const SamplingRequest& request);

/// What the Qwen-VL families bound their sampling by: fields of their video processors.
struct QwenSampling {
  int64_t min_frames = 4;
  int64_t max_frames = 768;
  int64_t temporal_patch_size = 2;  ///< frames to a temporal patch
  double default_fps = 0;           ///< without a request; 0: all frames
};

/// Qwen2-VL and Qwen2.5-VL: trunc(i * N / n) with n a multiple of the temporal patch; fps: N /
/// video fps * fps, within min_frames and max_frames and N, rounded down; frames: rounded to the
/// nearest. In float32 as torch.arange, whose last bit depends on the processor beyond some 20000
/// frames. A video that is shorter than a temporal patch, at which the reference divides by zero,
/// is taken whole.
std::vector<int64_t> sample_frames_qwen2_vl(const VideoInfo& info, const SamplingRequest& request,
                                            const QwenSampling& sampling);

/// Qwen3-VL: n numbers evenly from 0 to N - 1, rounded half to even; fps: trunc(N / video fps *
/// fps) within min_frames, max_frames and N; an unknown video fps is 24; frames: exactly so many,
/// repeated where there are fewer. Neither and no default_fps: N within min_frames and max_frames.
std::vector<int64_t> sample_frames_qwen3_vl(const VideoInfo& info, const SamplingRequest& request,
                                            const QwenSampling& sampling);

/// The rate of what was taken: count / N * video fps; 24 where that is unknown. Qwen2.5-VL spaces
/// temporal patches by temporal_patch_size / this.
double sampled_fps(const VideoInfo& info, size_t count);

/// The time of every temporal patch of the frames taken, in seconds: the mean of its first and its
/// last frame's number / video fps (24 where that is unknown); the last frame fills a patch that is
/// not whole. Qwen3-VL.
std::vector<double> temporal_patch_times_s(const VideoInfo& info, std::span<const int64_t> frames,
                                           int64_t temporal_patch_size);

/// Such a time as Qwen3-VL's prompt spells it: "<12.3 seconds>".
std::string timestamp_text(double time_s);

}  // namespace kvlm
