#include "vision/webp_container.h"

#include <optional>

#include "vision/exif.h"

namespace kvlm {

namespace {

constexpr size_t kRiffHeaderBytes = 8;

/// The first metadata chunk of that name; empty without one.
std::span<const std::byte> metadata(const WebPDemuxer* demuxer, const char* chunk_name) {
  WebPChunkIterator chunk;
  std::span<const std::byte> data;  // points into the file
  if (WebPDemuxGetChunk(demuxer, chunk_name, 1, &chunk) != 0) {
    data = std::as_bytes(std::span(chunk.chunk.bytes, chunk.chunk.size));
  }
  WebPDemuxReleaseChunkIterator(&chunk);
  return data;
}

}  // namespace

WebpDemuxer open_webp(std::span<const std::byte> bytes, const std::string& name) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  if (bytes.size() < kRiffHeaderBytes) throw_truncated(kWebpFormat, name);
  uint64_t said = kRiffHeaderBytes;
  for (size_t i = 0; i < 4; ++i) said += uint64_t{data[4 + i]} << 8 * i;
  if (said > bytes.size()) throw_truncated(kWebpFormat, name);
  const WebPData file{data, bytes.size()};
  WebpDemuxer demuxer(WebPDemux(&file));
  if (demuxer == nullptr) throw_damaged(kWebpFormat, name, "its chunks do not fit together");
  return demuxer;
}

ImageHeader read_webp_canvas(const WebPDemuxer* demuxer) {
  std::optional<int> orientation = exif_orientation(metadata(demuxer, "EXIF"));
  if (!orientation) orientation = xmp_orientation(metadata(demuxer, "XMP "));
  return {.height = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_HEIGHT),
          .width = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_WIDTH),
          .orientation = orientation.value_or(1)};
}

}  // namespace kvlm
