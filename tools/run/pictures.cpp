#include "tools/run/pictures.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/file_name.h"
#include "tools/common/input_text.h"

namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr const char* kKind = "image";

}  // namespace

std::string picture_path(const std::string& name) { return path_of_name(name, kKind); }

std::string picture_file_path(const std::string& name) { return path_of_file_name(name, kKind); }

void require_picture(const std::string& name) {
  if (name == kStandardInput) return;
  std::error_code error;
  const fs::file_status status = fs::status(picture_path(name), error);
  if (status.type() == fs::file_type::not_found) {
    const std::string oddity = oddity_of_name(name);
    refuse_name(ErrorCode::kCorruptFile, kKind, name,
                oddity.empty() ? "does not exist; give the path of an image" : oddity);
  }
  if (fs::is_directory(status)) {
    refuse_name(ErrorCode::kCorruptFile, kKind, name,
                fmt::format("is a directory; to ask about each image in it, give --batch {0} --out "
                            "OUT.jsonl, or --video {0} if they are frames of a video",
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
