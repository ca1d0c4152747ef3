#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>

#include "kernels/base/error.h"
#include "vision/exif.h"
#include "vision/image.h"

namespace {

// Larger pictures are probed only: what is of interest is in their headers, and zeroing gigabytes
// leaves no time for it.
constexpr int64_t kMaxPixels = int64_t{1} << 20;

/// What `read` returns, or nothing after an Error, which must be one sentence that names the
/// picture.
template <class Read>
auto value_or_error(Read read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const kvlm::Error& error) {
    const std::string message = error.what();
    if (message.find("fuzz\\x0a") == std::string::npos) std::abort();
    if (message.find('\n') != std::string::npos) std::abort();
    return std::nullopt;
  }
}

}  // namespace

/// Any bytes are an image or an Error of one sentence, never anything else, and the size that is
/// told beforehand is the size that comes out.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  kvlm::exif_orientation(bytes);
  kvlm::xmp_orientation(bytes);
  const auto info = value_or_error([&] { return kvlm::probe_image(bytes, "fuzz\n"); });
  if (info && (info->height < 1 || info->width < 1)) std::abort();
  if (info && int64_t{info->height} * info->width > kMaxPixels) return 0;
  const auto image = value_or_error([&] { return kvlm::decode_image(bytes, "fuzz\n"); });
  if (!image) return 0;
  if (!info || image->height != info->height || image->width != info->width) std::abort();
  const size_t pixels = static_cast<size_t>(image->height) * static_cast<size_t>(image->width);
  if (image->rgb.size() != pixels * 3) std::abort();
  return 0;
}
