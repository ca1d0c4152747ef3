#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "vision/decoders.h"
#include "vision/stb.h"

// TGA as Pillow reads it: palettes, grey and colour, run-length coded or not, rows in either order.
namespace kvlm {

namespace {

constexpr char kFormat[] = "TGA";
constexpr size_t kHeaderBytes = 18;
constexpr size_t kPaletteEntries = 256;
constexpr int kRunLengths = 8;  // this bit of the type

size_t u8(std::span<const std::byte> bytes, size_t at) noexcept {
  return std::to_integer<size_t>(bytes[at]);
}
size_t u16(std::span<const std::byte> bytes, size_t at) noexcept {
  return u8(bytes, at) | u8(bytes, at + 1) << 8;
}

struct TgaHeader {
  size_t id_bytes;
  bool has_palette;
  size_t type;  // 1: indices into a palette, 2: colour, 3: grey
  bool run_lengths;
  size_t palette_first;
  size_t palette_count;
  size_t palette_bits;
  size_t width;
  size_t height;
  size_t bits;
  size_t flags;

  bool has_alpha() const noexcept {
    const bool room = type == 1 ? palette_bits == 32 : bits == 32 || (type == 3 && bits == 16);
    return room && (flags & 0xf) != 0;  // else the bits mean nothing
  }
  size_t pixel_bytes() const noexcept { return bits / 8; }
  size_t palette_bytes() const noexcept {
    return has_palette ? palette_count * (palette_bits / 8) : 0;
  }
};

/// `bytes` are at least kHeaderBytes.
TgaHeader parse(std::span<const std::byte> bytes) noexcept {
  const size_t type = u8(bytes, 2);
  return {.id_bytes = u8(bytes, 0),
          .has_palette = u8(bytes, 1) == 1,
          .type = type & ~size_t{kRunLengths},
          .run_lengths = (type & kRunLengths) != 0,
          .palette_first = u16(bytes, 3),
          .palette_count = u16(bytes, 5),
          .palette_bits = u8(bytes, 7),
          .width = u16(bytes, 12),
          .height = u16(bytes, 14),
          .bits = u8(bytes, 16),
          .flags = u8(bytes, 17)};
}

/// The kinds that Pillow reads; a palette of 16 bits exists on paper.
bool is_known(const TgaHeader& header) noexcept {
  const size_t bits = header.bits;
  const size_t palette = header.palette_bits;
  if (header.has_palette && palette != 24 && palette != 32) return false;
  if (header.width == 0 || header.height == 0 || header.flags >= 0x40) return false;
  switch (header.type) {
    case 1:
      return bits == 8 && header.has_palette && header.palette_count > 0 &&
             header.palette_first + header.palette_count <= kPaletteEntries;
    case 2:
      return bits == 16 || bits == 24 || bits == 32;
    case 3:
      return bits == 8 || bits == 16;
    default:
      return false;
  }
}

/// What of run-length coded data there is.
struct Runs {
  size_t bytes = 0;    // of whole packets
  size_t missing = 0;  // pixels
};

Runs whole_runs(std::span<const std::byte> data, size_t pixels, size_t pixel_bytes) noexcept {
  Runs runs{.bytes = 0, .missing = pixels};
  while (runs.missing > 0 && runs.bytes < data.size()) {
    const size_t packet = u8(data, runs.bytes);
    const size_t count = 1 + (packet & 127);
    const size_t end = runs.bytes + 1 + (packet >= 128 ? 1 : count) * pixel_bytes;
    if (end > data.size()) break;
    runs.bytes = end;
    runs.missing -= std::min(runs.missing, count);
  }
  return runs;
}

/// Packets of zeros for that many pixels.
void append_runs(std::vector<std::byte>& data, size_t pixels, size_t pixel_bytes) {
  while (pixels > 0) {
    const size_t count = std::min<size_t>(pixels, 128);
    data.push_back(static_cast<std::byte>(127 + count));
    data.resize(data.size() + pixel_bytes);
    pixels -= count;
  }
}

void mirror_rows(Image& image, std::ptrdiff_t channels) noexcept {
  const auto row_bytes = static_cast<std::ptrdiff_t>(image.width) * channels;
  for (auto row = image.rgb.begin(); row != image.rgb.end(); row += row_bytes) {
    std::reverse(row, row + row_bytes);  // channels, too, so each pixel again
    for (auto pixel = row; pixel != row + row_bytes; pixel += channels) {
      std::reverse(pixel, pixel + channels);
    }
  }
}

}  // namespace

bool is_tga(std::string_view head) noexcept {
  // There is no signature: all of the header must make sense.
  if (head.size() < kHeaderBytes) return false;
  const auto bytes = std::as_bytes(std::span(head));
  return u8(bytes, 1) <= 1 && is_known(parse(bytes));
}

ImageHeader read_tga_header(std::span<const std::byte> bytes, const std::string&) {
  const TgaHeader header = parse(bytes);
  return {.height = static_cast<int64_t>(header.height),
          .width = static_cast<int64_t>(header.width)};
}

DecodedImage decode_tga(std::span<const std::byte> bytes, const std::string& name) {
  const TgaHeader header = parse(bytes);
  const auto height = static_cast<int64_t>(header.height);
  const auto width = static_cast<int64_t>(header.width);
  check_size(height, width, kFormat, name);
  const size_t palette_at = kHeaderBytes + header.id_bytes;
  const size_t data_at = palette_at + header.palette_bytes();
  if (data_at > bytes.size()) throw_truncated(kFormat, name);
  auto data = bytes.subspan(data_at);
  const size_t pixels = header.width * header.height;
  const size_t pixel_bytes = header.pixel_bytes();
  Runs runs{.bytes = data.size(), .missing = pixels - std::min(pixels, data.size() / pixel_bytes)};
  if (header.run_lengths) runs = whole_runs(data, pixels, pixel_bytes);
  auto warnings = warn_of_missing(static_cast<double>(runs.missing) / static_cast<double>(pixels),
                                  kFormat, name);
  std::vector<std::byte> padded;
  if (runs.missing > 0) {
    padded = with_zeros(data.first(runs.bytes), header.run_lengths ? 0 : pixels * pixel_bytes);
    if (header.run_lengths) append_runs(padded, runs.missing, pixel_bytes);
    data = padded;
  }

  // A header without what stb_image misunderstands: a palette that does not begin at 0 or belongs
  // to a picture of colours, and indices beyond it, which are black.
  const bool indexed = header.type == 1;
  std::vector<std::byte> canonical(kHeaderBytes);
  const auto put_u16 = [&](size_t at, size_t value) {
    canonical[at] = static_cast<std::byte>(value & 0xff);
    canonical[at + 1] = static_cast<std::byte>(value >> 8);
  };
  canonical[1] = static_cast<std::byte>(indexed ? 1 : 0);
  canonical[2] = static_cast<std::byte>(header.type | (header.run_lengths ? kRunLengths : 0));
  put_u16(12, header.width);
  put_u16(14, header.height);
  canonical[16] = static_cast<std::byte>(header.bits);
  canonical[17] = static_cast<std::byte>(header.flags & 0x20);  // top-down
  if (indexed) {
    put_u16(5, kPaletteEntries);
    canonical[7] = static_cast<std::byte>(header.palette_bits);
    const size_t entry_bytes = header.palette_bits / 8;
    canonical.resize(kHeaderBytes + kPaletteEntries * entry_bytes);
    std::ranges::copy(bytes.subspan(palette_at, header.palette_bytes()),
                      canonical.begin() + static_cast<std::ptrdiff_t>(
                                              kHeaderBytes + header.palette_first * entry_bytes));
  }
  const bool alpha = header.has_alpha();
  const StbPixels decoded = stb_decode({.header = canonical,
                                        .data = data,
                                        .format = kFormat,
                                        .height = static_cast<int>(height),
                                        .width = static_cast<int>(width),
                                        .channels = alpha ? 4 : 3},
                                       name);
  DecodedImage result;
  result.image = allocate_image(height, width, name, alpha ? 4 : 3);
  std::copy_n(decoded.get(), result.image.rgb.size(), result.image.rgb.begin());
  result.image.warnings = std::move(warnings);
  if ((header.flags & 0x10) != 0) mirror_rows(result.image, alpha ? 4 : 3);
  return result;
}

}  // namespace kvlm
