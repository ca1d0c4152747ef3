#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <optional>
#include <string_view>
#include <vector>

// clang-format off: jpeglib.h uses what <cstdio> declares and must come after it
#include <jerror.h>
#include <jpeglib.h>
// clang-format on

#include "kernels/base/error.h"
#include "vision/decoders.h"
#include "vision/exif.h"

// JPEG through libjpeg-turbo, as Pillow decodes it: CMYK and YCCK to RGB, a file that ends early or
// is damaged refused. libjpeg leaves by longjmp, so whatever it may leave is called through one
// guard and owns nothing.
namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr char kFormat[] = "JPEG";
// A progressive file needs some 10 scans; each one costs a pass over the whole picture, however few
// bytes it takes, so many of them in a large picture are an attack.
constexpr int64_t kMaxScans = 200;
constexpr int64_t kScansOfAnySize = 20;
constexpr int64_t kMaxScannedPixels = int64_t{1} << 31;
// A Huffman-coded JPEG needs a bit for at most 32 x 32 pixels.
constexpr int64_t kPixelsPerByte = int64_t{32} * 32 * 8;

/// libjpeg's state and what its callbacks report. libjpeg leaves a failing call by longjmp, which
/// must not pass over destructors: only the functions below marked "guarded" call libjpeg; they
/// hold no object with a destructor and return false after an error.
struct JpegReader {
  jpeg_decompress_struct codec{};
  jpeg_error_mgr errors{};
  jpeg_progress_mgr progress{};
  std::jmp_buf on_error;
  int error_code = 0;
  std::array<char, JMSG_LENGTH_MAX> message{};
  bool ends_early = false;
  bool damaged = false;

  JpegReader() noexcept;
  ~JpegReader() { jpeg_destroy_decompress(&codec); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;
};

JpegReader& reader_of(j_common_ptr codec) noexcept {
  return *static_cast<JpegReader*>(codec->client_data);
}

void remember_message(j_common_ptr codec) noexcept {
  codec->err->format_message(codec, reader_of(codec).message.data());
}

[[noreturn]] void leave_on_error(j_common_ptr codec) {
  JpegReader& reader = reader_of(codec);
  remember_message(codec);
  reader.error_code = codec->err->msg_code;
  std::longjmp(reader.on_error, 1);
}

/// Keeps the first sign that pixels are missing or wrong. Stray bytes between markers and odd
/// version numbers are common in files that decode well.
void note_warning(j_common_ptr codec, int level) {
  if (level >= 0) return;  // a trace message
  JpegReader& reader = reader_of(codec);
  switch (codec->err->msg_code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
      break;
    case JWRN_JPEG_EOF:
    case JWRN_HIT_MARKER:
      reader.ends_early = true;
      break;
    default:
      if (!reader.damaged) remember_message(codec);
      reader.damaged = true;
      break;
  }
}

void print_nothing(j_common_ptr) {}

void limit_scans(j_common_ptr codec) {
  const auto* decompress = reinterpret_cast<j_decompress_ptr>(codec);
  const int64_t pixels =
      std::max(int64_t{decompress->image_width} * int64_t{decompress->image_height}, int64_t{1});
  const int64_t most = std::clamp(kMaxScannedPixels / pixels, kScansOfAnySize, kMaxScans);
  if (decompress->input_scan_number <= most) return;
  JpegReader& reader = reader_of(codec);
  reader.error_code = JERR_BAD_PROGRESSION;
  std::snprintf(reader.message.data(), reader.message.size(), "more than %d scans",
                static_cast<int>(most));
  std::longjmp(reader.on_error, 1);
}

JpegReader::JpegReader() noexcept {
  codec.err = jpeg_std_error(&errors);
  errors.error_exit = leave_on_error;
  errors.emit_message = note_warning;
  errors.output_message = print_nothing;
}

/// Guarded. Reads up to the first scan.
bool read_header(JpegReader& reader, const unsigned char* data, size_t bytes) {
  if (setjmp(reader.on_error) != 0) return false;
  reader.codec.client_data = &reader;
  jpeg_create_decompress(&reader.codec);
  reader.progress.progress_monitor = limit_scans;
  reader.codec.progress = &reader.progress;
  jpeg_mem_src(&reader.codec, data, bytes);
  jpeg_save_markers(&reader.codec, JPEG_APP0 + 1, 0xffff);
  jpeg_read_header(&reader.codec, TRUE);
  return true;
}

/// Guarded. Decodes every row; `row` holds one of CMYK when the file is of that kind.
bool read_rows(JpegReader& reader, unsigned char* rgb, unsigned char* row) {
  if (setjmp(reader.on_error) != 0) return false;
  jpeg_decompress_struct& codec = reader.codec;
  jpeg_start_decompress(&codec);
  const size_t width = codec.output_width;
  while (codec.output_scanline < codec.output_height) {
    unsigned char* out = rgb + size_t{codec.output_scanline} * width * 3;
    unsigned char* target = row != nullptr ? row : out;
    jpeg_read_scanlines(&codec, &target, 1);
    if (row == nullptr) continue;
    for (size_t x = 0; x < width; ++x) {
      // Pillow takes every CMYK JPEG for Adobe's, whose inks are inverted, and mixes with black as
      // k - round(c * k / 255), where c is the ink and k is the light that black lets through.
      const int light = row[4 * x + 3];
      for (size_t c = 0; c < 3; ++c) {
        const int product = (255 - row[4 * x + c]) * light + 128;
        const int absorbed = ((product >> 8) + product) >> 8;
        out[3 * x + c] = static_cast<unsigned char>(std::max(light - absorbed, 0));
      }
    }
  }
  jpeg_finish_decompress(&codec);
  return true;
}

[[noreturn]] void throw_failure(const JpegReader& reader, const std::string& name) {
  switch (reader.error_code) {
    case JERR_BAD_PRECISION:
    case JERR_SOF_UNSUPPORTED:
    case JERR_ARITH_NOTIMPL:
    case JERR_CONVERSION_NOTIMPL:
    case JERR_CCIR601_NOTIMPL:
    case JERR_FRACT_SAMPLE_NOTIMPL:
      throw_unsupported("a JPEG of an unusual kind (" + std::string(reader.message.data()) + ")",
                        name);
    case JERR_OUT_OF_MEMORY:
      throw Error(ErrorCode::kOutOfMemory,
                  " cannot be decoded: out of memory; scale it down first" + name +
                      " needs more memory than there is; scale it down first");
    case JERR_INPUT_EOF:
    case JERR_INPUT_EMPTY:
      throw_truncated(kFormat, name);
    default:
      // Without any scan, an end of file that libjpeg made up leads to other errors.
      if (reader.ends_early) throw_truncated(kFormat, name);
      throw_damaged(kFormat, name, reader.message.data());
  }
}

int find_orientation(const jpeg_decompress_struct& codec) {
  constexpr std::string_view kExif = "Exif\0\0"sv;
  constexpr std::string_view kXmp = "http://ns.adobe.com/xap/1.0/\0"sv;
  std::vector<std::byte> exif;  // a long block is spread over several markers
  std::span<const std::byte> xmp;
  for (const jpeg_marker_struct* marker = codec.marker_list; marker != nullptr;
       marker = marker->next) {
    const std::span data(reinterpret_cast<const std::byte*>(marker->data), marker->data_length);
    const std::string_view text(reinterpret_cast<const char*>(marker->data), data.size());
    if (text.starts_with(kExif)) {
      const auto body = data.subspan(kExif.size());
      exif.insert(exif.end(), body.begin(), body.end());
    } else if (text.starts_with(kXmp)) {
      xmp = data.subspan(kXmp.size());
    }
  }
  std::optional<int> orientation = exif_orientation(exif);
  if (!orientation) orientation = xmp_orientation(xmp);
  return orientation.value_or(1);
}

/// Reads up to the first scan and refuses what is not decoded. Throws.
void open_file(JpegReader& reader, std::span<const std::byte> bytes, const std::string& name) {
  if (!read_header(reader, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size())) {
    throw_failure(reader, name);
  }
  const int channels = reader.codec.num_components;
  if (channels != 1 && channels != 3 && channels != 4) {
    throw_unsupported("a JPEG with " + std::to_string(channels) + " channels", name);
  }
}

}  // namespace

ImageHeader read_jpeg_header(std::span<const std::byte> bytes, const std::string& name) {
  JpegReader reader;
  open_file(reader, bytes, name);
  return {.height = reader.codec.image_height,
          .width = reader.codec.image_width,
          .orientation = find_orientation(reader.codec)};
}

DecodedImage decode_jpeg(std::span<const std::byte> bytes, const std::string& name) {
  JpegReader reader;
  open_file(reader, bytes, name);
  jpeg_decompress_struct& codec = reader.codec;
  const bool cmyk = codec.num_components == 4;
  codec.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;

  check_size(codec.image_height, codec.image_width, kFormat, name);
  check_file_bytes(codec.image_height, codec.image_width, bytes.size(), kPixelsPerByte, kFormat,
                   name);
  DecodedImage result;
  result.image = allocate_image(codec.image_height, codec.image_width, name);
  result.orientation = find_orientation(codec);
  std::vector<unsigned char> row(cmyk ? size_t{codec.image_width} * 4 : 0);
  if (!read_rows(reader, result.image.rgb.data(), cmyk ? row.data() : nullptr)) {
    throw_failure(reader, name);
  }
  if (reader.ends_early) throw_truncated(kFormat, name);
  if (reader.damaged) throw_damaged(kFormat, name, reader.message.data());
  return result;
}

}  // namespace kvlm
