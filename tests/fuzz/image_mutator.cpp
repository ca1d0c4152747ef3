// What libFuzzer does to a picture, so that it gets past checksums: a PNG's are set right again,
// now and then its pixels are changed before they are deflated, and a WebP says its own length. The
// decoders of libpng, libjpeg-turbo and libwebp are not instrumented; all code of this project and
// stb_image are.
#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using namespace std::string_view_literals;

constexpr std::string_view kPngSignature = "\x89PNG\r\n\x1a\n"sv;
constexpr size_t kFrameBytes = 12;         // length, type and checksum of a chunk
constexpr size_t kMaxInflated = 1u << 16;  // more pixels are not worth the time

bool begins_with(const uint8_t* data, size_t size, std::string_view text) {
  return size >= text.size() && std::memcmp(data, text.data(), text.size()) == 0;
}

size_t read_u32(const uint8_t* data) {
  return size_t{data[0]} << 24 | size_t{data[1]} << 16 | size_t{data[2]} << 8 | data[3];
}

void write_u32(uint8_t* data, size_t value) {
  for (size_t i = 0; i < 4; ++i) data[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

/// Offset of the chunk behind the one at `at`, or 0 where that is not whole.
size_t next_chunk(const uint8_t* data, size_t size, size_t at) {
  if (at + kFrameBytes > size) return 0;
  const size_t length = read_u32(data + at);
  return length <= size - at - kFrameBytes ? at + kFrameBytes + length : 0;
}

void mend_checksums(uint8_t* data, size_t size) {
  size_t at = kPngSignature.size();
  for (size_t next = next_chunk(data, size, at); next != 0; next = next_chunk(data, size, at)) {
    write_u32(data + next - 4, crc32_z(0, data + at + 4, next - at - 8));
    at = next;
  }
}

/// Changes the inflated content of the first chunk that holds a zlib stream at its beginning.
/// Returns the new size, or `size` if there is none or it does not fit.
size_t mutate_pixels(uint8_t* data, size_t size, size_t max_size) {
  size_t at = kPngSignature.size();
  size_t next = next_chunk(data, size, at);
  while (next != 0 && std::memcmp(data + at + 4, "IDAT", 4) != 0) {
    at = next;
    next = next_chunk(data, size, at);
  }
  if (next == 0) return size;
  std::vector<uint8_t> pixels(kMaxInflated);
  uLongf length = pixels.size() / 2;
  if (uncompress(pixels.data(), &length, data + at + 8, next - at - kFrameBytes) != Z_OK) {
    return size;
  }
  const size_t changed = LLVMFuzzerMutate(pixels.data(), length, pixels.size());
  uLongf packed = compressBound(changed);
  std::vector<uint8_t> stream(packed);
  if (compress(stream.data(), &packed, pixels.data(), changed) != Z_OK) return size;
  const size_t tail = size - next;
  const size_t total = at + kFrameBytes + packed + tail;
  if (total > max_size) return size;
  std::memmove(data + at + kFrameBytes + packed, data + next, tail);
  write_u32(data + at, packed);
  std::copy_n(stream.begin(), packed, data + at + 8);
  return total;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (begins_with(data, size, kPngSignature) && seed % 4 == 0) {
    size = mutate_pixels(data, size, max_size);
  } else {
    size = LLVMFuzzerMutate(data, size, max_size);
  }
  if (seed % 16 == 1) return size;  // wrong ones are input, too
  if (begins_with(data, size, kPngSignature)) mend_checksums(data, size);
  if (begins_with(data, size, "RIFF"sv) && size >= 8) {
    for (size_t i = 0; i < 4; ++i) data[4 + i] = static_cast<uint8_t>((size - 8) >> 8 * i);
  }
  return size;
}
