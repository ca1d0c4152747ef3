#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/clip_file.h"

namespace kvlm {

using VideoFiles = std::vector<std::unique_ptr<VideoFile>>;

/// Opens a video that the command line names. Throws as open_video() and path_of_name();
/// Error{kInvalidArgument} for "-", for frames are not read in one go.
std::unique_ptr<VideoFile> open_named_video(const std::string& name);

/// The path of a video whose name is from elsewhere, where "-" is a file like any other.
std::string video_file_path(const std::string& name);

/// What a model takes of each of these videos.
std::vector<OpenClip> choose_frames(const Model& model, VideoFiles videos,
                                    const SamplingRequest& sampling);

/// What is known of clips that are not decoded.
std::vector<Clip> clips_of(std::span<const OpenClip> clips);

/// Their frames.
std::vector<DecodedClip> decode_clips(std::span<const OpenClip> clips);

/// "clip.mp4: 8 of 120 frames, 25 a second, 640 x 480".
std::string describe_clip(const Clip& clip);

}  // namespace kvlm
