#include "vision/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "vision/decoders.h"

namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr int64_t kMaxPixels = int64_t{1} << 28;
// No format packs more pixels into a byte of file: deflate shrinks at most 1032:1 and a PNG byte
// holds up to 8 pixels; a Huffman-coded JPEG needs a bit for at most 32 x 32 pixels.
constexpr int64_t kMaxPixelsPerByte = int64_t{1032} * 8;
constexpr size_t kMaxFileBytes = size_t{1} << 31;
constexpr char kCure[] = "convert it to PNG or JPEG";

/// A kind of file that is told by the bytes at `offset` and that is not decoded here.
struct Foreign {
  std::string_view kind;
  size_t offset;
  std::string_view magic;
};

constexpr std::array kForeign = {
    Foreign{"a GIF"sv, 0, "GIF87a"sv},
    Foreign{"a GIF"sv, 0, "GIF89a"sv},
    Foreign{"a WebP"sv, 8, "WEBP"sv},
    Foreign{"a TIFF"sv, 0, "II*\0"sv},
    Foreign{"a TIFF"sv, 0, "MM\0*"sv},
    Foreign{"a TIFF"sv, 0, "II+\0"sv},
    Foreign{"a TIFF"sv, 0, "MM\0+"sv},
    Foreign{"an AVIF"sv, 4, "ftypavif"sv},
    Foreign{"an AVIF"sv, 4, "ftypavis"sv},
    Foreign{"a HEIC"sv, 4, "ftyphei"sv},
    Foreign{"a HEIC"sv, 4, "ftyphev"sv},
    Foreign{"a HEIC"sv, 4, "ftypmif1"sv},
    Foreign{"a HEIC"sv, 4, "ftypmsf1"sv},
    Foreign{"a video (MP4)"sv, 4, "ftyp"sv},
    Foreign{"a JPEG 2000"sv, 0, "\0\0\0\x0cjP  \r\n\x87\n"sv},
    Foreign{"a JPEG 2000"sv, 0, "\xff\x4f\xff\x51"sv},
    Foreign{"a JPEG XL"sv, 0, "\0\0\0\x0cJXL \r\n\x87\n"sv},
    Foreign{"a JPEG XL"sv, 0, "\xff\x0a"sv},
    Foreign{"a Photoshop (PSD)"sv, 0, "8BPS"sv},
    Foreign{"an OpenEXR"sv, 0, "v/1\x01"sv},
    Foreign{"a QOI"sv, 0, "qoif"sv},
    Foreign{"an icon (ICO)"sv, 0, "\0\0\x01\0"sv},
    Foreign{"a PDF"sv, 0, "%PDF-"sv},
};

std::string_view as_text(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_netpbm(std::string_view head) noexcept {
  return head.size() > 2 && head[0] == 'P' && head[1] >= '1' && head[1] <= '7' &&
         (head[2] == '\n' || head[2] == ' ' || head[2] == '\r' || head[2] == '\t');
}

/// Whether the beginning of a file reads as text in ASCII or an extension of it.
bool looks_like_text(std::string_view head) noexcept {
  return std::ranges::all_of(head, [](char c) {
    const auto code = static_cast<unsigned char>(c);
    return (code >= 0x20 && code != 0x7f) || (code >= '\t' && code <= '\r');
  });
}

[[noreturn]] void refuse(std::span<const std::byte> bytes, const std::string& name) {
  const std::string_view text = as_text(bytes);
  for (const Foreign& foreign : kForeign) {
    if (text.size() > foreign.offset && text.substr(foreign.offset).starts_with(foreign.magic)) {
      throw_unsupported(fmt::format("{} file", foreign.kind), name);
    }
  }
  const std::string_view head = text.substr(0, 512);
  if (is_netpbm(head)) throw_unsupported("a PNM file", name);
  if (looks_like_text(head)) {
    if (head.find("<svg") != std::string_view::npos) throw_unsupported("an SVG file", name);
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is text, not an image; give a PNG, JPEG or BMP file", name));
  }
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("image {} is no image that is known here; give a PNG, JPEG or BMP file", name));
}

DecodedImage decode_any(std::span<const std::byte> bytes, const std::string& name) {
  if (bytes.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is empty (zero bytes); give a PNG, JPEG or BMP file", name));
  }
  const std::string_view text = as_text(bytes);
  if (text.starts_with("\xff\xd8\xff"sv)) return decode_jpeg(bytes, name);
  if (text.starts_with("\x89PNG\r\n\x1a\n"sv)) return decode_png(bytes, name);
  // "BM" alone may begin a text; the reserved bytes of a picture are zero.
  if (text.starts_with("BM"sv) && (text.size() < 10 || text.substr(6, 4) == "\0\0\0\0"sv ||
                                   !looks_like_text(text.substr(0, 64)))) {
    return decode_bmp(bytes, name);
  }
  refuse(bytes, name);
}

/// Turns and mirrors a picture as EXIF's orientation says; one outside 2 to 8 changes nothing.
Image apply_orientation(Image image, int orientation) {
  if (orientation < 2 || orientation > 8) return image;
  const bool transposed = orientation >= 5;
  // Seen from the upright picture: does the stored one run backwards along its own axis?
  const bool flip_rows =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  const bool flip_columns =
      orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;

  const auto stored_height = static_cast<std::ptrdiff_t>(image.height);
  const auto stored_width = static_cast<std::ptrdiff_t>(image.width);
  Image upright;
  upright.height = transposed ? image.width : image.height;
  upright.width = transposed ? image.height : image.width;
  upright.rgb.resize(image.rgb.size());

  const std::ptrdiff_t row_step = (flip_rows ? -3 : 3) * stored_width;
  const std::ptrdiff_t column_step = flip_columns ? -3 : 3;
  const uint8_t* origin = image.rgb.data() +
                          (flip_rows ? (stored_height - 1) * stored_width * 3 : 0) +
                          (flip_columns ? (stored_width - 1) * 3 : 0);
  const std::ptrdiff_t down = transposed ? column_step : row_step;
  const std::ptrdiff_t right = transposed ? row_step : column_step;
  const std::ptrdiff_t height = upright.height;
  const std::ptrdiff_t width = upright.width;
  constexpr std::ptrdiff_t kTile = 32;  // square tiles, so that a transposition stays in the cache
  for (std::ptrdiff_t y0 = 0; y0 < height; y0 += kTile) {
    for (std::ptrdiff_t x0 = 0; x0 < width; x0 += kTile) {
      for (std::ptrdiff_t y = y0; y < std::min(y0 + kTile, height); ++y) {
        uint8_t* out = upright.rgb.data() + (y * width + x0) * 3;
        for (std::ptrdiff_t x = x0; x < std::min(x0 + kTile, width); ++x, out += 3) {
          std::copy_n(origin + y * down + x * right, 3, out);
        }
      }
    }
  }
  return upright;
}

std::vector<std::byte> read_file(const std::filesystem::path& path, const std::string& name) {
  const auto fail = [&name](const char* what) {
    return Error(ErrorCode::kCorruptFile,
                 fmt::format("image {} {}; give the path of a PNG, JPEG or BMP file", name, what));
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) throw fail("does not exist");
  if (std::filesystem::is_directory(status)) throw fail("is a directory");
  std::ifstream in(path, std::ios::binary);
  if (!in) throw fail("cannot be opened for reading");
  // By pieces, for a pipe has no size to ask for.
  std::vector<std::byte> bytes;
  size_t filled = 0;
  while (in) {
    bytes.resize(std::max(bytes.size() * 2, size_t{1} << 16));
    in.read(reinterpret_cast<char*>(bytes.data() + filled),
            static_cast<std::streamsize>(bytes.size() - filled));
    filled += static_cast<size_t>(in.gcount());
    if (filled > kMaxFileBytes) throw fail("is larger than 2 GiB");
  }
  if (in.bad()) throw fail("cannot be read");
  bytes.resize(filled);
  return bytes;
}

}  // namespace

Image allocate_image(int64_t height, int64_t width, size_t file_bytes, const char* format,
                     const std::string& name) {
  if (height < 1 || width < 1) {
    throw_damaged(format, name, fmt::format("its size is {} x {}", width, height));
  }
  if (height > kMaxPixels / width) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is a {} of {} x {} pixels, more than the {} that are "
                            "decoded; scale it down first",
                            name, format, width, height, kMaxPixels));
  }
  if (height * width / kMaxPixelsPerByte > static_cast<int64_t>(file_bytes)) {
    throw_truncated(format, name);
  }
  Image image;
  image.height = static_cast<int>(height);
  image.width = static_cast<int>(width);
  const size_t bytes = static_cast<size_t>(height * width) * 3;
  try {
    image.rgb.resize(bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("image {} of {} x {} pixels needs {} bytes of memory, which are not "
                            "there; scale it down first",
                            name, width, height, bytes));
  }
  return image;
}

void throw_truncated(const char* format, const std::string& name) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("image {} is a {} that ends early (truncated); copy or download it again",
                          name, format));
}

void throw_damaged(const char* format, const std::string& name, const std::string& detail) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("image {} is a damaged {} ({}); copy or download it again", name, format,
                          detail));
}

void throw_unsupported(const std::string& detail, const std::string& name) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("image {} is {}, which is not supported; {}", name, detail, kCure));
}

Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   Orientation orientation) {
  DecodedImage decoded = decode_any(bytes, name);
  Image image = orientation == Orientation::kIgnore
                    ? std::move(decoded.image)
                    : apply_orientation(std::move(decoded.image), decoded.orientation);
  image.name = name;
  return image;
}

Image load_image(const std::filesystem::path& path, Orientation orientation) {
  const std::string name = path.string();
  return decode_image(read_file(path, name), name, orientation);
}

}  // namespace kvlm
