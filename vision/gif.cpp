#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "vision/decoders.h"
#include "vision/stb.h"

namespace kvlm {

namespace {

constexpr char kFormat[] = "GIF";
// stb_image holds nine bytes a pixel, besides the three of the result.
constexpr int64_t kMaxPixels = int64_t{1} << 26;
// A code of 12 bits stands for at most 4096 pixels.
constexpr int64_t kPixelsPerByte = 4096;

using Palette = std::array<std::array<uint8_t, 3>, 256>;

Palette grey_palette() noexcept {
  Palette palette;
  for (size_t i = 0; i < palette.size(); ++i) palette[i].fill(static_cast<uint8_t>(i));
  return palette;
}

/// Reads the blocks of a file; throws where it ends.
class BlockReader {
 public:
  BlockReader(std::span<const std::byte> rest, const std::string& name) noexcept
      : rest_(rest), name_(name) {}

  std::span<const std::byte> take(size_t count) {
    if (count > rest_.size()) throw_truncated(kFormat, name_);
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  uint8_t u8() { return std::to_integer<uint8_t>(take(1)[0]); }
  int u16() {
    const int low = u8();
    return low | u8() << 8;
  }
  /// Takes pieces, each behind its length, up to an empty one; returns the first.
  std::span<const std::byte> take_pieces() {
    const auto first = take(u8());
    for (size_t length = first.size(); length > 0;) {
      length = u8();
      take(length);
    }
    return first;
  }
  /// Takes a palette. As with Pillow, entries that it lacks are black, unless its entries are the
  /// greys by their own numbers.
  Palette take_palette(int flags) {
    const Palette greys = grey_palette();
    Palette palette{};
    const size_t count = size_t{2} << (flags & 7);
    for (size_t i = 0; i < count; ++i) {
      for (uint8_t& value : palette[i]) value = u8();
    }
    return std::equal(palette.begin(), palette.begin() + count, greys.begin()) ? greys : palette;
  }
  std::span<const std::byte> rest() const noexcept { return rest_; }

 private:
  std::span<const std::byte> rest_;
  const std::string& name_;
};

/// The canvas and the first picture on it.
struct GifHeader {
  int height;
  int width;
  int left;
  int top;
  int frame_height;
  int frame_width;
  bool interlaced;
  Palette palette;
  std::optional<uint8_t> transparent;  // an index
  std::span<const std::byte> data;     // the picture's codes and what follows
};

GifHeader read_header(std::span<const std::byte> bytes, const std::string& name) {
  constexpr int kHasPalette = 0x80;
  BlockReader reader(bytes, name);
  reader.take(6);  // the signature
  GifHeader header{};
  header.width = reader.u16();
  header.height = reader.u16();
  const int flags = reader.u8();
  reader.take(2);  // background, aspect ratio
  header.palette = (flags & kHasPalette) != 0 ? reader.take_palette(flags) : grey_palette();
  for (;;) {
    const uint8_t mark = reader.u8();
    if (mark == ';') throw_damaged(kFormat, name, "it has no picture");
    if (mark == '!') {
      const bool graphic_control = reader.u8() == 0xf9;
      const auto block = reader.take_pieces();
      if (graphic_control && block.size() >= 4 && (std::to_integer<int>(block[0]) & 1) != 0) {
        header.transparent = std::to_integer<uint8_t>(block[3]);
      }
    }
    if (mark == ',') break;  // bytes between the blocks are passed over
  }
  header.left = reader.u16();
  header.top = reader.u16();
  header.frame_width = reader.u16();
  header.frame_height = reader.u16();
  const int frame_flags = reader.u8();
  header.interlaced = (frame_flags & 0x40) != 0;
  if ((frame_flags & kHasPalette) != 0) {
    const Palette local = reader.take_palette(frame_flags);
    if (local != grey_palette()) header.palette = local;  // Pillow takes greys for no palette
  }
  header.data = reader.rest();
  // A picture that is larger than the canvas extends it.
  header.width = std::max(header.width, header.left + header.frame_width);
  header.height = std::max(header.height, header.top + header.frame_height);
  return header;
}

/// A file of the first picture alone, up to its codes: nothing transparent, no background.
std::vector<std::byte> canonical_header(const GifHeader& header) {
  std::vector<std::byte> out;
  const auto put = [&](int value) { out.push_back(static_cast<std::byte>(value & 0xff)); };
  const auto put_u16 = [&](int value) {
    put(value);
    put(value >> 8);
  };
  for (const char c : std::string_view("GIF89a")) put(c);
  put_u16(header.width);
  put_u16(header.height);
  put(0xf7);  // a palette of 256
  put(0);
  put(0);
  for (const auto& entry : header.palette) {
    for (const uint8_t value : entry) put(value);
  }
  put(',');
  for (const int side : {header.left, header.top, header.frame_width, header.frame_height}) {
    put_u16(side);
  }
  put(header.interlaced ? 0x40 : 0);
  return out;
}

void check_pixels(const GifHeader& header, const std::string& name) {
  check_size(header.height, header.width, kFormat, name);
  if (int64_t{header.height} * header.width > kMaxPixels) {
    throw Error(ErrorCode::kCorruptFile,
                "image " + name + " is a GIF of " + std::to_string(header.width) + " x " +
                    std::to_string(header.height) + " pixels, more than the " +
                    std::to_string(kMaxPixels) + " that are decoded; scale it down first");
  }
}

}  // namespace

ImageHeader read_gif_header(std::span<const std::byte> bytes, const std::string& name) {
  const GifHeader header = read_header(bytes, name);
  check_pixels(header, name);
  return {.height = header.height, .width = header.width};
}

DecodedImage decode_gif(std::span<const std::byte> bytes, const std::string& name) {
  const GifHeader header = read_header(bytes, name);
  check_pixels(header, name);
  BlockReader codes(header.data, name);
  codes.take(1);  // the size of the first codes
  codes.take_pieces();
  check_file_bytes(header.frame_height, header.frame_width, bytes.size(), kPixelsPerByte, kFormat,
                   name);

  const StbPixels rgba = stb_decode({.header = canonical_header(header),
                                     .data = header.data,
                                     .format = kFormat,
                                     .height = header.height,
                                     .width = header.width,
                                     .channels = 4},
                                    name);
  DecodedImage result;
  result.image = allocate_image(header.height, header.width, name);
  const auto ground = header.palette[header.transparent.value_or(0)];
  const uint8_t* in = rgba.get();
  uint8_t* out = result.image.rgb.data();
  for (int y = 0; y < header.height; ++y) {
    for (int x = 0; x < header.width; ++x, in += 4, out += 3) {
      if (in[3] != 0) {
        std::copy_n(in, 3, out);
        continue;
      }
      const bool inside = x >= header.left && x < header.left + header.frame_width &&
                          y >= header.top && y < header.top + header.frame_height;
      if (inside) throw_damaged(kFormat, name, "its codes end before its pixels");
      std::ranges::copy(ground, out);
    }
  }
  if (header.transparent) whiten(result.image, ground);
  return result;
}

}  // namespace kvlm
