#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// An 8-bit RGB picture, row-major, three bytes a pixel.
struct Image {
  int height = 0;
  int width = 0;
  std::vector<uint8_t> rgb;  // (height, width, 3)
  std::string name{};        ///< the file, fit for messages; may be empty
  /// What of the file is not in `rgb`: one sentence each, which names the image.
  std::vector<std::string> warnings{};
};

/// What the headers of a picture say, found without decoding a pixel.
struct ImageInfo {
  int height = 0;
  int width = 0;
  std::string_view format;  ///< "PNG", "JPEG", ...
};

/// Whether the EXIF orientation of a picture (or, without one, that of its XMP packet) is applied,
/// as image loaders of the reference do, or left alone, as PIL.Image.open does.
enum class Orientation : uint8_t { kApply, kIgnore };

/// Decodes to RGB as the reference's loader and image processor do (transformers 5.23 on Pillow
/// 13), bit for bit: PNG (1, 2, 4, 8, 16 bit; grey, palette, alpha, interlaced), JPEG (baseline,
/// progressive, grey, CMYK), WebP and GIF (of an animation the first picture), BMP (1 to 32 bit,
/// not run-length coded), PNM (P5 and P6) and TGA. Grey is replicated, alpha dropped without
/// blending, 16-bit colour samples keep their high byte, and 16-bit grey without alpha is clipped
/// at 255, not scaled; what a palette or a key colour declares fully transparent is white. The
/// format is told from the bytes, not from the name.
///
/// `name` is only used in messages, which show it without controls and without the beginning of a
/// very long one. An image that ends early or is damaged is decoded up to there, with a warning
/// that states the share of its pixels that is lost (a missing end mark alone loses none); so is
/// one whose samples were clipped. Throws Error{kCorruptFile}: empty, not an image, more than two
/// thirds of its pixels (or an unknown share) lost, larger than 2^28 pixels or 65535 pixels on a
/// side;
/// Error{kOutOfMemory}; Error{kUnsupported} for a picture format or variant that is recognised
/// (TIFF, HEIC, ...) but not built in, naming it.
Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   Orientation orientation = Orientation::kApply);

/// The size that decode_image(bytes, name, orientation) gives, for a caller who wants to know it
/// before there is memory for the pixels. Costs no more than reading headers and throws what
/// decode_image says, where the headers show it: a picture that passes may still be damaged.
ImageInfo probe_image(std::span<const std::byte> bytes, const std::string& name,
                      Orientation orientation = Orientation::kApply);

/// The bytes of a picture file, or of standard input for the path "-" (which can be read once).
/// Refuses with Error{kCorruptFile} what is missing, no regular file (a pipe or a device could make
/// it wait or read for ever), unreadable, longer than 1 GiB, or does not begin like a picture;
/// with Error{kInvalidArgument} a path that holds a NUL. Never waits but for standard input, where
/// a signal whose handler was installed without SA_RESTART ends the wait: Error{kCancelled}.
std::vector<std::byte> read_image(const std::filesystem::path& path);

/// How messages call the picture of that path.
std::string image_name(const std::filesystem::path& path);

/// decode_image and probe_image of read_image(path).
Image load_image(const std::filesystem::path& path, Orientation orientation = Orientation::kApply);
ImageInfo probe_image(const std::filesystem::path& path,
                      Orientation orientation = Orientation::kApply);

}  // namespace kvlm
