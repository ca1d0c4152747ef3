#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "vision/regular_file.h"
#include "vision/video.h"

namespace kvlm {

/// Private to vision/video.cpp: one function for each kind of video. `name` is fit for messages;
/// what throws, throws what open_video says.

inline constexpr int64_t kMaxVideoFrames = int64_t{1} << 22;
/// Of an animation, in all: every picture up to a wanted one has to be drawn.
inline constexpr int64_t kMaxAnimationPixels = int64_t{1} << 34;

/// Of a frame, whichever kind of video it is from. Smaller than an image may be: decoders of videos
/// hold several.
inline constexpr int64_t kMaxFramePixels = int64_t{1} << 26;

std::unique_ptr<VideoFile> open_frame_folder(const std::filesystem::path& folder,
                                             const std::string& name);
std::unique_ptr<VideoFile> open_gif_video(std::vector<std::byte> bytes, const std::string& name);
std::unique_ptr<VideoFile> open_webp_video(std::vector<std::byte> bytes, const std::string& name);
/// In ffmpeg/; the build links no_ffmpeg/ where it has no FFmpeg, which throws Error{kUnsupported}.
std::unique_ptr<VideoFile> open_ffmpeg_video(RegularFile file, const std::string& name);

/// Throws: `found` says what is wrong with the video, and what to do.
[[noreturn]] void throw_video(ErrorCode code, const std::string& name, std::string_view found);

/// "an avi", "a GIF".
std::string with_article(const std::string& format);

/// Throws: a whole video of that format that shows nothing.
[[noreturn]] void throw_no_frame(const std::string& name, std::string_view format);

/// Throws if a frame of that size has more than kMaxFramePixels.
void check_frame_size(int64_t height, int64_t width, const std::string& name);
/// Throws if there are more than `most`.
void check_frame_count(int64_t frames, const std::string& name, int64_t most = kMaxVideoFrames);
/// Throws if an animation has more than kMaxAnimationPixels.
void check_animation_pixels(int64_t pixels, const std::string& name);

/// What an animation's delay between two frames means.
int64_t animation_delay_ms(int64_t delay_ms) noexcept;
inline double seconds_of(int64_t ms) noexcept { return static_cast<double>(ms) / 1000; }
/// Sets duration and rate of an animation whose frames were counted.
void set_duration(VideoInfo& info, int64_t duration_ms) noexcept;

/// Adds the warning that a video ends early, after info.frames whole frames; `missing` are lacking,
/// 0 if that is unknown. Throws Error{kCorruptFile} if their share is above kMostMissing.
void warn_of_missing_frames(VideoInfo& info, int64_t missing);

}  // namespace kvlm
