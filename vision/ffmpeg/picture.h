#pragma once

#include <memory>
#include <string>

#include "vision/ffmpeg/reader.h"
#include "vision/image.h"

struct SwsContext;

namespace kvlm {

/// Makes RGB pictures of decoded frames: the matrix and range that a frame states (BT.601 and
/// limited where it states none), chroma bilinear, more than 8 bits cut without dither, alpha
/// dropped; the same bits on every machine.
class FfmpegPicture {
 public:
  /// `orientation` is EXIF's, applied to every picture. `name` must outlive this.
  FfmpegPicture(int orientation, const std::string& name)
      : orientation_(orientation), name_(name), rgb_(av_frame_alloc()) {}

  /// Throws Error{kUnsupported} for a kind of pixels or a matrix that is not known here.
  Image convert(const AVFrame& frame);

 private:
  struct FreeScaler {
    void operator()(SwsContext* scaler) const noexcept;
  };

  void prepare(const AVFrame& frame);

  int orientation_;
  const std::string& name_;
  FramePointer rgb_;
  std::unique_ptr<SwsContext, FreeScaler> scaler_;
  FramePointer like_;  // the frame that `scaler_` was made for, without pixels
};

/// What EXIF calls the turn that a container states for a stream; 1 for none, and for one that is
/// no multiple of 90 degrees.
int orientation_of(const AVStream& stream) noexcept;

}  // namespace kvlm
