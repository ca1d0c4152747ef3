#include "tools/run/pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/input_text.h"

namespace kvlm {

namespace {

namespace fs = std::filesystem;

// Of formats that are not read, too: such a file is named, not passed over.
constexpr std::array<std::string_view, 19> kSuffixes = {
    ".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif",  ".bmp",  ".dib", ".pgm", ".ppm",
    ".pnm", ".tga", ".tif",  ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl"};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

/// Replaces %41 by A; a % that is not followed by two hex digits stays.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    const char* digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(digits, digits + 2, code, 16).ptr == digits + 2) {
      out += static_cast<char>(code);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

[[noreturn]] void refuse(ErrorCode code, const std::string& name, const std::string& rest) {
  throw Error(code, fmt::format("image {} {}", printable(name), rest));
}

}  // namespace

bool is_picture_name(std::string_view name) {
  const std::string suffix = lower(fs::path(name).extension().string());
  return std::ranges::find(kSuffixes, suffix) != kSuffixes.end();
}

std::string picture_path(const std::string& name) {
  std::string path = name;
  const std::string start = lower(name.substr(0, 8));
  if (start.starts_with("http:") || start.starts_with("https:") || start.starts_with("ftp:")) {
    refuse(ErrorCode::kUnsupported, name,
           "is an address, and nothing is fetched from a network; download it and give the file");
  }
  if (start.starts_with("data:")) {
    refuse(ErrorCode::kUnsupported, name,
           "is a data URI, which is not read; write the picture to a file and give that");
  }
  if (start.starts_with("file:///")) path = percent_decoded(name.substr(7));
  if (path.empty() || path.find('\0') != std::string::npos) {
    refuse(ErrorCode::kInvalidArgument, name.empty() ? "\"\"" : name,
           "is no name of a file; give the path of a picture");
  }
  return path;
}

std::string picture_file_path(const std::string& name) {
  return name == kStandardInput ? "./-" : picture_path(name);
}

void require_picture(const std::string& name) {
  if (name == kStandardInput) return;
  std::error_code error;
  const fs::file_status status = fs::status(picture_path(name), error);
  if (status.type() == fs::file_type::not_found) {
    refuse(ErrorCode::kCorruptFile, name, "does not exist; give the path of a picture");
  }
  if (fs::is_directory(status)) {
    refuse(ErrorCode::kCorruptFile, name,
           fmt::format("is a directory; to ask about each picture in it, give --batch {} --out "
                       "OUT.jsonl",
                       printable(name)));
  }
}

Image read_picture(const std::string& name) { return load_image(picture_path(name)); }

OpenPicture open_picture(const std::string& name, bool decode) {
  if (decode || name == kStandardInput) {
    Image image = read_picture(name);
    PictureShape shape{image.height, image.width, image.name};
    return {name, std::move(shape), std::move(image)};
  }
  const std::string path = picture_path(name);
  const ImageInfo info = probe_image(path);
  return {name, {info.height, info.width, image_name(path)}, std::nullopt};
}

std::vector<PictureShape> shapes_of(const std::vector<OpenPicture>& pictures) {
  std::vector<PictureShape> shapes;
  for (const OpenPicture& picture : pictures) shapes.push_back(picture.shape);
  return shapes;
}

std::vector<Image> take_pictures(std::vector<OpenPicture> pictures) {
  std::vector<Image> images;
  for (OpenPicture& picture : pictures) {
    images.push_back(picture.pixels ? *std::move(picture.pixels) : read_picture(picture.name));
  }
  return images;
}

Image read_picture_file(const std::string& name) { return load_image(picture_file_path(name)); }

}  // namespace kvlm
