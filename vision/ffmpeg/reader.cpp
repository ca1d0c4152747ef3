#include "vision/ffmpeg/reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <vector>

#include "kernels/base/printable.h"
#include "vision/decoders.h"
#include "vision/video_sources.h"

// A video file through FFmpeg's libraries: packets and frames of one video stream, read from a file
// that is open already. FFmpeg may open nothing else, and says nothing on stderr.
namespace kvlm {

namespace {

constexpr size_t kMaxAllocation = size_t{1} << 29;  // a frame of kMaxFramePixels takes most
// While a container is opened: an honest index takes 24 bytes for every packet, which has one byte
// or more. What every file needs comes on top.
constexpr size_t kIndexBytesPerFileByte = 24;
constexpr size_t kOpeningBytes = size_t{1} << 22;
constexpr unsigned kMaxStreams = 64;
// Streams that may appear while find_stream_info reads, with and without a video stream before:
// FFmpeg decodes their first frames, without max_pixels, and keeps some 1 GiB of each.
constexpr unsigned kMaxLateStreams = 1;
constexpr unsigned kMaxLateStreamsBeforeVideo = 3;
constexpr int kBufferBytes = 1 << 16;
constexpr int kMaxBoxes = 1 << 12;
constexpr uint64_t kMostBytes = uint64_t{1} << 56;  // that a header may state
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

/// FFmpeg knows one limit of an allocation for the whole process, which has no other use of it. Who
/// opens a container sets a smaller one, alone; all other calls that may allocate share the usual.
std::shared_mutex& allocation_limit() {
  static std::shared_mutex mutex;
  return mutex;
}

class OpeningLimit {
 public:
  explicit OpeningLimit(int64_t file_bytes) : lock_(allocation_limit()) {
    av_log_set_level(AV_LOG_QUIET);
    const size_t index_bytes = static_cast<size_t>(file_bytes) * kIndexBytesPerFileByte;
    av_max_alloc(std::min(kMaxAllocation, kOpeningBytes + index_bytes));
  }
  ~OpeningLimit() { av_max_alloc(kMaxAllocation); }
  OpeningLimit(const OpeningLimit&) = delete;
  OpeningLimit& operator=(const OpeningLimit&) = delete;

 private:
  std::unique_lock<std::shared_mutex> lock_;
};

bool is_video(const AVStream& stream) noexcept {
  return stream.codecpar->codec_type == AVMEDIA_TYPE_VIDEO &&
         (stream.disposition & AV_DISPOSITION_ATTACHED_PIC) == 0;
}

[[noreturn]] void throw_no_video(const RegularFile& file, const std::string& name) {
  refuse_cut(file, name);
  throw_video(ErrorCode::kUnsupported, name,
              "is not a video that the FFmpeg libraries here can read; give a video file, an "
              "animated GIF or WebP, or a folder of frames");
}

/// Where the last byte of a Matroska file is to be by its header; 0 if it does not say.
int64_t matroska_end(const RegularFile& file) {
  const std::vector<std::byte> head = file.read(0, 256);
  size_t at = 0;
  // An element: an identifier and a length, each with as many zero bits first as bytes follow.
  const auto take = [&](bool keep_mark) -> std::optional<uint64_t> {
    if (at >= head.size()) return std::nullopt;
    const auto first = std::to_integer<uint8_t>(head[at]);
    const int more = std::countl_zero(first);
    if (more > 7 || head.size() - at <= static_cast<size_t>(more)) return std::nullopt;
    uint64_t value = keep_mark ? first : first & (0x7fu >> more);
    bool all_ones = (first | (0xff80u >> more & 0xff)) == 0xff;
    for (int i = 1; i <= more; ++i) {
      const auto byte = std::to_integer<uint8_t>(head[at + static_cast<size_t>(i)]);
      all_ones = all_ones && byte == 0xff;
      value = value << 8 | byte;
    }
    at += static_cast<size_t>(more) + 1;
    if (all_ones && !keep_mark) return std::nullopt;  // unknown
    return value;
  };
  constexpr uint64_t kHeader = 0x1a45dfa3;
  constexpr uint64_t kSegment = 0x18538067;
  if (take(true) != kHeader) return 0;
  const auto header_bytes = take(false);
  if (!header_bytes || *header_bytes > head.size()) return 0;
  at += *header_bytes;
  if (take(true) != kSegment) return 0;
  const auto segment_bytes = take(false);
  return segment_bytes && *segment_bytes < kMostBytes ? static_cast<int64_t>(at + *segment_bytes)
                                                      : 0;
}

bool is_box_name(std::string_view name) noexcept {
  return std::ranges::all_of(name, [](char c) { return c >= ' ' && c <= 'z'; });
}

/// Where the last byte of an MP4, AVI or Matroska file is to be by its boxes; 0 if they do not say.
int64_t stated_end(const RegularFile& file) {
  const auto number = [](std::span<const std::byte> bytes, bool little) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value = value << 8 | std::to_integer<uint64_t>(bytes[little ? bytes.size() - 1 - i : i]);
    }
    return value;
  };
  bool little = false;
  int64_t at = 0;
  for (int boxes = 0; boxes < kMaxBoxes; ++boxes) {
    const std::vector<std::byte> head = file.read(at, 16);
    if (head.size() < 8) break;
    const std::string_view text = as_text(head);
    if (at == 0) little = text.starts_with("RIFF");
    if (at == 0 && !little && text.substr(4, 4) != "ftyp") return matroska_end(file);
    // Other bytes may follow.
    if (little ? !text.starts_with("RIFF") : !is_box_name(text.substr(4, 4))) break;
    uint64_t bytes = number(std::span(head).subspan(little ? 4 : 0, 4), little);
    if (little) bytes += 8 + bytes % 2;
    if (!little && bytes == 0) break;  // up to the end
    if (!little && bytes == 1 && head.size() == 16) bytes = number(std::span(head).last(8), false);
    if (bytes < 8 || bytes > kMostBytes) break;
    at += static_cast<int64_t>(bytes);
    if (at >= file.bytes()) break;
  }
  return at;
}

}  // namespace

void refuse_cut(const RegularFile& file, const std::string& name) {
  const int64_t end = stated_end(file);
  if (end <= file.bytes()) return;
  throw_video(ErrorCode::kCorruptFile, name,
              fmt::format("ends early (truncated): it has {} bytes of {} or more; copy or download "
                          "it again",
                          file.bytes(), end));
}

bool FfmpegReader::is_cut() const { return is_cut_ || matroska_end(file_) > file_.bytes(); }

int64_t FfmpegReader::packets_beyond_file() const {
  AVStream* stream = format_->streams[stream_];
  const int entries = avformat_index_get_entries_count(stream);
  int64_t beyond = 0;
  for (int i = 0; i < entries; ++i) {
    const AVIndexEntry* entry = avformat_index_get_entry(stream, i);
    const bool shown = (entry->flags & AVINDEX_DISCARD_FRAME) == 0;
    beyond += shown && entry->pos + entry->size > source_.bytes;
  }
  return beyond;
}

unsigned FfmpegReader::video_streams() const noexcept {
  unsigned count = 0;
  for (unsigned i = 0; i < format_->nb_streams; ++i) count += is_video(*format_->streams[i]);
  return count;
}

double FfmpegReader::stated_end_s() const {
  const AVDictionaryEntry* tag = av_dict_get(stream().metadata, "DURATION", nullptr, 0);
  int64_t microseconds = 0;
  if (tag == nullptr || av_parse_time(&microseconds, tag->value, 1) < 0) {
    microseconds = format_->duration == AV_NOPTS_VALUE ? 0 : format_->duration;
  }
  return static_cast<double>(microseconds) / AV_TIME_BASE;
}

FfmpegReader::FfmpegReader(const RegularFile& file, const std::string& name)
    : file_(file),
      name_(name),
      source_{file.descriptor(), 0, file.bytes()},
      packet_(av_packet_alloc()),
      frame_(av_frame_alloc()) {
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
  int opened = 0;
  {
    const OpeningLimit limit(source_.bytes);
    opened = avformat_open_input(&format, nullptr, nullptr, options.get());
  }
  format_.reset(format);  // null after a failure
  if (opened == AVERROR(ENOMEM)) {
    throw_video(ErrorCode::kCorruptFile, name_,
                "has an index of more frames than the file can hold; copy or download it again");
  }
  if (opened < 0) throw_no_video(file_, name_);
  if (format_->nb_streams > kMaxStreams) {
    throw_video(ErrorCode::kCorruptFile, name_,
                fmt::format("has {} streams, more than the limit of {}; copy its video stream to "
                            "another file first",
                            format_->nb_streams, kMaxStreams));
  }

  const std::shared_lock lock(allocation_limit());
  const bool has_video = choose_stream();  // so that no other is decoded
  format_->max_streams = static_cast<int>(format_->nb_streams) +
                         static_cast<int>(has_video ? kMaxLateStreams : kMaxLateStreamsBeforeVideo);
  Options limits;
  limits.set("max_pixels", std::to_string(kMaxFramePixels).c_str());
  std::vector<AVDictionary*> each(format_->nb_streams);
  for (AVDictionary*& one : each) av_dict_copy(&one, limits.value(), 0);
  const int found = avformat_find_stream_info(format_.get(), each.data());
  for (AVDictionary*& one : each) av_dict_free(&one);
  if (found == AVERROR(ENOMEM)) throw std::bad_alloc();
  if (!choose_stream()) {
    refuse_cut(file_, name_);
    throw_video(ErrorCode::kCorruptFile, name_,
                fmt::format("is {} file without a video stream, so it has no frame; give a video",
                            with_article(printable(format_name()))));
  }
}

bool FfmpegReader::choose_stream() noexcept {
  bool any = false;
  for (unsigned i = 0; i < format_->nb_streams; ++i) {
    if (is_video(*format_->streams[i]) && !any) {
      stream_ = i;
      any = true;
    }
  }
  for (unsigned i = 0; any && i < format_->nb_streams; ++i) {
    format_->streams[i]->discard = i == stream_ ? AVDISCARD_DEFAULT : AVDISCARD_ALL;
  }
  return any;
}

void FfmpegReader::open_decoder() {
  const std::shared_lock lock(allocation_limit());
  const AVCodecParameters& parameters = *stream().codecpar;
  if (parameters.codec_id == AV_CODEC_ID_NONE) {
    refuse_cut(file_, name_);
    throw_video(ErrorCode::kCorruptFile, name_,
                fmt::format("is {} that does not name its codec: it is damaged or ends early "
                            "(truncated); copy or download it again",
                            with_article(printable(format_name()))));
  }
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
  // Without a size in the container, this is that of some frame, to which the H.264 decoder would
  // crop all frames of as many macroblocks.
  const std::string_view format = format_name();
  if (format == "mpegts" || format == "mpeg" || format == "h264") {
    decoder_->width = 0;
    decoder_->height = 0;
  }
  decoder_->pkt_timebase = stream().time_base;
  decoder_->max_pixels = kMaxFramePixels;
  decoder_->thread_count = 1;  // what it makes of damage does not depend on the machine
  check_frame_size(parameters.height, parameters.width, name_);
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
  const std::shared_lock lock(allocation_limit());
  return read_packet();
}

const AVPacket* FfmpegReader::read_packet() {
  // Where transport streams were joined, the last packet before is marked, too.
  const bool joined = std::string_view(format_name()) == "mpegts";
  for (;;) {
    av_packet_unref(packet_.get());
    const int result = av_read_frame(format_.get(), packet_.get());
    if (result == AVERROR_EOF) return nullptr;
    if (result == AVERROR(ENOMEM)) throw std::bad_alloc();
    if (result < 0) {
      is_cut_ = true;
      return nullptr;
    }
    if (packet_->stream_index != static_cast<int>(stream_)) continue;
    if ((packet_->flags & AV_PKT_FLAG_CORRUPT) == 0 || joined) return packet_.get();
    is_cut_ = true;  // the rest of this one is not there
  }
}

const AVFrame* FfmpegReader::next_frame() {
  const std::shared_lock lock(allocation_limit());
  for (;;) {
    const int result = avcodec_receive_frame(decoder_.get(), frame_.get());
    if (result == 0) return frame_.get();
    if (result == AVERROR(ENOMEM)) throw std::bad_alloc();
    if (result == AVERROR_EOF) return nullptr;
    if (result != AVERROR(EAGAIN)) continue;  // one picture could not be decoded
    if (drained_) return nullptr;
    const AVPacket* packet = read_packet();
    drained_ = packet == nullptr;
    if (avcodec_send_packet(decoder_.get(), packet) == AVERROR(ENOMEM)) throw std::bad_alloc();
  }
}

bool FfmpegReader::seek(int64_t pts) {
  const std::shared_lock lock(allocation_limit());
  const int index = static_cast<int>(stream_);
  if (av_seek_frame(format_.get(), index, pts, AVSEEK_FLAG_BACKWARD) < 0) return false;
  avcodec_flush_buffers(decoder_.get());
  drained_ = false;
  return true;
}

}  // namespace kvlm
