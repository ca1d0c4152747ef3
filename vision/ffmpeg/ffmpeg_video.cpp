#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "kernels/base/printable.h"
#include "vision/ffmpeg/picture.h"
#include "vision/ffmpeg/reader.h"
#include "vision/video_sources.h"

// A video file as numbered frames: which frame is shown when is counted from packets where they say
// so reliably, else by decoding everything once; wanted frames are reached by seeking to a key
// frame before them.
namespace kvlm {

namespace {

/// When frames are shown, in the stream's units.
struct FrameIndex {
  std::vector<int64_t> shown;  // of every frame, ascending; empty where the stream does not say
  std::vector<int64_t> keys;   // of those at which decoding can begin, ascending
  int64_t frames = 0;
  std::vector<int64_t> numbers = {};  // whose times `shown` has; empty: of all

  int64_t time_of(int64_t frame) const {
    if (numbers.empty()) return shown[static_cast<size_t>(frame)];
    return shown[static_cast<size_t>(std::ranges::lower_bound(numbers, frame) - numbers.begin())];
  }

  /// Leaves what finding these frames, which ascend, needs.
  void keep(std::span<const int64_t> wanted) {
    if (shown.empty()) return;
    FrameIndex kept;
    kept.frames = frames;
    const auto add = [&](int64_t frame) {
      if (frame >= frames || (!kept.numbers.empty() && kept.numbers.back() >= frame)) return;
      kept.numbers.push_back(frame);
      kept.shown.push_back(time_of(frame));
    };
    add(0);  // where a reader begins
    for (const int64_t frame : wanted) {
      add(frame);
      const auto behind = std::ranges::upper_bound(keys, time_of(frame));
      if (behind != keys.begin() && (kept.keys.empty() || kept.keys.back() != *(behind - 1))) {
        kept.keys.push_back(*(behind - 1));
      }
      add(frame + 1);  // where a reader is behind it
    }
    *this = std::move(kept);
  }
};

/// Counts frames by their packets: quick, but only right where every packet says when its frame is
/// shown, every frame is shown, and times do not start again (joined transport streams). Nothing
/// where that is not so.
std::optional<FrameIndex> index_packets(FfmpegReader& reader, const std::string& name) {
  FrameIndex index;
  // VP8 has packets that are decoded and not shown, and does not mark them.
  if (reader.stream().codecpar->codec_id == AV_CODEC_ID_VP8) return std::nullopt;
  int64_t decoded = AV_NOPTS_VALUE;  // when the packet before is
  while (const AVPacket* packet = reader.next_packet()) {
    if (packet->dts != AV_NOPTS_VALUE) {
      if (decoded != AV_NOPTS_VALUE && packet->dts < decoded) return std::nullopt;
      decoded = packet->dts;
    }
    if ((packet->flags & AV_PKT_FLAG_DISCARD) != 0) continue;  // cut off by an edit list
    if (packet->pts == AV_NOPTS_VALUE) return std::nullopt;
    index.shown.push_back(packet->pts);
    if ((packet->flags & AV_PKT_FLAG_KEY) != 0) index.keys.push_back(packet->pts);
    check_frame_count(static_cast<int64_t>(index.shown.size()), name);
  }
  std::ranges::sort(index.shown);
  std::ranges::sort(index.keys);
  if (std::ranges::adjacent_find(index.shown) != index.shown.end()) return std::nullopt;
  index.frames = static_cast<int64_t>(index.shown.size());
  return index;
}

/// Counts frames by decoding all of them.
FrameIndex index_frames(FfmpegReader& reader, const std::string& name) {
  FrameIndex index;
  while (reader.next_frame() != nullptr) check_frame_count(++index.frames, name);
  return index;
}

double seconds(AVRational ratio) noexcept {
  return static_cast<double>(ratio.num) / static_cast<double>(ratio.den);
}

class FfmpegVideo : public VideoFile {
 public:
  FfmpegVideo(VideoInfo info, std::vector<double> times_s, RegularFile file, FrameIndex index)
      : VideoFile(std::move(info), std::move(times_s)),
        file_(std::move(file)),
        index_(std::move(index)) {}

 private:
  void decode_frames(std::span<const int64_t> frames,
                     const std::function<void(Image)>& take) override {
    if (!rests_) {
      decode_open(frames, take);
      return;
    }
    file_.reopen();
    struct Closing {
      RegularFile& file;
      ~Closing() { file.close(); }
    } const closing{file_};
    decode_open(frames, take);
  }

  void rest_frames(std::span<const int64_t> frames) override {
    index_.keep(frames);
    file_.close();
    rests_ = true;
  }

  void decode_open(std::span<const int64_t> frames, const std::function<void(Image)>& take) {
    std::optional<FfmpegReader> reader(std::in_place, file_, info().name);
    FfmpegPicture picture(orientation_of(reader->stream()), info().name);
    int64_t next = 0;  // the frame that the reader gives next, where it was not moved
    for (const int64_t frame : frames) {
      const AVFrame* decoded =
          index_.shown.empty() ? by_counting(*reader, frame, next) : by_time(*reader, frame, next);
      if (decoded == nullptr && !index_.shown.empty()) {
        // A container may have led to a place behind the frame: once more, from the beginning.
        reader.emplace(file_, info().name);
        next = 0;
        decoded = forward_to(*reader, index_.time_of(frame));
      }
      if (decoded == nullptr || decoded->decode_error_flags != 0 ||
          (decoded->flags & AV_FRAME_FLAG_CORRUPT) != 0) {
        throw_video(ErrorCode::kCorruptFile, info().name,
                    fmt::format("is damaged: its frame {} cannot be decoded; copy or download it "
                                "again",
                                frame));
      }
      next = frame + 1;
      take(picture.convert(*decoded));
    }
  }

  static const AVFrame* by_counting(FfmpegReader& reader, int64_t frame, int64_t next) {
    const AVFrame* decoded = nullptr;
    for (; next <= frame; ++next) {
      decoded = reader.next_frame();
      if (decoded == nullptr) break;
    }
    return decoded;
  }

  const AVFrame* by_time(FfmpegReader& reader, int64_t frame, int64_t next) const {
    const int64_t time = index_.time_of(frame);
    // Back to no key frame that has been passed: what lies between is decoded anyway.
    const auto behind = std::ranges::upper_bound(index_.keys, time);
    if (behind != index_.keys.begin()) {
      const int64_t key = *(behind - 1);
      if (next < frame && key > index_.time_of(next) && !reader.seek(key)) {
        return nullptr;
      }
    }
    return forward_to(reader, time);
  }

  /// Decodes up to the frame that is shown then; null where there is none.
  static const AVFrame* forward_to(FfmpegReader& reader, int64_t time) {
    for (;;) {
      const AVFrame* decoded = reader.next_frame();
      if (decoded == nullptr || decoded->pts == time) return decoded;
      if (decoded->pts != AV_NOPTS_VALUE && decoded->pts > time) return nullptr;
    }
  }

  RegularFile file_;
  FrameIndex index_;
  bool rests_ = false;
};

}  // namespace

bool reads_video_files() noexcept { return true; }

std::unique_ptr<VideoFile> open_ffmpeg_video(RegularFile file, const std::string& name) {
  std::optional<FfmpegReader> reader(std::in_place, file, name);
  std::optional<FrameIndex> index = index_packets(*reader, name);
  if (!index) {
    reader.emplace(file, name);
    index = index_frames(*reader, name);
  }
  const bool cut = reader->is_cut();
  const int64_t beyond = reader->packets_beyond_file();
  const unsigned streams = reader->video_streams();
  // What the container says of the size is not always what is decoded.
  reader.emplace(file, name);
  VideoInfo info{.name = name, .format = printable(reader->format_name())};
  const AVFrame* first = reader->next_frame();
  if (first == nullptr || index->frames == 0) {
    refuse_cut(file, name);
    throw_no_frame(name, info.format);
  }
  const Image picture = FfmpegPicture(orientation_of(reader->stream()), name).convert(*first);
  info.height = picture.height;
  info.width = picture.width;
  info.frames = index->frames;

  std::vector<double> times_s;
  const double unit_s = seconds(reader->stream().time_base);
  for (const int64_t shown : index->shown) {
    times_s.push_back(static_cast<double>(shown - index->shown[0]) * unit_s);
  }
  AVRational rate = reader->stream().avg_frame_rate;
  if (rate.num <= 0 || rate.den <= 0) rate = reader->stream().r_frame_rate;
  if (rate.num > 0 && rate.den > 0) {
    info.fps = seconds(rate);
  } else if (times_s.size() > 1 && times_s.back() > 0) {
    info.fps = static_cast<double>(times_s.size() - 1) / times_s.back();
  }
  if (info.fps > 0) {
    const double frame_s = 1 / info.fps;
    if (times_s.empty()) {
      for (int64_t i = 0; i < info.frames; ++i) times_s.push_back(static_cast<double>(i) * frame_s);
    }
    info.duration_s = times_s.back() + frame_s;
  }
  if (cut || beyond > 0) {
    const double rest_s = reader->stated_end_s() - info.duration_s;
    const int64_t missing = beyond > 0 ? beyond : std::llround(std::max(rest_s, 0.0) * info.fps);
    warn_of_missing_frames(info, missing);
  }
  if (streams > 1) {
    info.warnings.push_back(fmt::format(
        "video {} has {} video streams, and only the first is read: {} frames; copy another stream "
        "to its own file to ask about it",
        name, streams, info.frames));
  }
  return std::make_unique<FfmpegVideo>(std::move(info), std::move(times_s), std::move(file),
                                       std::move(*index));
}

}  // namespace kvlm
