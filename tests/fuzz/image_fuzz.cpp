#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "kernels/base/error.h"
#include "vision/exif.h"
#include "vision/image.h"

/// Any bytes are an image or an Error of one sentence, never anything else.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  kvlm::exif_orientation(bytes);
  kvlm::xmp_orientation(bytes);
  try {
    const kvlm::Image image = kvlm::decode_image(bytes, "fuzz");
    const size_t pixels = static_cast<size_t>(image.height) * static_cast<size_t>(image.width);
    if (pixels == 0 || image.rgb.size() != pixels * 3) std::abort();
  } catch (const kvlm::Error& error) {
    const std::string message = error.what();
    if (message.find("fuzz") == std::string::npos) std::abort();
    if (message.find('\n') != std::string::npos) std::abort();
  }
  return 0;
}
