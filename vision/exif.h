#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace kvlm {

/// The Orientation (tag 274) of an EXIF block, or nothing if it has none or cannot be read. The
/// block is a TIFF header and its first directory, optionally after "Exif\0\0". Reads only inside
/// `block`, allocates nothing and never throws, whatever the bytes are.
/// The value is what the file says and may be outside 1 to 8. Source: CIPA DC-008 (Exif 2.3), 4.6.
std::optional<int> exif_orientation(std::span<const std::byte> block) noexcept;

/// The first tiff:Orientation digit of an XMP packet, or nothing.
std::optional<int> xmp_orientation(std::span<const std::byte> packet) noexcept;

}  // namespace kvlm
