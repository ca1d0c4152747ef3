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

// JPEG through libjpeg-turbo, as Pillow decodes it: CMYK and YCCK to RGB. Where a file is cut, the
// iMCU row at the cut says which share of the pixels is lost. Damage shows in the codes only some
// rows later, so the first sign of it bounds the share from below. What follows the last row or
// scan (an end mark or not, other bytes) loses no pixel. libjpeg leaves by longjmp, so whatever it
// may leave is called through one guard and owns nothing.
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
// Bytes between the last row and the end mark: a few are padding, more are data that belong to
// pixels which were decoded from something else.
constexpr int kPaddingBytes = 8;
// A block of a disk or a download that was never written is a run of zeros. Scans of flat images
// have some, too: one is a hole if it is as long as a block, or the last of the data.
constexpr size_t kHoleBytes = 4096;
constexpr size_t kLastHoleBytes = 64;
constexpr size_t kBytesReadAhead = 8;  // of the decoder, at most
constexpr int kUnknown = 100;          // bits of a coefficient that no scan had

/// libjpeg's state and what its callbacks report. libjpeg leaves a failing call by longjmp, which
/// must not pass over destructors: only the functions below marked "guarded" call libjpeg; they
/// hold no object with a destructor and return false after an error.
struct JpegReader {
  jpeg_decompress_struct codec{};
  jpeg_error_mgr errors{};
  std::jmp_buf on_error;
  int error_code = 0;
  std::array<char, JMSG_LENGTH_MAX> message{};
  bool ends_early = false;  // libjpeg made up the end mark
  bool damaged = false;     // a code that cannot be
  double lost = 0;          // share of the pixels from the first sign of missing or wrong data on
  bool fine = false;        // a sign in a scan that adds the last bits of coefficients
  bool cut = false;         // the first sign is that the file ends
  int left_over = 0;        // bytes of data at the end of a scan or restart interval, at most
  int64_t signs = 0;  // of missing or wrong data: in a restart interval each, if there are any
  bool rest_is_lost = false;
  size_t bytes = 0;  // of the file
  /// Bytes that were read before each iMCU row, of a file of one scan. Zero: unknown.
  std::vector<size_t> row_starts;
  size_t rows_known = 0;  // of row_starts

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

/// How many bytes the decoder has taken.
size_t position(const JpegReader& reader) noexcept {
  return reader.bytes - std::min(reader.bytes, reader.codec.src->bytes_in_buffer);
}

/// The share of the pixels that the data from byte `at` on hold, of a file of one scan.
double share_from(const JpegReader& reader, size_t at) noexcept {
  const std::span starts(reader.row_starts.data(), reader.rows_known);
  const auto after = std::ranges::upper_bound(starts, at);
  if (after == starts.begin()) return 1;
  const auto row = static_cast<double>(after - starts.begin() - 1);
  const auto into = static_cast<double>(at - *(after - 1));
  // Of the row that was not finished: as long as the mean of those before.
  const double row_bytes = after != starts.end() ? static_cast<double>(*after - *(after - 1))
                           : row > 0 ? static_cast<double>(starts.back() - starts.front()) / row
                                     : 0;
  const double within = row_bytes > 0 ? std::min(into / row_bytes, 1.0) : 0;
  const auto rows = static_cast<double>(reader.codec.total_iMCU_rows);
  return std::max(1 - (row + within) / rows, 0.0);
}

/// The most bits that the scans so far lack of any coefficient; kUnknown if one lacks all of it.
int missing_bits(const jpeg_decompress_struct& codec) noexcept {
  int most = 0;
  for (int i = 0; i < codec.num_components; ++i) {
    if (codec.comp_info[i].quant_table == nullptr) return kUnknown;  // no scan had it
    if (codec.progressive_mode == 0) continue;
    for (const int bits : codec.coef_bits[i]) most = std::max(most, bits < 0 ? kUnknown : bits);
  }
  return most;
}

/// Whether the scan that is read adds bits to coefficients that are known.
bool is_refinement(const jpeg_decompress_struct& codec) noexcept {
  return codec.progressive_mode != 0 && codec.Ah > 0;
}

/// Keeps the first sign in a scan that pixels are missing or wrong, where rows are still to come.
void note_loss(JpegReader& reader) noexcept {
  const jpeg_decompress_struct& codec = reader.codec;
  const bool in_scan = codec.input_scan_number > 0 && codec.input_iMCU_row < codec.total_iMCU_rows;
  if (!in_scan) return;
  if (reader.signs++ == 0) reader.cut = reader.ends_early;
  const double rows = static_cast<double>(codec.total_iMCU_rows);
  double share = 1 - static_cast<double>(codec.input_iMCU_row) / rows;
  // The decoder may have read further than the row: less of it is lost. Arithmetic codes of a row
  // may be a byte or many.
  if (reader.rows_known > codec.input_iMCU_row && codec.arith_code == 0) {
    share = std::clamp(share_from(reader, position(reader)), 1e-6, share);
  }
  if (is_refinement(codec)) {
    reader.fine = true;
  } else {
    reader.lost = std::max(reader.lost, share);
  }
}

/// Odd version numbers and stray bytes between headers are common in files that decode well.
void note_warning(j_common_ptr codec, int level) {
  if (level >= 0) return;  // a trace message
  JpegReader& reader = reader_of(codec);
  switch (codec->err->msg_code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_JFIF_MAJOR:
      break;
    case JWRN_EXTRANEOUS_DATA: {
      const int marker = codec->err->msg_parm.i[1];
      const int bytes = codec->err->msg_parm.i[0];
      const bool in_scans = reader.codec.input_scan_number > 0 && !reader.ends_early;
      const bool scan_ends = marker == JPEG_EOI || (marker >= JPEG_RST0 && marker <= JPEG_RST0 + 7);
      if (!in_scans || bytes <= kPaddingBytes) break;
      if (!scan_ends && missing_bits(reader.codec) == 0) break;  // another file follows
      if (is_refinement(reader.codec)) {
        reader.fine = true;
      } else {
        reader.left_over = std::max(reader.left_over, bytes);
      }
      ++reader.signs;
      break;
    }
    case JWRN_JPEG_EOF:  // the decoder reads ahead: nothing may be missing
      reader.ends_early = true;
      // The arithmetic decoder goes on with zeros and says no more.
      if (reader.codec.arith_code != 0) note_loss(reader);
      break;
    case JWRN_MUST_RESYNC:
      // The end mark comes in place of a restart mark: no interval that follows is there.
      if (codec->err->msg_parm.i[0] == JPEG_EOI) reader.rest_is_lost = true;
      [[fallthrough]];
    case JWRN_HIT_MARKER:
      note_loss(reader);
      break;
    default:
      note_loss(reader);
      if (!reader.damaged) remember_message(codec);
      reader.damaged = true;
      break;
  }
}

void print_nothing(j_common_ptr) {}

void limit_scans(JpegReader& reader) {
  const jpeg_decompress_struct& codec = reader.codec;
  const int64_t pixels =
      std::max(int64_t{codec.image_width} * int64_t{codec.image_height}, int64_t{1});
  const int64_t most = std::clamp(kMaxScannedPixels / pixels, kScansOfAnySize, kMaxScans);
  if (codec.input_scan_number <= most) return;
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
  reader.bytes = bytes;
  jpeg_mem_src(&reader.codec, data, bytes);
  jpeg_save_markers(&reader.codec, JPEG_APP0 + 1, 0xffff);
  jpeg_read_header(&reader.codec, TRUE);
  return true;
}

/// Notes where the next iMCU row begins, of a file of one scan.
void note_row(JpegReader& reader) noexcept {
  const size_t row = reader.codec.input_iMCU_row;
  if (row >= reader.row_starts.size()) return;
  // Rows that were read together begin where the first of them does.
  const size_t at = position(reader);
  while (reader.rows_known <= row) reader.row_starts[reader.rows_known++] = at;
}

/// Reads scans until every coefficient is known, so that what follows cannot do harm.
void read_scans(JpegReader& reader) {
  jpeg_decompress_struct& codec = reader.codec;
  for (;;) {
    const int status = jpeg_consume_input(&codec);
    if (status == JPEG_REACHED_EOI) return;
    if (status == JPEG_REACHED_SOS) limit_scans(reader);
    if (status == JPEG_SCAN_COMPLETED && missing_bits(codec) == 0) return;
  }
}

/// Guarded. Decodes every row; `row` holds one of CMYK when the file is of that kind.
bool read_rows(JpegReader& reader, unsigned char* rgb, unsigned char* row) {
  if (setjmp(reader.on_error) != 0) return false;
  jpeg_decompress_struct& codec = reader.codec;
  note_row(reader);
  codec.buffered_image = jpeg_has_multiple_scans(&codec);
  jpeg_start_decompress(&codec);
  if (codec.buffered_image != 0) {
    read_scans(reader);
    jpeg_start_output(&codec, codec.input_scan_number);
  }
  const size_t width = codec.output_width;
  while (codec.output_scanline < codec.output_height) {
    note_row(reader);
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
  note_row(reader);
  return true;
}

/// Guarded. Reads up to the end mark, for what lies before it; the pixels are decoded.
bool read_end(JpegReader& reader) {
  if (setjmp(reader.on_error) != 0) return false;
  if (reader.codec.buffered_image == 0) {
    jpeg_finish_decompress(&reader.codec);
  } else if (jpeg_input_complete(&reader.codec) == 0) {
    jpeg_consume_input(&reader.codec);  // no further scan, were there one
  }
  return true;
}

/// Where a hole begins in the data from `first` on; the end of the file if there is none.
size_t find_hole(std::span<const std::byte> bytes, size_t first) noexcept {
  size_t hole = bytes.size();
  size_t longest = kHoleBytes - 1;
  for (size_t at = first; at < bytes.size(); ++at) {
    const size_t start = at;
    while (at < bytes.size() && bytes[at] == std::byte{0}) ++at;
    const bool last =
        at == bytes.size() || (at + 2 == bytes.size() && bytes[at] == std::byte{0xff});
    if (at - start > longest || (last && at - start >= kLastHoleBytes)) {
      longest = std::max(longest, at - start);
      hole = std::min(hole, start);
    }
  }
  return hole;
}

/// Warns of pixels that are lost, or throws. `bits` are missing of coefficients.
void note_damage(const JpegReader& reader, int bits, std::span<const std::byte> bytes,
                 DecodedImage& result, const std::string& name) {
  const jpeg_decompress_struct& codec = reader.codec;
  double lost = reader.lost;
  bool known = reader.cut;
  const bool lacks_bits = (reader.ends_early || reader.signs > 0) && bits > 0;
  if (lacks_bits && bits == kUnknown) {
    lost = 1;
    known = true;
  }
  std::string detail;
  if (reader.left_over > 0) {
    detail = std::to_string(reader.left_over) + " bytes of its data are left over";
  }
  if (reader.signs > 0 && !reader.cut && detail.empty()) {
    detail = reader.damaged ? reader.message.data() : "its data runs short";
  }
  const bool one_scan = reader.rows_known > 0;
  if (one_scan && (reader.signs > 0 || reader.ends_early)) {
    // Zeros may have been decoded as pixels without a sign.
    const size_t hole = find_hole(bytes, reader.row_starts[0]);
    const double share = hole < bytes.size() ? share_from(reader, hole + kBytesReadAhead) : 0;
    if (share > lost) {
      lost = share;
      known = true;
      detail = reader.ends_early ? "" : "a part of its data is zeros";
    }
  }
  if (one_scan && codec.restart_interval > 0 && reader.signs > 0 && !reader.rest_is_lost) {
    const double mcus = static_cast<double>(codec.MCUs_per_row) * codec.MCU_rows_in_scan;
    const double most = static_cast<double>(reader.signs) * codec.restart_interval / mcus;
    lost = lost > 0 && reader.left_over == 0 ? std::min(lost, most) : std::min(most, 1.0);
    known = true;
  }
  if ((known && lost > 0) || lost > kMostMissing) {
    result.image.warnings = warn_of_missing(lost, kFormat, name, detail);
  } else if (one_scan && lost > 0) {
    const auto height = static_cast<double>(result.image.height);
    const auto row = static_cast<int>((1 - lost) * height) + 1;
    result.image.warnings =
        warn_of_damage(kFormat, name, detail,
                       "its pixels are wrong from row " + std::to_string(row) + " of " +
                           std::to_string(result.image.height) + " on at the latest");
  } else if (lost > 0 || reader.left_over > 0) {
    result.image.warnings =
        warn_of_damage(kFormat, name, detail, "an unknown share of its pixels is wrong");
  } else if (lacks_bits || reader.fine) {
    result.image.warnings =
        warn_of_damage(kFormat, name, detail, "fine detail of its pixels is missing or wrong");
  }
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
                  "image " + name + " cannot be decoded: out of memory; scale it down first");
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
  if (jpeg_has_multiple_scans(&codec) == 0) {
    reader.row_starts.resize(codec.image_height / DCTSIZE + 2);  // more than there are
  }
  if (!read_rows(reader, result.image.rgb.data(), cmyk ? row.data() : nullptr)) {
    throw_failure(reader, name);
  }
  const int bits = missing_bits(codec);
  read_end(reader);  // whatever it finds there
  note_damage(reader, bits, bytes, result, name);
  return result;
}

}  // namespace kvlm
