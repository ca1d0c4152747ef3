#include "vision/exif.h"

#include <cstdint>
#include <string_view>

namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr uint32_t kOrientationTag = 274;
constexpr size_t kEntryBytes = 12;

std::string_view as_text(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Unsigned integers of a TIFF block in the block's byte order. The caller checks the bounds.
class TiffBytes {
 public:
  TiffBytes(std::span<const std::byte> bytes, bool big_endian) noexcept
      : bytes_(bytes), big_endian_(big_endian) {}

  uint32_t u16(size_t at) const noexcept { return read(at, 2); }
  uint32_t u32(size_t at) const noexcept { return read(at, 4); }
  bool has(size_t at, size_t count) const noexcept {
    return at <= bytes_.size() && count <= bytes_.size() - at;
  }

 private:
  uint32_t read(size_t at, size_t count) const noexcept {
    uint32_t value = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t from = big_endian_ ? at + i : at + count - 1 - i;
      value = value << 8 | std::to_integer<uint32_t>(bytes_[from]);
    }
    return value;
  }

  std::span<const std::byte> bytes_;
  bool big_endian_;
};

/// The value of a directory entry if it is a single integer that fits the entry itself.
std::optional<int> inline_integer(const TiffBytes& tiff, size_t entry) noexcept {
  if (tiff.u32(entry + 4) != 1) return std::nullopt;
  switch (tiff.u16(entry + 2)) {
    case 3:  // SHORT
    case 8:  // SSHORT
      return static_cast<int>(tiff.u16(entry + 8));
    case 4:  // LONG
    case 9:  // SLONG
      return static_cast<int>(tiff.u32(entry + 8) & 0x7fffffffu);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<int> exif_orientation(std::span<const std::byte> block) noexcept {
  // Some writers put the prefix twice; Pillow accepts that, too.
  for (int i = 0; i < 2 && as_text(block).starts_with("Exif\0\0"sv); ++i) block = block.subspan(6);
  const std::string_view text = as_text(block);
  const bool big_endian = text.starts_with("MM\0*"sv);
  if (!big_endian && !text.starts_with("II*\0"sv)) return std::nullopt;
  const TiffBytes tiff(block, big_endian);
  if (!tiff.has(4, 4)) return std::nullopt;
  const size_t directory = tiff.u32(4);
  if (!tiff.has(directory, 2)) return std::nullopt;

  std::optional<int> orientation;
  const size_t entries = tiff.u16(directory);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (!tiff.has(entry, kEntryBytes)) break;
    if (tiff.u16(entry) != kOrientationTag) continue;
    if (const auto value = inline_integer(tiff, entry)) orientation = value;
  }
  return orientation;
}

std::optional<int> xmp_orientation(std::span<const std::byte> packet) noexcept {
  constexpr std::string_view kKey = "tiff:Orientation";
  const std::string_view text = as_text(packet);
  for (size_t at = text.find(kKey); at != std::string_view::npos; at = text.find(kKey, at + 1)) {
    std::string_view rest = text.substr(at + kKey.size());
    if (rest.starts_with("=\"")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with(">")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') return rest[0] - '0';
  }
  return std::nullopt;
}

}  // namespace kvlm
