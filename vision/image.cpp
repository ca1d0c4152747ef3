#include "vision/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "vision/decoders.h"

// Pictures of any supported format as upright RGB: the first bytes say which decoder reads a file,
// its header gives the size before pixels are decoded, and the EXIF orientation is applied at the
// end. Files that are something else are named for what they are.
namespace kvlm {

namespace {

using namespace std::string_view_literals;

constexpr int64_t kMaxPixels = int64_t{1} << 28;
constexpr int64_t kMaxSide = 65535;  // JPEG's; a picture of a few pixels by millions helps nobody
constexpr char kCure[] = "convert it to PNG or JPEG";

/// A kind of file that is told by the bytes at `offset` and that is not decoded here.
struct Foreign {
  std::string_view kind;
  size_t offset;
  std::string_view magic;
  const char* library = nullptr;  // with which a build would decode it
};

constexpr std::array kForeign = {
    Foreign{"a TIFF"sv, 0, "II*\0"sv, "libtiff"},
    Foreign{"a TIFF"sv, 0, "MM\0*"sv, "libtiff"},
    Foreign{"a TIFF"sv, 0, "II+\0"sv, "libtiff"},
    Foreign{"a TIFF"sv, 0, "MM\0+"sv, "libtiff"},
    Foreign{"an AVIF"sv, 4, "ftypavif"sv},
    Foreign{"an AVIF"sv, 4, "ftypavis"sv},
    Foreign{"a HEIC"sv, 4, "ftyphei"sv, "libheif"},
    Foreign{"a HEIC"sv, 4, "ftyphev"sv, "libheif"},
    Foreign{"a HEIC"sv, 4, "ftypmif1"sv, "libheif"},
    Foreign{"a HEIC"sv, 4, "ftypmsf1"sv, "libheif"},
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

constexpr std::array kVideos = {
    // behind kForeign, of which some begin alike
    Foreign{"MP4"sv, 4, "ftyp"sv},
    Foreign{"Matroska"sv, 0, "\x1a\x45\xdf\xa3"sv},
    Foreign{"AVI"sv, 8, "AVI LIST"sv},
};

bool is_of(const Foreign& foreign, std::string_view text) noexcept {
  return text.size() > foreign.offset && text.substr(foreign.offset).starts_with(foreign.magic);
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
    if (!is_of(foreign, text)) continue;
    if (foreign.library == nullptr) throw_unsupported(fmt::format("{} file", foreign.kind), name);
    throw Error(ErrorCode::kUnsupported,
                fmt::format("image {} is {} file, which this build, without {}, does not read; run "
                            "tools/setup.sh --images and build again, or {}",
                            name, foreign.kind, foreign.library, kCure));
  }
  for (const Foreign& video : kVideos) {
    if (!is_of(video, text)) continue;
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "image {} is a video ({}), not an image; give it as a video, or one of its frames",
            name, video.kind));
  }
  const std::string_view head = text.substr(0, 512);
  if (looks_like_text(head)) {
    if (head.find("<svg") != std::string_view::npos) throw_unsupported("an SVG file", name);
    if (head.starts_with("version https://git-lfs.github.com/spec/")) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("image {} is a Git LFS pointer, not the file itself; run `git lfs "
                              "pull` in its folder",
                              name));
    }
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is text, not an image; give {}", name, readable_kinds()));
  }
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("image {} is not in a known image format; give {}", name, readable_kinds()));
}

bool is_jpeg(std::string_view head) noexcept { return head.starts_with("\xff\xd8\xff"sv); }

bool is_png(std::string_view head) noexcept { return head.starts_with("\x89PNG\r\n\x1a\n"sv); }

bool is_bmp(std::string_view head) noexcept {
  // "BM" alone may begin a text; the reserved bytes of a picture are zero.
  return head.starts_with("BM"sv) && (head.size() < 10 || head.substr(6, 4) == "\0\0\0\0"sv ||
                                      !looks_like_text(head.substr(0, 64)));
}

bool is_webp(std::string_view head) noexcept {
  return head.starts_with("RIFF"sv) && head.size() >= 12 && head.substr(8, 4) == "WEBP"sv;
}

bool is_gif(std::string_view head) noexcept {
  return head.starts_with("GIF87a"sv) || head.starts_with("GIF89a"sv);
}

struct Format {
  const char* name;
  bool (*matches)(std::string_view head) noexcept;
  ImageHeader (*read_header)(std::span<const std::byte> bytes, const std::string& name);
  DecodedImage (*decode)(std::span<const std::byte> bytes, const std::string& name);
};

constexpr std::array kFormats = {
    Format{"JPEG", is_jpeg, read_jpeg_header, decode_jpeg},
    Format{"PNG", is_png, read_png_header, decode_png},
    Format{"WebP", is_webp, read_webp_header, decode_webp},
    Format{"GIF", is_gif, read_gif_header, decode_gif},
    Format{"BMP", is_bmp, read_bmp_header, decode_bmp},
    Format{"PNM", is_pnm, read_pnm_header, decode_pnm},
    Format{"TGA", is_tga, read_tga_header, decode_tga},
    Format{"HEIC", is_heif, read_heif_header, decode_heif},
    Format{"TIFF", is_tiff, read_tiff_header, decode_tiff},
};

const Format& format_of(std::span<const std::byte> bytes, const std::string& name) {
  if (bytes.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is empty (zero bytes); give {}", name, readable_kinds()));
  }
  for (const Format& format : kFormats) {
    if (format.matches(as_text(bytes))) return format;
  }
  refuse(bytes, name);
}

/// What `action` returns; that the memory does not hold it becomes an Error that names the picture.
template <class Action>
auto with_memory(const std::string& name, Action&& action) {
  try {
    return action();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("image {} cannot be decoded: out of memory; scale it down first", name));
}

std::string damage_of(const char* format, const std::string& name, const std::string& detail,
                      std::string_view harm, const char* ends_early = "ends early") {
  const std::string found = detail.empty() ? fmt::format("is a {} that {}", format, ends_early)
                                           : fmt::format("is a damaged {} ({})", format, detail);
  return fmt::format("image {} {}: {}; copy or download it again", name, found, harm);
}

/// Drops the alpha of an image that has some, in place. Warns where that hides what is seen: most
/// pixels are clear (and not white, as those of the key will be), or the colours show nothing.
void drop_alpha(DecodedImage& decoded, const std::string& name) {
  std::vector<uint8_t>& rgb = decoded.image.rgb;
  const size_t pixels = static_cast<size_t>(decoded.image.height) * decoded.image.width;
  if (rgb.size() == 3 * pixels) return;
  const uint8_t first_alpha = rgb[3];
  size_t clear = 0;
  bool one_colour = true;
  bool one_alpha = true;
  for (size_t i = 0; i < pixels; ++i) {
    const uint8_t* in = rgb.data() + 4 * i;
    clear += in[3] == 0;
    one_alpha = one_alpha && in[3] == first_alpha;
    one_colour = one_colour && (i == 0 || std::equal(in, in + 3, rgb.data()));
    std::copy_n(in, 3, rgb.data() + 3 * i);
  }
  rgb.resize(3 * pixels);
  const bool hidden = one_colour && !one_alpha;
  if (!hidden && (decoded.key || 2 * clear < pixels)) return;
  const double share = static_cast<double>(clear) / static_cast<double>(pixels);
  decoded.image.warnings.push_back(fmt::format(
      "image {} has transparency ({}), which is left out as by the models' own processors; flatten "
      "it onto a background if that hides what it shows",
      name,
      hidden ? "all of its pixels have one colour" : percent(share) + " of its pixels are clear"));
}

void whiten(Image& image, std::array<uint8_t, 3> key) noexcept {
  for (auto pixel = image.rgb.begin(); pixel != image.rgb.end(); pixel += 3) {
    if (std::equal(key.begin(), key.end(), pixel)) std::fill_n(pixel, 3, uint8_t{255});
  }
}

}  // namespace

std::string readable_kinds() {
  const bool tiff = is_tiff("II*\0"sv);
  const bool heic = is_heif(
      "\0\0\0\x18"
      "ftypheic"sv);
  return fmt::format("a PNG, JPEG, WebP, GIF, BMP, PNM{}{} or TGA file", tiff ? ", TIFF" : "",
                     heic ? ", HEIC" : "");
}

std::string shown_name(std::string_view name) {
  constexpr size_t kLimit = 120;
  if (name.size() <= kLimit) return printable(name);
  // A path's end tells more than its beginning. Not from within a letter.
  name.remove_prefix(name.size() - kLimit);
  while (!name.empty() && (static_cast<unsigned char>(name[0]) & 0xc0u) == 0x80) {
    name.remove_prefix(1);
  }
  return "..." + printable(name);
}

Image apply_orientation(Image image, int orientation) {
  if (orientation < 2 || orientation > 8) return image;
  const bool transposed = is_transposed(orientation);
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
  upright.warnings = std::move(image.warnings);
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

bool is_transposed(int orientation) noexcept { return orientation >= 5 && orientation <= 8; }

std::string_view picture_format(std::span<const std::byte> head) noexcept {
  for (const Format& format : kFormats) {
    if (format.matches(as_text(head))) return format.name;
  }
  return {};
}

void check_kind(std::span<const std::byte> head, const std::string& name) {
  static_cast<void>(format_of(head, name));
}

void check_size(int64_t height, int64_t width, const char* format, const std::string& name) {
  if (height < 1 || width < 1) {
    throw_damaged(format, name, fmt::format("its size is {} x {}", width, height));
  }
  if (height > kMaxSide || width > kMaxSide || height > kMaxPixels / width) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("image {} is a {} of {} x {} pixels, more than the limit of {} pixels "
                            "({} per side); scale it down first",
                            name, format, width, height, kMaxPixels, kMaxSide));
  }
}

void check_file_bytes(int64_t height, int64_t width, size_t file_bytes, int64_t pixels_per_byte,
                      const char* format, const std::string& name) {
  if (height * width / pixels_per_byte > static_cast<int64_t>(file_bytes)) {
    throw_truncated(format, name);
  }
}

Image allocate_image(int64_t height, int64_t width, const std::string& name, int channels) {
  Image image;
  image.height = static_cast<int>(height);
  image.width = static_cast<int>(width);
  const size_t bytes = static_cast<size_t>(height * width * channels);
  try {
    image.rgb.resize(bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("image {} of {} x {} pixels needs {} bytes of memory, more than there "
                            "is; scale it down first",
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

std::string percent(double share) {
  const double least = share > 0 ? 0.1 : 0;
  const double most = share < 1 ? 99.9 : 100;
  return fmt::format("{:.1f} %", std::clamp(100 * share, least, most));
}

std::vector<std::string> warn_of_missing(double missing, const char* format,
                                         const std::string& name, const std::string& detail) {
  if (missing <= 0) return {};
  const bool refused = missing > kMostMissing;
  const std::string harm = fmt::format("{} of its pixels are missing", percent(missing));
  const char* ends_early = refused ? "ends early (truncated)" : "ends early";
  const std::string message = damage_of(format, name, detail, harm, ends_early);
  if (refused) throw Error(ErrorCode::kCorruptFile, message);
  return {message};
}

std::vector<std::string> warn_of_damage(const char* format, const std::string& name,
                                        const std::string& detail, std::string_view harm) {
  return {damage_of(format, name, detail, harm)};
}

std::vector<std::string> warn_of_missing_end(const char* format, const std::string& name,
                                             const std::string& detail) {
  return warn_of_damage(
      format, name, detail,
      "its pixels are whole, but metadata such as its orientation may be missing");
}

std::vector<std::string> warn_of_clipped(double clipped, const char* format,
                                         const std::string& name) {
  if (clipped <= 0) return {};
  return {
      fmt::format("image {} is a {} of 16-bit grey, which is clipped at 255 as in Pillow: {} of "
                  "its pixels become white; convert it to 8 bits first",
                  name, format, percent(clipped))};
}

std::vector<std::byte> with_zeros(std::span<const std::byte> bytes, size_t needed) {
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.resize(std::max(needed, padded.size()));
  return padded;
}

void throw_unsupported(const std::string& detail, const std::string& name) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("image {} is {}, which is not supported; {}", name, detail, kCure));
}

Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   Orientation orientation) {
  const std::string shown = shown_name(name);
  return with_memory(shown, [&] {
    DecodedImage decoded = format_of(bytes, shown).decode(bytes, shown);
    drop_alpha(decoded, shown);
    if (decoded.key) whiten(decoded.image, *decoded.key);
    if (orientation == Orientation::kApply) {
      decoded.image = apply_orientation(std::move(decoded.image), decoded.orientation);
    }
    decoded.image.name = shown;
    return std::move(decoded.image);
  });
}

ImageInfo probe_image(std::span<const std::byte> bytes, const std::string& name,
                      Orientation orientation) {
  const std::string shown = shown_name(name);
  return with_memory(shown, [&] {
    const Format& format = format_of(bytes, shown);
    const ImageHeader header = format.read_header(bytes, shown);
    check_size(header.height, header.width, format.name, shown);
    ImageInfo info{static_cast<int>(header.height), static_cast<int>(header.width), format.name};
    if (orientation == Orientation::kApply && is_transposed(header.orientation)) {
      std::swap(info.height, info.width);
    }
    return info;
  });
}

}  // namespace kvlm
