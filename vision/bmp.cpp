#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "vision/decoders.h"

namespace kvlm {

namespace {

// Read here, because stb_image differs from Pillow in 16-bit pixels (it repeats the upper bits of a
// channel where Pillow scales) and in files that give no offset of their pixels.
constexpr char kFormat[] = "BMP";
constexpr size_t kFileHeaderBytes = 14;
constexpr uint32_t kRaw = 0;
constexpr uint32_t kBitfields = 3;

/// Little-endian reads that throw at the end of the file.
class LittleEndian {
 public:
  LittleEndian(std::span<const std::byte> bytes, const std::string& name) noexcept
      : bytes_(bytes), name_(name) {}

  uint32_t u16(size_t at) const { return read(at, 2); }
  uint32_t u32(size_t at) const { return read(at, 4); }
  size_t size() const noexcept { return bytes_.size(); }
  const uint8_t* at(size_t offset) const noexcept {
    return reinterpret_cast<const uint8_t*>(bytes_.data()) + offset;
  }

 private:
  uint32_t read(size_t at, size_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) throw_truncated(kFormat, name_);
    uint32_t value = 0;
    for (size_t i = count; i-- > 0;) value = value << 8 | std::to_integer<uint32_t>(bytes_[at + i]);
    return value;
  }

  std::span<const std::byte> bytes_;
  const std::string& name_;
};

struct BmpHeader {
  int64_t height = 0;
  int64_t width = 0;
  bool top_down = false;
  uint32_t bits = 0;
  std::array<uint32_t, 3> masks{};  // red, green, blue; of 16 and 32 bits
  uint32_t alpha_mask = 0;          // of 32 bits; 0: no alpha
  size_t pixels_at = 0;
  size_t palette_at = 0;
  size_t palette_entries = 0;
  size_t palette_entry_bytes = 4;
};

BmpHeader read_header(const LittleEndian& file, const std::string& name) {
  BmpHeader header;
  header.pixels_at = file.u32(10);
  const size_t info_bytes = file.u32(kFileHeaderBytes);
  uint32_t compression = kRaw;
  size_t masks_bytes = 0;
  if (info_bytes == 12) {  // OS/2
    header.width = file.u16(18);
    header.height = file.u16(20);
    header.bits = file.u16(24);
    header.palette_entry_bytes = 3;
  } else if (info_bytes >= 40 && info_bytes <= 124) {
    header.width = static_cast<int32_t>(file.u32(18));
    header.height = static_cast<int32_t>(file.u32(22));
    header.bits = file.u16(28);
    compression = file.u32(30);
    header.palette_entries = file.u32(46);
    header.top_down = header.height < 0;
    if (header.top_down) header.height = -header.height;
  } else {
    throw_damaged(kFormat, name, "its header is " + std::to_string(info_bytes) + " bytes long");
  }
  if (compression == kBitfields) {
    // Where the short header ends, the three masks follow; longer ones include them there.
    if (info_bytes == 40) masks_bytes = 12;
    for (size_t i = 0; i < 3; ++i) header.masks[i] = file.u32(54 + 4 * i);
    if (info_bytes >= 56 && header.bits == 32) header.alpha_mask = file.u32(66);
  } else if (compression != kRaw) {
    throw_unsupported("a compressed BMP (method " + std::to_string(compression) + ")", name);
  }
  if (header.bits == 32 && header.masks == std::array<uint32_t, 3>{}) {
    header.masks = {0xff0000, 0xff00, 0xff};
  }
  if (header.bits == 16 && compression == kRaw) header.masks = {0x7c00, 0x3e0, 0x1f};
  header.palette_at = kFileHeaderBytes + info_bytes + masks_bytes;
  size_t palette_bytes = 0;
  if (header.bits <= 8) {
    const size_t most = size_t{1} << header.bits;
    if (header.palette_entries == 0 || header.palette_entries > most) header.palette_entries = most;
    palette_bytes = header.palette_entries * header.palette_entry_bytes;
  }
  // Some writers give no offset of the pixels, or forget the palette in it.
  if (header.pixels_at == 0 || header.pixels_at == header.palette_at) {
    header.pixels_at = header.palette_at + palette_bytes;
  }
  return header;
}

/// The colours of a palette; entries that the file does not have are black.
std::array<std::array<uint8_t, 3>, 256> read_palette(const LittleEndian& file,
                                                     const BmpHeader& header) {
  std::array<std::array<uint8_t, 3>, 256> palette{};
  for (size_t i = 0; i < header.palette_entries; ++i) {
    const size_t at = header.palette_at + i * header.palette_entry_bytes;
    const uint32_t low = file.u16(at);
    palette[i] = {static_cast<uint8_t>(file.u16(at + 1) >> 8), static_cast<uint8_t>(low >> 8),
                  static_cast<uint8_t>(low & 0xff)};
  }
  return palette;
}

/// One channel of a packed pixel, widened to 8 bits by value * 255 / maximum, rounded down.
uint8_t channel(uint32_t pixel, uint32_t mask) noexcept {
  const int shift = std::countr_zero(mask);
  const uint32_t value = (pixel & mask) >> shift;
  return static_cast<uint8_t>(value * 255 / (mask >> shift));
}

/// Whether the masks of a 16- or 32-bit picture are among the usual ones.
bool masks_are_known(const BmpHeader& header) noexcept {
  using Masks = std::array<uint32_t, 3>;
  if (header.bits == 16) {
    return header.masks == Masks{0xf800, 0x7e0, 0x1f} || header.masks == Masks{0x7c00, 0x3e0, 0x1f};
  }
  uint32_t seen = 0;
  for (const uint32_t mask : header.masks) {
    const bool one_byte = mask != 0 && std::countr_zero(mask) % 8 == 0 &&
                          mask >> std::countr_zero(mask) == 0xff && (seen & mask) == 0;
    if (!one_byte) return false;
    seen |= mask;
  }
  return true;
}

}  // namespace

ImageHeader read_bmp_header(std::span<const std::byte> bytes, const std::string& name) {
  const BmpHeader header = read_header(LittleEndian(bytes, name), name);
  return {.height = header.height, .width = header.width};
}

DecodedImage decode_bmp(std::span<const std::byte> bytes, const std::string& name) {
  const BmpHeader header = read_header(LittleEndian(bytes, name), name);
  const uint32_t bits = header.bits;
  if (bits != 1 && bits != 4 && bits != 8 && bits != 16 && bits != 24 && bits != 32) {
    throw_unsupported("a BMP of " + std::to_string(bits) + " bits a pixel", name);
  }
  if ((bits == 16 || bits == 32) && !masks_are_known(header)) {
    throw_unsupported("a BMP with an unusual order of bits", name);
  }
  check_size(header.height, header.width, kFormat, name);
  const auto height = static_cast<size_t>(header.height);
  const auto width = static_cast<size_t>(header.width);
  const size_t used_bytes = (width * bits + 7) / 8;
  const size_t row_bytes = (used_bytes + 3) / 4 * 4;
  // The padding of the last row may be missing.
  const size_t pixel_bytes = (height - 1) * row_bytes + used_bytes;
  if (header.pixels_at > bytes.size()) throw_truncated(kFormat, name);
  const size_t missing = pixel_bytes - std::min(pixel_bytes, bytes.size() - header.pixels_at);
  auto warnings = warn_of_missing(static_cast<double>(missing) / static_cast<double>(pixel_bytes),
                                  kFormat, name);
  std::vector<std::byte> padded;
  if (missing > 0) padded = with_zeros(bytes, header.pixels_at + pixel_bytes);
  const LittleEndian file(missing > 0 ? padded : bytes, name);

  const int channels = header.alpha_mask != 0 ? 4 : 3;
  DecodedImage result;
  result.image = allocate_image(header.height, header.width, name, channels);
  result.image.warnings = std::move(warnings);
  std::array<std::array<uint8_t, 3>, 256> palette{};
  if (bits <= 8) palette = read_palette(file, header);
  for (size_t y = 0; y < height; ++y) {
    const size_t source = header.top_down ? y : height - 1 - y;
    const uint8_t* in = file.at(header.pixels_at + source * row_bytes);
    uint8_t* out = result.image.rgb.data() + y * width * static_cast<size_t>(channels);
    for (size_t x = 0; x < width; ++x, out += channels) {
      if (bits <= 8) {
        const size_t first_bit = x * bits;
        const uint32_t shift = 8 - bits - static_cast<uint32_t>(first_bit % 8);
        std::ranges::copy(palette[(in[first_bit / 8] >> shift) & ((1u << bits) - 1)], out);
      } else if (bits == 24) {
        for (size_t c = 0; c < 3; ++c) out[c] = in[3 * x + 2 - c];
      } else {
        uint32_t pixel = 0;
        for (size_t i = bits / 8; i-- > 0;) pixel = pixel << 8 | in[x * (bits / 8) + i];
        for (size_t c = 0; c < 3; ++c) out[c] = channel(pixel, header.masks[c]);
        if (channels == 4) out[3] = channel(pixel, header.alpha_mask);
      }
    }
  }
  return result;
}

}  // namespace kvlm
