#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace kvlm {

/// An 8-bit RGB picture, row-major, three bytes a pixel.
struct Image {
  int height = 0;
  int width = 0;
  std::vector<uint8_t> rgb;  // (height, width, 3)
  std::string name{};        ///< the file, for messages; may be empty
};

/// Whether the EXIF orientation of a JPEG or PNG (or, without one, that of its XMP packet) is
/// applied, as image loaders of the reference do, or left alone, as PIL.Image.open does.
enum class Orientation : uint8_t { kApply, kIgnore };

/// Decodes PNG (1, 2, 4, 8, 16 bit; grey, palette, alpha, interlaced), JPEG (baseline, progressive,
/// grey, CMYK) and BMP (1 to 32 bit, not run-length coded) to RGB as Pillow 13's convert("RGB")
/// does: grey is replicated, alpha dropped without blending, 16-bit colour samples keep their high
/// byte, and 16-bit grey without alpha is clipped at 255, not scaled. The format is told from the
/// bytes, not from the name.
///
/// `name` is only used in messages. Throws Error{kCorruptFile}: empty, not an image, truncated (a
/// JPEG that ends early included), damaged, larger than 2^28 pixels; Error{kUnsupported} for a
/// picture format or variant that is recognised (GIF, WebP, TIFF, HEIC, ...) but not built in,
/// naming it.
Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   Orientation orientation = Orientation::kApply);

/// decode_image of a file. Throws Error{kCorruptFile} if it is missing, a directory or unreadable.
Image load_image(const std::filesystem::path& path, Orientation orientation = Orientation::kApply);

}  // namespace kvlm
