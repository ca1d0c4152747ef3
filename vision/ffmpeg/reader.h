#pragma once

#include <cstdint>
#include <memory>
#include <string>

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/parseutils.h>
}

#include "vision/regular_file.h"

namespace kvlm {

/// Calls FFmpeg's function that frees what a pointer points to.
template <auto kFree>
struct FfmpegFree {
  template <class T>
  void operator()(T* object) const noexcept {
    kFree(&object);
  }
};
using FramePointer = std::unique_ptr<AVFrame, FfmpegFree<av_frame_free>>;
struct FfmpegFreeIo {
  void operator()(AVIOContext* io) const noexcept {
    av_freep(&io->buffer);
    avio_context_free(&io);
  }
};
using PacketPointer = std::unique_ptr<AVPacket, FfmpegFree<av_packet_free>>;

/// Throws that the file ends early, if an MP4, AVI or Matroska file states that it has more bytes.
void refuse_cut(const RegularFile& file, const std::string& name);

/// Reads the first video stream of a file from its beginning, packet by packet or frame by frame.
/// FFmpeg sees the bytes of that file and nothing else: no other file, no network, no format that
/// refers to such.
class FfmpegReader {
 public:
  /// `file` and `name` must outlive the reader. Throws what open_video says.
  FfmpegReader(const RegularFile& file, const std::string& name);
  ~FfmpegReader() = default;
  FfmpegReader(const FfmpegReader&) = delete;
  FfmpegReader& operator=(const FfmpegReader&) = delete;

  const AVStream& stream() const noexcept { return *format_->streams[stream_]; }
  /// As FFmpeg calls it: "matroska,webm".
  const char* format_name() const noexcept { return format_->iformat->name; }

  /// The next packet of the stream, valid until the next call; null at the end. One of which a part
  /// is missing is passed over.
  const AVPacket* next_packet();
  /// The next frame in the order of showing, valid until the next call; null at the end. What
  /// cannot be decoded is passed over.
  const AVFrame* next_frame();
  /// Goes to a key frame at or before `pts`; whether that can be done.
  bool seek(int64_t pts);
  /// Whether the file is shorter than its header says, or ended within a packet so far.
  bool is_cut() const;
  /// How many shown frames the index of an MP4 places after the end of the file.
  int64_t packets_beyond_file() const;
  /// How many streams of video are known so far, of which the first is read.
  unsigned video_streams() const noexcept;
  /// When the header says that the stream ends, in seconds from its beginning; 0: unknown.
  double stated_end_s() const;

 private:
  struct Source {
    int descriptor;
    int64_t position;
    int64_t bytes;
  };

  static int read_some(void* source, uint8_t* buffer, int count) noexcept;
  static int64_t seek_to(void* source, int64_t offset, int whence) noexcept;
  void open_container();
  /// The first video stream, and no other, is read from here on; whether there is one.
  bool choose_stream() noexcept;
  /// next_packet() for who holds the allocation limit already.
  const AVPacket* read_packet();
  void open_decoder();

  const RegularFile& file_;
  const std::string& name_;
  Source source_;
  std::unique_ptr<AVIOContext, FfmpegFreeIo> io_;
  std::unique_ptr<AVFormatContext, FfmpegFree<avformat_close_input>> format_;
  std::unique_ptr<AVCodecContext, FfmpegFree<avcodec_free_context>> decoder_;
  unsigned stream_ = 0;
  PacketPointer packet_;
  FramePointer frame_;
  bool drained_ = false;
  bool is_cut_ = false;
};

}  // namespace kvlm
