// The one place where stb_image is compiled, with the formats that it is used for and no others.
#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_TGA
#define STBI_NO_STDIO
#define STBI_MAX_DIMENSIONS 65535
#include "vision/stb.h"

#include <stb_image.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "vision/decoders.h"

namespace kvlm {

namespace {

/// What stb_image has not read yet, for its callbacks.
struct Rest {
  std::span<const std::byte> header;
  std::span<const std::byte> data;

  size_t take(std::byte* out, size_t count) noexcept {
    size_t taken = 0;
    for (auto* part : {&header, &data}) {
      const size_t step = std::min(count - taken, part->size());
      if (out != nullptr && step > 0) std::memcpy(out + taken, part->data(), step);
      *part = part->subspan(step);
      taken += step;
    }
    return taken;
  }
};

int read_some(void* user, char* out, int count) {
  auto& rest = *static_cast<Rest*>(user);
  return static_cast<int>(
      rest.take(reinterpret_cast<std::byte*>(out), static_cast<size_t>(std::max(count, 0))));
}

void skip_some(void* user, int count) {
  static_cast<Rest*>(user)->take(nullptr, static_cast<size_t>(std::max(count, 0)));
}

int is_at_end(void* user) {
  const auto& rest = *static_cast<const Rest*>(user);
  return rest.header.empty() && rest.data.empty() ? 1 : 0;
}

constexpr stbi_io_callbacks kCallbacks{read_some, skip_some, is_at_end};

}  // namespace

StbPixels stb_decode(const StbFile& file, const std::string& name) {
  Rest rest{file.header, file.data};
  int width = 0;
  int height = 0;
  int channels = 0;
  StbPixels pixels(
      stbi_load_from_callbacks(&kCallbacks, &rest, &width, &height, &channels, file.channels));
  if (pixels == nullptr) {
    const char* reason = stbi_failure_reason();
    const std::string detail = reason != nullptr ? reason : "its pixels cannot be decoded";
    if (detail == "outofmem") throw std::bad_alloc();
    throw_damaged(file.format, name, detail);
  }
  if (width != file.width || height != file.height) {
    throw_damaged(file.format, name, "its sizes differ");
  }
  return pixels;
}

}  // namespace kvlm
