#include "vision/png_chunks.h"

#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "vision/decoders.h"
#include "vision/exif.h"

// Walks the chunks of a PNG for its EXIF orientation, wherever the file keeps it. Lengths and
// checksums are checked before a chunk is believed.
namespace kvlm {

namespace {

constexpr size_t kSignatureBytes = 8;
constexpr size_t kChunkFrameBytes = 12;            // length, type and checksum
constexpr size_t kMaxTextBytes = size_t{1} << 20;  // Pillow's limit too

uint32_t big_endian(std::string_view bytes) noexcept {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

struct Chunk {
  std::string_view type;
  std::string_view data;
};

/// Takes one whole chunk from the front of `rest`; nothing at the end or where it is cut off.
std::optional<Chunk> take_chunk(std::string_view& rest) noexcept {
  if (rest.size() < kChunkFrameBytes) return std::nullopt;
  const size_t length = big_endian(rest);
  if (length > rest.size() - kChunkFrameBytes) return std::nullopt;
  const Chunk chunk{rest.substr(4, 4), rest.substr(8, length)};
  rest.remove_prefix(kChunkFrameBytes + length);
  return chunk;
}

/// Whether the four bytes behind the chunk are its checksum.
bool is_intact(const Chunk& chunk) noexcept {
  const auto* data = reinterpret_cast<const Bytef*>(chunk.type.data());  // the data follow it
  const uLong crc = crc32_z(crc32_z(0, nullptr, 0), data, 4 + chunk.data.size());
  return crc == big_endian({chunk.data.data() + chunk.data.size(), 4});
}

/// Takes what stands before the next NUL, and the NUL.
std::string_view take_word(std::string_view& text) noexcept {
  const size_t end = std::min(text.find('\0'), text.size());
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return word;
}

/// A text chunk's keyword and value, which may still be deflated.
struct Text {
  std::string_view key;
  std::string_view value;
  bool deflated = false;
};

std::optional<Text> read_text(const Chunk& chunk) noexcept {
  Text text;
  text.value = chunk.data;
  text.key = take_word(text.value);
  if (chunk.type == "tEXt") return text;
  if (chunk.type == "zTXt") {
    text.deflated = true;
    text.value.remove_prefix(std::min<size_t>(1, text.value.size()));  // the method
    return text;
  }
  if (chunk.type == "iTXt" && text.value.size() >= 2) {
    text.deflated = text.value[0] != 0;
    text.value.remove_prefix(2);
    take_word(text.value);  // the language
    take_word(text.value);  // the keyword in it
    return text;
  }
  return std::nullopt;
}

/// The value; nothing if it cannot be inflated or is longer than what is read.
std::string inflated(const Text& text) {
  if (!text.deflated) return std::string(text.value.substr(0, kMaxTextBytes));
  std::string value(kMaxTextBytes, '\0');
  uLongf length = value.size();
  uLong used = text.value.size();
  const int status = uncompress2(reinterpret_cast<Bytef*>(value.data()), &length,
                                 reinterpret_cast<const Bytef*>(text.value.data()), &used);
  value.resize(status == Z_OK ? length : 0);
  return value;
}

std::span<const std::byte> as_bytes(std::string_view text) noexcept {
  return std::as_bytes(std::span(text));
}

/// The EXIF block that ImageMagick writes as text: a name, a length and hexadecimal digits, one
/// line each.
std::vector<std::byte> parse_raw_profile(std::string_view text) {
  for (int line = 0; line < 3; ++line) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  std::vector<std::byte> block;
  int high = -1;
  for (const char c : text) {
    int digit = -1;
    if (c >= '0' && c <= '9') digit = c - '0';
    if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
    if (c >= 'A' && c <= 'F') digit = c - 'A' + 10;
    if (digit < 0) continue;
    if (high >= 0) block.push_back(static_cast<std::byte>(high * 16 + digit));
    high = high >= 0 ? -1 : digit;
  }
  return block;
}

}  // namespace

int png_orientation(std::span<const std::byte> bytes) {
  std::optional<int> by_chunk;
  std::optional<Text> profile;
  std::optional<Text> xmp;
  std::string_view rest = as_text(bytes.subspan(kSignatureBytes));
  while (const std::optional<Chunk> chunk = take_chunk(rest)) {
    if (chunk->type == "IEND") break;
    if (chunk->type == "eXIf" && is_intact(*chunk)) {
      by_chunk = exif_orientation(as_bytes(chunk->data));
    }
    const std::optional<Text> text = read_text(*chunk);
    if (!text) continue;
    // The key first: a file of many texts is not summed up for nothing.
    const bool is_profile = text->key == "Raw profile type exif";
    const bool is_xmp = text->key == "XML:com.adobe.xmp";
    if ((is_profile || is_xmp) && is_intact(*chunk)) (is_profile ? profile : xmp) = text;
  }
  if (by_chunk) return *by_chunk;
  if (profile) {
    if (const auto value = exif_orientation(parse_raw_profile(inflated(*profile)))) return *value;
  }
  if (xmp) return xmp_orientation(as_bytes(inflated(*xmp))).value_or(1);
  return 1;
}

}  // namespace kvlm
