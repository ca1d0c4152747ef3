#include "vision/ffmpeg/reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "kernels/base/printable.h"
#include "vision/video_sources.h"

// A video file through FFmpeg's libraries: packets and frames of one video stream, read from a file
// that is open already. FFmpeg may open nothing else, and says nothing on stderr.
namespace kvlm {

namespace {

constexpr int64_t kMaxPixels = int64_t{1} << 26;
constexpr size_t kMaxAllocation = size_t{1} << 30;
constexpr int kBufferBytes = 1 << 16;
// Containers of video. Not here: playlists and lists of files, which name others; pictures; text.
constexpr char kFormats[] =
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,ogg,flv,asf,ivf,"
    "nut,mxf,rm,dv,obu,yuv4mpegpipe";

class Options {
 public:
  Options() = default;
  ~Options() { av_dict_free(&options_); }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  void set(const char* key, const char* value) {
    if (av_dict_set(&options_, key, value, 0) < 0) throw std::bad_alloc();
  }
  AVDictionary** get() noexcept { return &options_; }
  AVDictionary* value() const noexcept { return options_; }

 private:
  AVDictionary* options_ = nullptr;
};

/// What a demuxer calls to open something else.
int refuse_to_open(AVFormatContext*, AVIOContext**, const char*, int, AVDictionary**) noexcept {
  return AVERROR(EPERM);
}

/// FFmpeg knows these two for the whole process only, which has no other use of it: it says nothing
/// on stderr, and no number in a file makes it ask for more memory than that at once.
void restrain_ffmpeg() noexcept {
  av_log_set_level(AV_LOG_QUIET);
  av_max_alloc(kMaxAllocation);
}

[[noreturn]] void throw_no_video(const std::string& name) {
  throw_video(ErrorCode::kUnsupported, name,
              "is not a video that the FFmpeg libraries here can read; give a video file, an "
              "animated GIF or WebP, or a folder of frames");
}

}  // namespace

FfmpegReader::FfmpegReader(const RegularFile& file, const std::string& name)
    : name_(name),
      source_{file.descriptor(), 0, file.bytes()},
      packet_(av_packet_alloc()),
      frame_(av_frame_alloc()) {
  restrain_ffmpeg();
  if (packet_ == nullptr || frame_ == nullptr) throw std::bad_alloc();
  open_container();
  open_decoder();
}

int FfmpegReader::read_some(void* opaque, uint8_t* buffer, int count) noexcept {
  auto& source = *static_cast<Source*>(opaque);
  for (;;) {
    const ssize_t got =
        ::pread(source.descriptor, buffer, static_cast<size_t>(count), source.position);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return AVERROR(errno);
    if (got == 0) return AVERROR_EOF;
    source.position += got;
    return static_cast<int>(got);
  }
}

int64_t FfmpegReader::seek_to(void* opaque, int64_t offset, int whence) noexcept {
  auto& source = *static_cast<Source*>(opaque);
  switch (whence & ~AVSEEK_FORCE) {
    case AVSEEK_SIZE:
      return source.bytes;
    case SEEK_CUR:
      offset += source.position;
      break;
    case SEEK_END:
      offset += source.bytes;
      break;
    default:
      break;
  }
  if (offset < 0) return AVERROR(EINVAL);
  return source.position = offset;
}

void FfmpegReader::open_container() {
  auto* buffer = static_cast<uint8_t*>(av_malloc(kBufferBytes));
  if (buffer == nullptr) throw std::bad_alloc();
  io_.reset(avio_alloc_context(buffer, kBufferBytes, 0, &source_, read_some, nullptr, seek_to));
  if (io_ == nullptr) {
    av_free(buffer);
    throw std::bad_alloc();
  }
  AVFormatContext* format = avformat_alloc_context();
  if (format == nullptr) throw std::bad_alloc();
  format->pb = io_.get();
  format->io_open = refuse_to_open;
  Options options;
  options.set("format_whitelist", kFormats);
  options.set("protocol_whitelist", "none");
  const int opened = avformat_open_input(&format, nullptr, nullptr, options.get());
  format_.reset(format);  // null after a failure
  if (opened == AVERROR(ENOMEM)) throw std::bad_alloc();
  if (opened < 0) throw_no_video(name_);

  Options limits;
  limits.set("max_pixels", std::to_string(kMaxPixels).c_str());
  std::vector<AVDictionary*> each(format_->nb_streams);
  for (AVDictionary*& one : each) av_dict_copy(&one, limits.value(), 0);
  const int found = avformat_find_stream_info(format_.get(), each.data());
  for (AVDictionary*& one : each) av_dict_free(&one);
  if (found == AVERROR(ENOMEM)) throw std::bad_alloc();

  bool any = false;
  for (unsigned i = 0; i < format_->nb_streams; ++i) {
    AVStream& stream = *format_->streams[i];
    const bool video = stream.codecpar->codec_type == AVMEDIA_TYPE_VIDEO &&
                       (stream.disposition & AV_DISPOSITION_ATTACHED_PIC) == 0;
    if (video && !any) {
      stream_ = i;
      any = true;
    } else {
      stream.discard = AVDISCARD_ALL;
    }
  }
  if (!any) {
    throw_video(ErrorCode::kCorruptFile, name_,
                fmt::format("is a {} file without a video stream, so it has no frame; give a video",
                            printable(format_name())));
  }
}

void FfmpegReader::open_decoder() {
  const AVCodecParameters& parameters = *stream().codecpar;
  const AVCodec* codec = avcodec_find_decoder(parameters.codec_id);
  if (codec == nullptr) {
    throw_video(ErrorCode::kUnsupported, name_,
                fmt::format("uses the codec {}, for which the FFmpeg libraries here have no "
                            "decoder; convert it to H.264",
                            printable(avcodec_get_name(parameters.codec_id))));
  }
  decoder_.reset(avcodec_alloc_context3(codec));
  if (decoder_ == nullptr) throw std::bad_alloc();
  if (avcodec_parameters_to_context(decoder_.get(), &parameters) < 0) throw std::bad_alloc();
  decoder_->pkt_timebase = stream().time_base;
  decoder_->max_pixels = kMaxPixels;
  decoder_->thread_count = 1;  // what it makes of damage does not depend on the machine
  if (int64_t{parameters.width} * parameters.height > kMaxPixels) {
    throw_video(ErrorCode::kCorruptFile, name_,
                fmt::format("is {} x {}, more than the limit of {} pixels; scale it down first",
                            parameters.width, parameters.height, kMaxPixels));
  }
  const int opened = avcodec_open2(decoder_.get(), codec, nullptr);
  if (opened == AVERROR(ENOMEM)) throw std::bad_alloc();
  if (opened < 0) {
    throw_video(
        ErrorCode::kCorruptFile, name_,
        fmt::format("is a damaged {} file ({} cannot be decoded); copy or download it again",
                    printable(format_name()), printable(avcodec_get_name(parameters.codec_id))));
  }
}

const AVPacket* FfmpegReader::next_packet() {
  for (;;) {
    av_packet_unref(packet_.get());
    const int result = av_read_frame(format_.get(), packet_.get());
    if (result == AVERROR_EOF) return nullptr;
    if (result == AVERROR(ENOMEM)) throw std::bad_alloc();
    const bool ours = packet_->stream_index == static_cast<int>(stream_);
    if (result < 0 || (ours && (packet_->flags & AV_PKT_FLAG_CORRUPT) != 0)) {
      throw_video(ErrorCode::kCorruptFile, name_,
                  fmt::format("is a {} that is damaged or ends early (truncated); copy or download "
                              "it again",
                              printable(format_name())));
    }
    if (ours) return packet_.get();
  }
}

const AVFrame* FfmpegReader::next_frame() {
  for (;;) {
    const int result = avcodec_receive_frame(decoder_.get(), frame_.get());
    if (result == 0) return frame_.get();
    if (result == AVERROR(ENOMEM)) throw std::bad_alloc();
    if (result == AVERROR_EOF) return nullptr;
    if (result != AVERROR(EAGAIN)) continue;  // one picture could not be decoded
    if (drained_) return nullptr;
    const AVPacket* packet = next_packet();
    drained_ = packet == nullptr;
    if (avcodec_send_packet(decoder_.get(), packet) == AVERROR(ENOMEM)) throw std::bad_alloc();
  }
}

bool FfmpegReader::seek(int64_t pts) {
  const int index = static_cast<int>(stream_);
  if (av_seek_frame(format_.get(), index, pts, AVSEEK_FLAG_BACKWARD) < 0) return false;
  avcodec_flush_buffers(decoder_.get());
  drained_ = false;
  return true;
}

}  // namespace kvlm
