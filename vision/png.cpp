#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "vision/decoders.h"
#include "vision/png_chunks.h"

// PNG through libpng, as Pillow decodes it: palettes and 16-bit grey to RGB, transparency as
// Pillow's conversion treats it. libpng leaves by longjmp, so whatever it may leave is called
// through one guard and owns nothing.
namespace kvlm {

namespace {

constexpr char kFormat[] = "PNG";
// Deflate shrinks at most 1032:1, and a byte holds up to 8 pixels.
constexpr int64_t kPixelsPerByte = int64_t{1032} * 8;
constexpr size_t kChunkHeaderBytes = 8;  // nothing else is read by so many in a part

/// libpng's state and what its callbacks report. libpng leaves a failing call by longjmp, which
/// must not pass over destructors: only the functions below marked "guarded" call what can fail;
/// they hold no object with a destructor and return false after an error.
struct PngReader {
  png_structp codec = nullptr;
  png_infop info = nullptr;
  std::span<const std::byte> rest;  // not read yet
  std::array<char, 128> message{};
  bool ends_early = false;
  size_t rows = 0;          // read, of all passes
  size_t checked_rows = 0;  // before the chunk that is being read

  PngReader() noexcept = default;
  ~PngReader() { png_destroy_read_struct(&codec, &info, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;
};

[[noreturn]] void leave_on_error(png_structp codec, png_const_charp text) {
  auto& reader = *static_cast<PngReader*>(png_get_error_ptr(codec));
  std::snprintf(reader.message.data(), reader.message.size(), "%s", text);
  png_longjmp(codec, 1);
}

void ignore_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp codec, png_bytep out, size_t count) {
  auto& reader = *static_cast<PngReader*>(png_get_io_ptr(codec));
  if (count > reader.rest.size()) {
    reader.ends_early = true;
    png_error(codec, "end of file");
  }
  if (count == kChunkHeaderBytes) reader.checked_rows = reader.rows;
  std::memcpy(out, reader.rest.data(), count);
  reader.rest = reader.rest.subspan(count);
}

/// Guarded. Reads up to the first pixel.
bool read_header(PngReader& reader) {
  reader.codec =
      png_create_read_struct(PNG_LIBPNG_VER_STRING, &reader, leave_on_error, ignore_warning);
  if (reader.codec == nullptr) return false;
  if (setjmp(png_jmpbuf(reader.codec)) != 0) return false;
  reader.info = png_create_info_struct(reader.codec);
  if (reader.info == nullptr) return false;
  png_set_read_fn(reader.codec, &reader, read_bytes);
  // What is wrong beside the pixels (profiles, text, time) does not make the picture unusable, and
  // libpng shall not spend memory or time on it, however much a chunk says it has.
  png_set_benign_errors(reader.codec, 1);
  png_set_keep_unknown_chunks(reader.codec, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_set_user_limits(reader.codec, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
  png_read_info(reader.codec, reader.info);
  return true;
}

/// Guarded. Asks for RGB8, RGBA8 where there is alpha, or 16-bit grey as it is, which Pillow treats
/// in a way of its own.
bool choose_conversion(PngReader& reader, bool grey16) {
  if (setjmp(png_jmpbuf(reader.codec)) != 0) return false;
  if (!grey16) {
    png_set_strip_16(reader.codec);
    const int color_type = png_get_color_type(reader.codec, reader.info);
    if (color_type == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(reader.codec);  // and alpha
    if (color_type == PNG_COLOR_TYPE_GRAY) png_set_expand_gray_1_2_4_to_8(reader.codec);
    if ((color_type & PNG_COLOR_MASK_COLOR) == 0) png_set_gray_to_rgb(reader.codec);
  }
  png_set_interlace_handling(reader.codec);
  png_read_update_info(reader.codec, reader.info);
  return true;
}

/// Guarded. Decodes the pixels, `stride` bytes from row to row, and reads up to the end mark. Where
/// `part`, byte by byte, so that nothing is lost before the place where the file ends; pixels of
/// passes that are missing are those of the passes before.
bool read_rows(PngReader& reader, png_bytep pixels, size_t stride, bool part) {
  if (setjmp(png_jmpbuf(reader.codec)) != 0) return false;
  if (part) png_set_compression_buffer_size(reader.codec, 1);
  const int passes = png_set_interlace_handling(reader.codec);
  const png_uint_32 rows = png_get_image_height(reader.codec, reader.info);
  for (int pass = 0; pass < passes; ++pass) {
    for (png_uint_32 y = 0; y < rows; ++y, ++reader.rows) {
      png_bytep row = pixels + y * stride;
      png_read_row(reader.codec, part ? nullptr : row, part ? row : nullptr);
    }
  }
  png_read_end(reader.codec, nullptr);
  return true;
}

/// The share of the pixels that are in the first `rows` rows of all passes.
double share_of_rows(const PngReader& reader, size_t rows) noexcept {
  const size_t height = png_get_image_height(reader.codec, reader.info);
  if (png_get_interlace_type(reader.codec, reader.info) == PNG_INTERLACE_NONE) {
    return static_cast<double>(rows) / static_cast<double>(height);
  }
  constexpr std::array kPassShares = {1.0 / 64, 1.0 / 64, 1.0 / 32, 1.0 / 16,
                                      1.0 / 8,  1.0 / 4,  1.0 / 2};
  double share = 0;
  for (const double of_pass : kPassShares) {
    const size_t read = std::min(rows, height);
    share += of_pass * static_cast<double>(read) / static_cast<double>(height);
    rows -= read;
  }
  return share;
}

[[noreturn]] void throw_failure(const PngReader& reader, const std::string& name) {
  if (reader.ends_early) throw_truncated(kFormat, name);
  throw_damaged(kFormat, name, reader.message.data());
}

/// The colour that the reference takes for transparent: that of the only entry of a palette that is
/// so, when all others are opaque; grey and colour keys as Pillow reads them, whatever the depth.
std::optional<std::array<uint8_t, 3>> transparent_colour(const PngReader& reader) {
  png_bytep alphas = nullptr;
  int alpha_count = 0;
  png_color_16p key = nullptr;
  if (png_get_tRNS(reader.codec, reader.info, &alphas, &alpha_count, &key) == 0) {
    return std::nullopt;
  }
  const int color_type = png_get_color_type(reader.codec, reader.info);
  if (color_type == PNG_COLOR_TYPE_PALETTE) {
    const std::span entries(alphas, static_cast<size_t>(alpha_count));
    const auto clear = std::ranges::find(entries, png_byte{0});
    const auto opaque = std::ranges::count(entries, png_byte{255});
    if (clear == entries.end() || opaque != alpha_count - 1) return std::nullopt;
    png_colorp palette = nullptr;
    int colours = 0;
    png_get_PLTE(reader.codec, reader.info, &palette, &colours);
    const png_color& entry = palette[clear - entries.begin()];
    return std::array{entry.red, entry.green, entry.blue};
  }
  const auto low_byte = [](png_uint_16 value) { return static_cast<uint8_t>(value & 0xff); };
  if (color_type == PNG_COLOR_TYPE_RGB) {
    return std::array{low_byte(key->red), low_byte(key->green), low_byte(key->blue)};
  }
  if (png_get_bit_depth(reader.codec, reader.info) == 16) {
    // Pillow compares the red sample with the key and the others with zero.
    if (low_byte(key->gray) != 0) return std::nullopt;
    return std::array<uint8_t, 3>{};
  }
  const auto grey = static_cast<uint8_t>(std::min<png_uint_16>(key->gray, 255));
  return std::array{grey, grey, grey};
}

/// Widens rows of 16-bit grey, each of which stands at the beginning of a row of RGB, in place.
/// Pillow clips such samples at 255 instead of scaling them, so most such images come out white;
/// the models' own loaders do the same. Returns the share of the samples that were clipped.
double widen_grey16(Image& image) noexcept {
  const auto width = static_cast<size_t>(image.width);
  size_t clipped = 0;
  for (auto row = image.rgb.begin(); row != image.rgb.end();
       row += static_cast<std::ptrdiff_t>(3 * width)) {
    for (size_t x = width; x-- > 0;) {  // from the end, where nothing unread is overwritten
      const auto sample = row + static_cast<std::ptrdiff_t>(2 * x);
      const uint8_t grey = sample[0] != 0 ? uint8_t{255} : sample[1];
      clipped += sample[0] != 0;
      std::fill_n(row + static_cast<std::ptrdiff_t>(3 * x), 3, grey);
    }
  }
  return static_cast<double>(clipped) / static_cast<double>(image.rgb.size() / 3);
}

/// Decodes what there is of the pixels; nothing if that is not all of them and not `part`.
std::optional<DecodedImage> decode(std::span<const std::byte> bytes, const std::string& name,
                                   bool part) {
  PngReader reader;
  reader.rest = bytes;
  if (!read_header(reader)) throw_failure(reader, name);
  const int64_t height = png_get_image_height(reader.codec, reader.info);
  const int64_t width = png_get_image_width(reader.codec, reader.info);
  check_size(height, width, kFormat, name);
  check_file_bytes(height, width, bytes.size(), kPixelsPerByte, kFormat, name);

  const bool grey16 = png_get_color_type(reader.codec, reader.info) == PNG_COLOR_TYPE_GRAY &&
                      png_get_bit_depth(reader.codec, reader.info) == 16;
  const auto key = transparent_colour(reader);
  if (!choose_conversion(reader, grey16)) throw_failure(reader, name);
  const int channels = png_get_channels(reader.codec, reader.info) == 4 ? 4 : 3;
  const size_t row_bytes = static_cast<size_t>(width) * (grey16 ? 2 : channels);
  if (png_get_rowbytes(reader.codec, reader.info) != row_bytes) {
    throw_damaged(kFormat, name, "its pixels are of an unknown kind");
  }
  DecodedImage result;
  result.image = allocate_image(height, width, name, channels);
  result.key = key;
  uint8_t* pixels = result.image.rgb.data();
  if (!read_rows(reader, pixels, static_cast<size_t>(width * channels), part)) {
    // A chunk that is damaged may be wrong from its beginning; what ends early is right before.
    const std::string message = reader.message.data();
    const double missing =
        1 - share_of_rows(reader, reader.ends_early ? reader.rows : reader.checked_rows);
    if (!part && (missing > 0 || !reader.ends_early)) return std::nullopt;
    const std::string detail = reader.ends_early ? "" : message;
    result.image.warnings = missing > 0 ? warn_of_missing(missing, kFormat, name, detail)
                                        : warn_of_missing_end(kFormat, name, detail);
  }
  if (grey16) {
    for (std::string& warning : warn_of_clipped(widen_grey16(result.image), kFormat, name)) {
      result.image.warnings.push_back(std::move(warning));
    }
  }
  result.orientation = png_orientation(bytes);
  return result;
}

}  // namespace

ImageHeader read_png_header(std::span<const std::byte> bytes, const std::string& name) {
  PngReader reader;
  reader.rest = bytes;
  if (!read_header(reader)) throw_failure(reader, name);
  return {.height = png_get_image_height(reader.codec, reader.info),
          .width = png_get_image_width(reader.codec, reader.info),
          .orientation = png_orientation(bytes)};
}

DecodedImage decode_png(std::span<const std::byte> bytes, const std::string& name) {
  std::optional<DecodedImage> image = decode(bytes, name, /*part=*/false);
  if (!image) image = decode(bytes, name, /*part=*/true);
  return *std::move(image);
}

}  // namespace kvlm
