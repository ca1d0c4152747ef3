#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "vision/decoders.h"
#include "vision/video_sources.h"

namespace {

// Larger ones are opened only: zeroing and copying megabytes leaves no time for what is of
// interest.
constexpr int64_t kMaxPixels = int64_t{1} << 18;
constexpr int64_t kMaxFrames = 64;

void open_and_decode(std::span<const std::byte> bytes, std::string_view format) {
  std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const auto video = format == "GIF" ? kvlm::open_gif_video(std::move(copy), "fuzz")
                                     : kvlm::open_webp_video(std::move(copy), "fuzz");
  const kvlm::VideoInfo& info = video->info();
  if (info.frames < 1 || info.height < 1 || info.width < 1) std::abort();
  if (!(info.fps > 0) || !(info.duration_s > 0)) std::abort();
  if (video->times_s().size() != static_cast<size_t>(info.frames)) std::abort();
  if (int64_t{info.height} * info.width > kMaxPixels || info.frames > kMaxFrames) return;
  std::vector<int64_t> frames;
  for (int64_t i = 0; i < info.frames; ++i) frames.push_back(i);
  size_t taken = 0;
  video->decode(frames, [&](const kvlm::Image& image) {
    const size_t pixels = static_cast<size_t>(info.height) * static_cast<size_t>(info.width);
    if (image.rgb.size() != pixels * 3) std::abort();
    ++taken;
  });
  if (taken != frames.size()) std::abort();
}

}  // namespace

/// An animation of any bytes is frames of the size and number that were told beforehand, or an
/// Error of one sentence that names it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const std::string_view format = kvlm::picture_format(bytes);
  if (format != "GIF" && format != "WebP") return -1;  // not worth keeping
  try {
    open_and_decode(bytes, format);
  } catch (const kvlm::Error& error) {
    const std::string message = error.what();
    if (message.find("fuzz") == std::string::npos) std::abort();
    if (message.find('\n') != std::string::npos) std::abort();
  }
  return 0;
}
