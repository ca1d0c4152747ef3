#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vision/image.h"

namespace kvlm {

/// What is known of a video before a frame is decoded.
struct VideoInfo {
  std::string name;  ///< the file or folder, fit for messages
  std::string
      format;  ///< "folder of pictures", "GIF", "WebP", or as FFmpeg calls it: "matroska,webm"
  int64_t frames = 0;  ///< at least 1
  int height = 0;      ///< of every frame, upright
  int width = 0;
  double fps = 0;         ///< frames a second, on average over all; 0: unknown
  double duration_s = 0;  ///< from the first frame to the end of the last; 0: unknown
  /// What of the file is not among the frames: one sentence each, which names the video.
  std::vector<std::string> warnings = {};
};

/// Frames of a video, in memory.
struct Video {
  std::vector<Image> frames;    ///< of one size
  std::vector<double> times_s;  ///< when each is shown, from the first frame on; empty: unknown
  double fps = 0;               ///< of the video that they are from, as VideoInfo's
  std::string name;             ///< fit for messages
};

/// The frames taken of a video, before they are decoded: how long a prompt becomes follows from it.
struct Clip {
  VideoInfo info;
  std::vector<int64_t> frames;  ///< their numbers, see VideoFile::decode()
};

/// A clip with its pictures.
struct DecodedClip {
  Clip clip;
  std::vector<Image> frames;  ///< one for each of clip.frames, of one size
};

/// A video whose frames are decoded when they are asked for, so that one of hours costs no more
/// memory than what is taken of it. One thread at a time.
class VideoFile {
 public:
  virtual ~VideoFile() = default;
  VideoFile(const VideoFile&) = delete;
  VideoFile& operator=(const VideoFile&) = delete;

  const VideoInfo& info() const noexcept { return info_; }
  /// When each frame is shown, in seconds from the first; empty where that is unknown.
  const std::vector<double>& times_s() const noexcept { return times_s_; }

  /// Decodes the frames of those numbers, which count from 0, do not descend and may repeat, and
  /// gives them to `take` one by one, each named after video and frame. What `take` throws ends
  /// it. Throws Error{kInvalidArgument} for numbers that are not so; Error{kCorruptFile} for a
  /// frame that is damaged or of another size than the first; Error{kOutOfMemory}.
  void decode(std::span<const int64_t> frames, const std::function<void(Image)>& take);

  /// The same, all in memory at once. Refuses also more than 2^30 pixels in all, with
  /// Error{kOutOfMemory}.
  Video read(std::span<const int64_t> frames);

  /// Closes the file and forgets what decoding these frames does not need, so that many videos
  /// that wait for their turn take no descriptors and little memory. From now on there are no
  /// times, and decode() takes these numbers only, opens the file for as long as it works, and
  /// throws Error{kCorruptFile} if it was changed. Throws as decode() for wrong numbers.
  void rest(std::span<const int64_t> frames);

 protected:
  VideoFile(VideoInfo info, std::vector<double> times_s)
      : info_(std::move(info)), times_s_(std::move(times_s)) {}

 private:
  /// Decodes frames whose numbers are valid and ascend.
  virtual void decode_frames(std::span<const int64_t> frames,
                             const std::function<void(Image)>& take) = 0;
  void require_kept(std::span<const int64_t> frames) const;
  /// rest(), for frames that are valid and ascend.
  virtual void rest_frames(std::span<const int64_t> frames) = 0;

  VideoInfo info_;
  std::vector<double> times_s_;
  std::optional<std::vector<int64_t>> kept_;  // once it rests: the only frames there are, ascending
};

/// Whether this build reads video files through FFmpeg's libraries.
bool reads_video_files() noexcept;

/// Opens a video and counts its frames:
///
/// - a folder: its picture files in natural order (frame2 before frame10), each as decode_image
///   reads it; hidden files, folders and files that are not named like a picture are passed over.
///   No times;
/// - an animated GIF or WebP, told from its bytes: every picture as it is shown, as Pillow's
///   Image.seek(i) and convert("RGB") give it, bit for bit (but upright by its EXIF orientation;
///   and of a GIF whose first picture alone is grey, later ones in their colours). A delay of less
///   than 20 ms is 100 ms, as browsers and FFmpeg have it;
/// - any other file through FFmpeg's libraries, where the build has them: the first video stream.
///   Frame i is the i-th that is shown, whatever the order in the file. Colours become RGB by the
///   matrix and range that the stream states (BT.601, limited, where it states none), chroma
///   bilinear; turned as the container says; pixels as stored where they are not square. Damage
///   that the decoder conceals or does not see is decoded as it does.
///
/// Throws Error{kCorruptFile}: missing, no regular file or folder, without a frame, truncated or
/// damaged where that shows without decoding, of more than 2^22 frames (WebP: 2^15), of larger
/// frames than 2^26 pixels (animations: 2^34 in all), or of an index larger than the file allows. A
/// file that ends early has its whole frames and a warning; it is refused if more than two thirds
/// are missing.
/// Error{kUnsupported} for what needs FFmpeg in a build without, or is no video that it reads;
/// Error{kInvalidArgument} for a path that holds a NUL; Error{kOutOfMemory}. Only that file or
/// folder is read, whatever a file refers to.
std::unique_ptr<VideoFile> open_video(const std::filesystem::path& path);

}  // namespace kvlm
