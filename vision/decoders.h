#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "vision/image.h"

namespace kvlm {

/// Private to vision/image.cpp and the kinds of video: how a file format is recognised, measured
/// and decoded. `bytes` begins as the format does and `name` is fit for messages; what throws,
/// throws what decode_image says.

/// What to give in place of a file that is no picture.
std::string readable_kinds();

/// What stands before the pixels.
struct ImageHeader {
  int64_t height = 0;
  int64_t width = 0;
  int orientation = 1;  // EXIF, 1 to 8; other values mean 1
};

struct DecodedImage {
  Image image;          // of a file with alpha (height, width, 4), which decode_image() drops
  int orientation = 1;  // as in ImageHeader; not applied yet
  /// Every pixel of this colour is to be white. So the reference does with an image that declares
  /// one colour transparent: its loader drops the transparency but not the note of the colour, its
  /// image processor reads the note and puts white behind (convert_to_rgb, transformers 5.23).
  std::optional<std::array<uint8_t, 3>> key = std::nullopt;
};

ImageHeader read_jpeg_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_jpeg(std::span<const std::byte> bytes, const std::string& name);
ImageHeader read_png_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_png(std::span<const std::byte> bytes, const std::string& name);
ImageHeader read_bmp_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_bmp(std::span<const std::byte> bytes, const std::string& name);
ImageHeader read_webp_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_webp(std::span<const std::byte> bytes, const std::string& name);
ImageHeader read_gif_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_gif(std::span<const std::byte> bytes, const std::string& name);
bool is_pnm(std::string_view head) noexcept;
ImageHeader read_pnm_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_pnm(std::span<const std::byte> bytes, const std::string& name);
bool is_tga(std::string_view head) noexcept;
ImageHeader read_tga_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_tga(std::span<const std::byte> bytes, const std::string& name);
/// In heif/ and tiff/; a build without libheif or libtiff links no_heif/ or no_tiff/, which
/// recognise nothing.
bool is_heif(std::string_view head) noexcept;
ImageHeader read_heif_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_heif(std::span<const std::byte> bytes, const std::string& name);
bool is_tiff(std::string_view head) noexcept;
ImageHeader read_tiff_header(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_tiff(std::span<const std::byte> bytes, const std::string& name);

/// The bytes as text.
inline std::string_view as_text(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A name as messages show it: printable, and only the end of one that is very long.
std::string shown_name(std::string_view name);

/// Throws unless the sides are positive and within the limits of decode_image.
void check_size(int64_t height, int64_t width, const char* format, const std::string& name);

/// Throws unless a file of that many bytes, in a format that packs at most `pixels_per_byte` pixels
/// into one of them, can hold the picture.
void check_file_bytes(int64_t height, int64_t width, size_t file_bytes, int64_t pixels_per_byte,
                      const char* format, const std::string& name);

/// An image of a size that was checked, zeroed, of `channels` bytes a pixel: 4 with alpha. Throws
/// Error{kOutOfMemory}.
Image allocate_image(int64_t height, int64_t width, const std::string& name, int channels = 3);

/// Throws Error{kCorruptFile}: the file is not whole.
[[noreturn]] void throw_truncated(const char* format, const std::string& name);
/// Throws Error{kCorruptFile}: `detail` says what is wrong with it.
[[noreturn]] void throw_damaged(const char* format, const std::string& name,
                                const std::string& detail);
/// Of an image or video that is not whole at most this share may be missing.
inline constexpr double kMostMissing = 2.0 / 3;

/// The warning that the share `missing` (0 to 1) of the pixels is lost, because the file ends early
/// or, where `detail` is not empty, is damaged; none at 0. Throws Error{kCorruptFile} above
/// kMostMissing.
std::vector<std::string> warn_of_missing(double missing, const char* format,
                                         const std::string& name, const std::string& detail = "");
/// The warning that a file is damaged or, without `detail`, ends early, where the share is not
/// known: `harm` says what is wrong.
std::vector<std::string> warn_of_damage(const char* format, const std::string& name,
                                        const std::string& detail, std::string_view harm);
/// The same where all pixels are there, and metadata may follow.
std::vector<std::string> warn_of_missing_end(const char* format, const std::string& name,
                                             const std::string& detail = "");
/// The warning that the share `clipped` of grey samples is above 255 and became white; none at 0.
std::vector<std::string> warn_of_clipped(double clipped, const char* format,
                                         const std::string& name);
/// Zeros after `bytes`, up to `needed`: for pixels that are not there.
std::vector<std::byte> with_zeros(std::span<const std::byte> bytes, size_t needed);
/// A share of 0 to 1 in percent, never rounded to none or all: "3.1 %".
std::string percent(double share);

/// Throws Error{kUnsupported}: `detail` says which kind of file it is.
[[noreturn]] void throw_unsupported(const std::string& detail, const std::string& name);

/// Turns and mirrors a picture as EXIF's orientation says; one outside 2 to 8 changes nothing.
Image apply_orientation(Image image, int orientation);
/// Whether that swaps height and width.
bool is_transposed(int orientation) noexcept;

/// "PNG", "GIF", ... of bytes that begin like a picture that is known here; empty otherwise.
std::string_view picture_format(std::span<const std::byte> head) noexcept;

/// Throws if bytes that begin like `head` are no picture that is known here: see decode_image.
void check_kind(std::span<const std::byte> head, const std::string& name);

}  // namespace kvlm
