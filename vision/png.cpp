#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "vision/decoders.h"
#include "vision/exif.h"

namespace kvlm {

namespace {

constexpr char kFormat[] = "PNG";

/// libpng's state and what its callbacks report. libpng leaves a failing call by longjmp, which
/// must not pass over destructors: only the functions below marked "guarded" call what can fail;
/// they hold no object with a destructor and return false after an error.
struct PngReader {
  png_structp codec = nullptr;
  png_infop info = nullptr;
  png_infop end_info = nullptr;
  std::span<const std::byte> rest;  // not read yet
  std::array<char, 128> message{};
  bool ends_early = false;

  PngReader() noexcept = default;
  ~PngReader() { png_destroy_read_struct(&codec, &info, &end_info); }
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
  reader.end_info = png_create_info_struct(reader.codec);
  if (reader.info == nullptr || reader.end_info == nullptr) return false;
  png_set_read_fn(reader.codec, &reader, read_bytes);
  // What is wrong beside the pixels (profiles, text, time) does not make the picture unusable.
  png_set_benign_errors(reader.codec, 1);
  png_set_user_limits(reader.codec, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
  png_set_chunk_malloc_max(reader.codec, 16u << 20);
  png_set_chunk_cache_max(reader.codec, 128);
  png_read_info(reader.codec, reader.info);
  return true;
}

/// Guarded. Asks for RGB8, or 16-bit grey as it is, which Pillow treats in a way of its own.
bool choose_conversion(PngReader& reader, bool grey16) {
  if (setjmp(png_jmpbuf(reader.codec)) != 0) return false;
  if (!grey16) {
    png_set_strip_16(reader.codec);
    const int color_type = png_get_color_type(reader.codec, reader.info);
    if (color_type == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(reader.codec);
    if (color_type == PNG_COLOR_TYPE_GRAY) png_set_expand_gray_1_2_4_to_8(reader.codec);
    if ((color_type & PNG_COLOR_MASK_COLOR) == 0) png_set_gray_to_rgb(reader.codec);
    png_set_strip_alpha(reader.codec);
  }
  png_set_interlace_handling(reader.codec);
  png_read_update_info(reader.codec, reader.info);
  return true;
}

/// Guarded. Decodes the pixels, and reads what follows them up to the end mark.
bool read_rows(PngReader& reader, png_bytepp rows) {
  if (setjmp(png_jmpbuf(reader.codec)) != 0) return false;
  png_read_image(reader.codec, rows);
  png_read_end(reader.codec, reader.end_info);
  return true;
}

[[noreturn]] void throw_failure(const PngReader& reader, const std::string& name) {
  if (reader.ends_early) throw_truncated(kFormat, name);
  throw_damaged(kFormat, name, reader.message.data());
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

/// The orientation by the eXIf chunk, else ImageMagick's text, else XMP, wherever they stand.
int find_orientation(const PngReader& reader) {
  std::optional<int> by_chunk;
  std::optional<int> by_profile;
  std::optional<int> by_xmp;
  for (const png_infop info : {reader.info, reader.end_info}) {
    png_uint_32 count = 0;
    png_bytep block = nullptr;
    if (png_get_eXIf_1(reader.codec, info, &count, &block) != 0) {
      by_chunk = exif_orientation(std::as_bytes(std::span(block, count)));
    }
    png_textp texts = nullptr;
    const int text_count = png_get_text(reader.codec, info, &texts, nullptr);
    for (int i = 0; i < text_count; ++i) {
      const png_text& text = texts[i];
      const std::string_view key = text.key;
      const std::string_view value(text.text, std::max(text.text_length, text.itxt_length));
      if (key == "Raw profile type exif") by_profile = exif_orientation(parse_raw_profile(value));
      if (key == "XML:com.adobe.xmp") by_xmp = xmp_orientation(std::as_bytes(std::span(value)));
    }
  }
  if (by_chunk) return *by_chunk;
  if (by_profile) return *by_profile;
  return by_xmp.value_or(1);
}

/// Where each row goes in a dense buffer.
std::vector<png_bytep> row_pointers(uint8_t* data, size_t rows, size_t row_bytes) {
  std::vector<png_bytep> pointers(rows);
  for (size_t y = 0; y < rows; ++y) pointers[y] = data + y * row_bytes;
  return pointers;
}

}  // namespace

DecodedImage decode_png(std::span<const std::byte> bytes, const std::string& name) {
  PngReader reader;
  reader.rest = bytes;
  if (!read_header(reader)) throw_failure(reader, name);
  const size_t height = png_get_image_height(reader.codec, reader.info);
  const size_t width = png_get_image_width(reader.codec, reader.info);
  DecodedImage result;
  result.image = allocate_image(static_cast<int64_t>(height), static_cast<int64_t>(width),
                                bytes.size(), kFormat, name);
  std::vector<uint8_t>& rgb = result.image.rgb;

  const bool grey16 = png_get_color_type(reader.codec, reader.info) == PNG_COLOR_TYPE_GRAY &&
                      png_get_bit_depth(reader.codec, reader.info) == 16;
  if (!choose_conversion(reader, grey16)) throw_failure(reader, name);
  const size_t row_bytes = width * (grey16 ? 2 : 3);
  if (png_get_rowbytes(reader.codec, reader.info) != row_bytes) {
    throw_damaged(kFormat, name, "its pixels are of an unknown kind");
  }
  std::vector<uint8_t> samples(grey16 ? height * row_bytes : 0);
  auto rows = row_pointers(grey16 ? samples.data() : rgb.data(), height, row_bytes);
  if (!read_rows(reader, rows.data())) throw_failure(reader, name);
  for (size_t i = 0; i < samples.size() / 2; ++i) {
    // Pillow clips 16-bit grey at 255 instead of scaling it, so most such pictures come out white;
    // the models' own loaders do the same.
    const uint8_t grey = samples[2 * i] != 0 ? uint8_t{255} : samples[2 * i + 1];
    std::fill_n(rgb.begin() + static_cast<std::ptrdiff_t>(3 * i), 3, grey);
  }
  result.orientation = find_orientation(reader);
  return result;
}

}  // namespace kvlm
