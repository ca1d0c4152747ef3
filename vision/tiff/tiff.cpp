#include <fmt/format.h>
#include <tiffio.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/base/printable.h"
#include "vision/decoders.h"

// TIFF through libtiff, the first image, as Pillow converts it: samples of 16 bits keep their high
// byte, 16-bit grey is clipped at 255, alpha is dropped. libtiff decompresses; what the samples
// mean is decided here.
namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr char kFormat[] = "TIFF";
constexpr tmsize_t kMaxAllocation = tmsize_t{1} << 30;

/// The file, and what libtiff's callbacks report.
struct Source {
  std::span<const std::byte> bytes;
  size_t position = 0;
  std::string message{};
};

Source& source_of(thandle_t handle) noexcept { return *static_cast<Source*>(handle); }

tmsize_t read_some(thandle_t handle, void* out, tmsize_t count) {
  Source& source = source_of(handle);
  const size_t left = source.bytes.size() - std::min(source.position, source.bytes.size());
  const size_t taken = std::min(left, static_cast<size_t>(std::max<tmsize_t>(count, 0)));
  if (taken > 0) std::memcpy(out, source.bytes.data() + source.position, taken);
  source.position += taken;
  return static_cast<tmsize_t>(taken);
}

tmsize_t write_nothing(thandle_t, void*, tmsize_t) { return 0; }

toff_t seek_to(thandle_t handle, toff_t offset, int whence) {
  Source& source = source_of(handle);
  if (whence == SEEK_CUR) offset += source.position;
  if (whence == SEEK_END) offset += source.bytes.size();
  return source.position = static_cast<size_t>(offset);
}

int close_nothing(thandle_t) { return 0; }
toff_t size_of(thandle_t handle) { return source_of(handle).bytes.size(); }
int map_all(thandle_t handle, void** base, toff_t* size) {
  const auto bytes = source_of(handle).bytes;
  *base = const_cast<std::byte*>(bytes.data());  // opened for reading
  *size = bytes.size();
  return 1;
}
void unmap_nothing(thandle_t, void*, toff_t) {}

/// Keeps the first message.
int remember_message(TIFF*, void* user, const char*, const char* format, va_list arguments) {
  auto& message = static_cast<Source*>(user)->message;
  if (!message.empty()) return 1;
  std::array<char, 256> text{};
  std::vsnprintf(text.data(), text.size(), format, arguments);
  message = printable(text.data());
  return 1;
}

int ignore_warning(TIFF*, void*, const char*, const char*, va_list) { return 1; }

struct TiffClose {
  void operator()(TIFF* tiff) const noexcept { TIFFClose(tiff); }
};
using Tiff = std::unique_ptr<TIFF, TiffClose>;

[[noreturn]] void throw_failure(const Source& source, const std::string& name) {
  throw_damaged(kFormat, name, source.message.empty() ? "it cannot be read" : source.message);
}

Tiff open_tiff(Source& source, const std::string& name) {
  const std::unique_ptr<TIFFOpenOptions, decltype(&TIFFOpenOptionsFree)> options(
      TIFFOpenOptionsAlloc(), &TIFFOpenOptionsFree);
  if (options == nullptr) throw std::bad_alloc();
  TIFFOpenOptionsSetMaxSingleMemAlloc(options.get(), kMaxAllocation);
  TIFFOpenOptionsSetErrorHandlerExtR(options.get(), remember_message, &source);
  TIFFOpenOptionsSetWarningHandlerExtR(options.get(), ignore_warning, nullptr);
  Tiff tiff(TIFFClientOpenExt("image", "r", &source, read_some, write_nothing, seek_to,
                              close_nothing, size_of, map_all, unmap_nothing, options.get()));
  if (tiff == nullptr) throw_failure(source, name);
  return tiff;
}

template <class Value>
Value field(TIFF* tiff, ttag_t tag, Value otherwise) {
  Value value = otherwise;
  if (TIFFGetFieldDefaulted(tiff, tag, &value) == 0) return otherwise;
  return value;
}

ImageHeader header_of(TIFF* tiff) {
  return {.height = field<uint32_t>(tiff, TIFFTAG_IMAGELENGTH, 0),
          .width = field<uint32_t>(tiff, TIFFTAG_IMAGEWIDTH, 0),
          .orientation = field<uint16_t>(tiff, TIFFTAG_ORIENTATION, 1)};
}

/// What the samples of a pixel mean.
struct Layout {
  size_t bits = 0;       // of a sample: 1, 8 or 16
  size_t samples = 0;    // of a pixel
  uint16_t meaning = 0;  // PHOTOMETRIC_...
  bool planar = false;   // each sample by itself
  size_t alpha = 0;      // its sample; 0: none
  std::array<const uint16_t*, 3> palette{};

  size_t channels() const noexcept { return alpha > 0 ? 4 : 3; }
  /// Samples of a pixel in one row of a strip or tile.
  size_t together() const noexcept { return planar ? 1 : samples; }
};

Layout layout_of(TIFF* tiff, const std::string& name) {
  Layout layout;
  layout.bits = field<uint16_t>(tiff, TIFFTAG_BITSPERSAMPLE, 1);
  layout.samples = field<uint16_t>(tiff, TIFFTAG_SAMPLESPERPIXEL, 1);
  layout.meaning = field<uint16_t>(tiff, TIFFTAG_PHOTOMETRIC, PHOTOMETRIC_MINISBLACK);
  layout.planar =
      field<uint16_t>(tiff, TIFFTAG_PLANARCONFIG, PLANARCONFIG_CONTIG) == PLANARCONFIG_SEPARATE;
  const auto compression = field<uint16_t>(tiff, TIFFTAG_COMPRESSION, COMPRESSION_NONE);
  if (layout.meaning == PHOTOMETRIC_YCBCR && compression == COMPRESSION_JPEG) {
    TIFFSetField(tiff, TIFFTAG_JPEGCOLORMODE, JPEGCOLORMODE_RGB);
    layout.meaning = PHOTOMETRIC_RGB;
  }
  const auto format = field<uint16_t>(tiff, TIFFTAG_SAMPLEFORMAT, SAMPLEFORMAT_UINT);
  const bool grey =
      layout.meaning == PHOTOMETRIC_MINISBLACK || layout.meaning == PHOTOMETRIC_MINISWHITE;
  const bool sizes = layout.bits == 8 ||
                     (layout.bits == 16 && layout.meaning != PHOTOMETRIC_MINISWHITE) ||
                     (layout.bits == 1 && grey && layout.samples == 1);
  bool known = sizes && format == SAMPLEFORMAT_UINT && layout.samples <= 4;
  if (layout.meaning == PHOTOMETRIC_PALETTE) {
    auto& [red, green, blue] = layout.palette;
    known = known && layout.bits == 8 && layout.samples == 1 &&
            TIFFGetField(tiff, TIFFTAG_COLORMAP, &red, &green, &blue) != 0;
  } else if (layout.meaning == PHOTOMETRIC_RGB) {
    known = known && layout.samples >= 3;
  } else {
    // Grey of 16 bits with alpha is none of Pillow's modes.
    known = known && grey && layout.samples <= (layout.bits == 8 ? 2u : 1u);
  }
  uint16_t extra = 0;
  const uint16_t* kinds = nullptr;
  if (layout.samples > 1 && TIFFGetField(tiff, TIFFTAG_EXTRASAMPLES, &extra, &kinds) != 0 &&
      extra == 1 && kinds[0] != EXTRASAMPLE_UNSPECIFIED) {
    layout.alpha = layout.samples - 1u;
  }
  if (!known) {
    throw_unsupported(fmt::format("a TIFF of a kind that is not read ({} samples of {} bits, "
                                  "photometric {}, sample format {})",
                                  layout.samples, layout.bits, layout.meaning, format),
                      name);
  }
  return layout;
}

/// One sample of a row as 8 bits.
uint8_t sample_at(const Layout& layout, const std::byte* row, size_t index) noexcept {
  if (layout.bits == 1) {
    const auto bit = std::to_integer<unsigned>(row[index / 8]) >> (7 - index % 8) & 1;
    return bit != 0 ? 255 : 0;
  }
  if (layout.bits == 8) return std::to_integer<uint8_t>(row[index]);
  uint16_t value = 0;  // in the order of this machine
  std::memcpy(&value, row + 2 * index, 2);
  if (layout.meaning == PHOTOMETRIC_RGB) return static_cast<uint8_t>(value >> 8);
  return static_cast<uint8_t>(std::min<uint16_t>(value, 255));
}

/// Writes a row of a strip or tile, of the sample `sample` alone if they are apart.
void put_row(const Layout& layout, const std::byte* row, size_t width, size_t sample,
             uint8_t* out) noexcept {
  const size_t together = layout.together();
  for (size_t x = 0; x < width; ++x, out += layout.channels()) {
    if (layout.alpha > 0 && (!layout.planar || sample == layout.alpha)) {
      out[3] = sample_at(layout, row, layout.planar ? x : x * together + layout.alpha);
    }
    if (layout.meaning == PHOTOMETRIC_RGB) {
      if (layout.planar && sample < 3) out[sample] = sample_at(layout, row, x);
      for (size_t c = 0; !layout.planar && c < 3; ++c) {
        out[c] = sample_at(layout, row, x * together + c);
      }
      continue;
    }
    if (sample > 0) continue;  // alpha
    const uint8_t value = sample_at(layout, row, x * together);
    for (size_t c = 0; c < 3; ++c) {
      out[c] = layout.meaning == PHOTOMETRIC_PALETTE
                   ? static_cast<uint8_t>(layout.palette[c][value] >> 8)
               : layout.meaning == PHOTOMETRIC_MINISWHITE ? static_cast<uint8_t>(255 - value)
                                                          : value;
    }
  }
}

/// How many samples of a row of 16 bits are above 255.
size_t count_clipped(const std::byte* row, size_t width) noexcept {
  size_t clipped = 0;
  for (size_t x = 0; x < width; ++x) {
    uint16_t value = 0;
    std::memcpy(&value, row + 2 * x, 2);
    clipped += value > 255;
  }
  return clipped;
}

/// The bytes of a strip or tile that the file has.
std::span<const std::byte> stored(TIFF* tiff, uint32_t number, std::span<const std::byte> file) {
  const uint64_t offset = TIFFGetStrileOffset(tiff, number);
  if (offset >= file.size()) return {};
  const auto rest = file.subspan(offset);
  return rest.first(std::min<uint64_t>(rest.size(), TIFFGetStrileByteCount(tiff, number)));
}

/// Copies the rows that a cut file has of an uncompressed strip; returns their number.
size_t copy_rows(TIFF* tiff, std::span<const std::byte> data, size_t rows, size_t row_bytes,
                 size_t bits, std::span<std::byte> strip) {
  const size_t there = std::min(rows, data.size() / row_bytes);
  std::copy_n(data.begin(), there * row_bytes, strip.begin());
  if (bits == 16 && TIFFIsByteSwapped(tiff) != 0) {
    TIFFSwabArrayOfShort(reinterpret_cast<uint16_t*>(strip.data()),
                         static_cast<tmsize_t>(there * row_bytes / 2));
  }
  return there;
}

/// Whether Deflate data are longer than their strip or have another checksum than they state:
/// libtiff reads neither.
bool has_wrong_sum(std::span<const std::byte> data, size_t most_bytes) {
  std::array<Bytef, 1 << 14> out;
  z_stream stream{};
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(data.data()));  // not written
  stream.avail_in = static_cast<uInt>(data.size());
  if (inflateInit(&stream) != Z_OK) throw std::bad_alloc();
  int status = Z_OK;
  while (status == Z_OK && stream.total_out <= most_bytes) {
    stream.next_out = out.data();
    stream.avail_out = out.size();
    status = inflate(&stream, Z_NO_FLUSH);
  }
  inflateEnd(&stream);
  return status == Z_DATA_ERROR || stream.total_out > most_bytes;
}

}  // namespace

bool is_tiff(std::string_view head) noexcept {
  return head.starts_with("II*\0"sv) || head.starts_with("MM\0*"sv) ||
         head.starts_with("II+\0"sv) || head.starts_with("MM\0+"sv);
}

ImageHeader read_tiff_header(std::span<const std::byte> bytes, const std::string& name) {
  Source source{.bytes = bytes};
  return header_of(open_tiff(source, name).get());
}

DecodedImage decode_tiff(std::span<const std::byte> bytes, const std::string& name) {
  Source source{.bytes = bytes};
  const Tiff tiff = open_tiff(source, name);
  const ImageHeader header = header_of(tiff.get());
  check_size(header.height, header.width, kFormat, name);
  const Layout layout = layout_of(tiff.get(), name);
  const auto height = static_cast<size_t>(header.height);
  const auto width = static_cast<size_t>(header.width);

  // A strip is a tile as wide as the image.
  const bool tiled = TIFFIsTiled(tiff.get()) != 0;
  const size_t tile_height =
      tiled ? field<uint32_t>(tiff.get(), TIFFTAG_TILELENGTH, 0)
            : std::min<size_t>(field<uint32_t>(tiff.get(), TIFFTAG_ROWSPERSTRIP, 0), height);
  const size_t tile_width = tiled ? field<uint32_t>(tiff.get(), TIFFTAG_TILEWIDTH, 0) : width;
  const tmsize_t tile_bytes = tiled ? TIFFTileSize(tiff.get()) : TIFFStripSize(tiff.get());
  const size_t row_bytes = (tile_width * layout.together() * layout.bits + 7) / 8;
  if (tile_height == 0 || tile_width == 0 || tile_bytes <= 0 || tile_bytes > kMaxAllocation ||
      static_cast<size_t>(tile_bytes) / tile_height < row_bytes) {
    throw_damaged(kFormat, name, "its strips or tiles have no fitting size");
  }
  std::vector<std::byte> tile(static_cast<size_t>(tile_bytes));

  DecodedImage result;
  result.orientation = header.orientation;
  result.image =
      allocate_image(header.height, header.width, name, static_cast<int>(layout.channels()));
  size_t missing = 0;  // pixels
  size_t clipped = 0;
  bool wrong_sum = false;
  const auto compression = field<uint16_t>(tiff.get(), TIFFTAG_COMPRESSION, COMPRESSION_NONE);
  const bool deflate =
      compression == COMPRESSION_DEFLATE || compression == COMPRESSION_ADOBE_DEFLATE;
  uint32_t number = 0;
  for (size_t sample = 0; sample < (layout.planar ? layout.samples : 1); ++sample) {
    for (size_t top = 0; top < height; top += tile_height) {
      for (size_t left = 0; left < width; left += tile_width, ++number) {
        size_t rows = std::min(tile_height, height - top);
        const size_t columns = std::min(tile_width, width - left);
        const auto wanted = static_cast<tmsize_t>(tiled ? tile.size() : rows * row_bytes);
        const tmsize_t got = tiled ? TIFFReadEncodedTile(tiff.get(), number, tile.data(), wanted)
                                   : TIFFReadEncodedStrip(tiff.get(), number, tile.data(), wanted);
        const auto data = stored(tiff.get(), number, bytes);
        if (got < wanted) {
          missing += rows * columns;
          if (tiled || compression != COMPRESSION_NONE) continue;
          rows = copy_rows(tiff.get(), data, rows, row_bytes, layout.bits, tile);
          missing -= rows * columns;
        } else if (deflate && !wrong_sum) {
          wrong_sum = has_wrong_sum(data, tile.size());
        }
        for (size_t y = 0; y < rows; ++y) {
          const std::byte* row = tile.data() + y * row_bytes;
          put_row(layout, row, columns, sample,
                  result.image.rgb.data() + ((top + y) * width + left) * layout.channels());
          if (layout.bits == 16 && layout.samples == 1) clipped += count_clipped(row, columns);
        }
      }
    }
  }
  const double pixels = static_cast<double>(height) * static_cast<double>(width);
  result.image.warnings = warn_of_missing(std::min(static_cast<double>(missing) / pixels, 1.0),
                                          kFormat, name, source.message);
  if (wrong_sum && missing == 0) {
    result.image.warnings = warn_of_damage(kFormat, name, "a checksum in it is wrong",
                                           "an unknown share of its pixels is wrong");
  }
  for (std::string& warning :
       warn_of_clipped(static_cast<double>(clipped) / pixels, kFormat, name)) {
    result.image.warnings.push_back(std::move(warning));
  }
  return result;
}

}  // namespace kvlm
