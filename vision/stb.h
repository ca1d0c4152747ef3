#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>

namespace kvlm {

struct StbFree {
  void operator()(void* pixels) const noexcept { std::free(pixels); }
};
using StbPixels = std::unique_ptr<uint8_t[], StbFree>;

/// A file as stb_image shall see it: a header that was written anew from what was checked, then
/// bytes of the file as they are.
struct StbFile {
  std::span<const std::byte> header;
  std::span<const std::byte> data;
  const char* format;  // for messages
  int height;
  int width;
  int channels;  // wanted: 3 or 4; samples are (height, width, channels)
};

/// Decodes through stb_image, which is used for TGA. It is lenient where a file ends early, so
/// callers check first that all of it is there; they also bound the size. Throws
/// Error{kCorruptFile} or std::bad_alloc.
StbPixels stb_decode(const StbFile& file, const std::string& name);

}  // namespace kvlm
