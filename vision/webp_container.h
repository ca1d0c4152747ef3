#pragma once

#include <webp/demux.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "vision/decoders.h"

namespace kvlm {

/// Private to vision/webp.cpp and vision/webp_video.cpp.

inline constexpr char kWebpFormat[] = "WebP";

struct WebpDemuxDeleter {
  void operator()(WebPDemuxer* demuxer) const noexcept { WebPDemuxDelete(demuxer); }
};
using WebpDemuxer = std::unique_ptr<WebPDemuxer, WebpDemuxDeleter>;

inline constexpr size_t kRiffHeaderBytes = 8;

/// Whether a file is shorter than it says.
bool webp_is_cut(std::span<const std::byte> bytes) noexcept;

/// Reads the container of a file, which must outlive it: sizes, frames and where the metadata are;
/// no pixel. Of one that is cut, what there is. Throws Error{kCorruptFile}.
WebpDemuxer open_webp(std::span<const std::byte> bytes, const std::string& name);

/// The canvas and how it is turned.
ImageHeader read_webp_canvas(const WebPDemuxer* demuxer);

}  // namespace kvlm
