#include "vision/webp_container.h"

#include <optional>

#include "vision/exif.h"

namespace kvlm {

namespace {

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

bool webp_is_cut(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < kRiffHeaderBytes) return true;
  uint64_t said = kRiffHeaderBytes;
  for (size_t i = 0; i < 4; ++i) said += std::to_integer<uint64_t>(bytes[4 + i]) << 8 * i;
  return said > bytes.size();
}

WebpDemuxer open_webp(std::span<const std::byte> bytes, const std::string& name) {
  const bool cut = webp_is_cut(bytes);
  const WebPData file{reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
  WebPDemuxState state = WEBP_DEMUX_PARSE_ERROR;
  WebpDemuxer demuxer(WebPDemuxPartial(&file, &state));
  const bool begun = demuxer != nullptr && state != WEBP_DEMUX_PARSING_HEADER;
  if (!begun || (!cut && state != WEBP_DEMUX_DONE)) {
    if (cut) throw_truncated(kWebpFormat, name);
    throw_damaged(kWebpFormat, name, "its chunks do not fit together");
  }
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
