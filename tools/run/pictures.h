#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/model.h"
#include "vision/image.h"

namespace kvlm {

/// The path that a picture's name stands for, see path_of_name().
std::string picture_path(const std::string& name);

/// picture_path() of a name that comes from elsewhere than the command line: "-" is a file.
std::string picture_file_path(const std::string& name);

/// Throws Error{kCorruptFile} if a picture named on the command line does not exist or is a folder;
/// nothing is opened.
void require_picture(const std::string& name);

/// The picture of a name on the command line; "-" is standard input. Throws like load_image().
Image read_picture(const std::string& name);

/// A picture of the command line whose size is known; it is decoded when it is wanted.
struct OpenPicture {
  std::string name;
  PictureShape shape;
  std::optional<Image> pixels;  ///< decoded already
};

/// Reads the headers of a picture, or all of it: if `decode`, and from standard input, which can be
/// read once. Throws like read_picture().
OpenPicture open_picture(const std::string& name, bool decode);

/// What is known of pictures that are in memory, or not yet.
std::vector<PictureShape> shapes_of(const std::vector<OpenPicture>& pictures);

/// Their pixels, decoded now where they have not been.
std::vector<Image> take_pictures(std::vector<OpenPicture> pictures);

/// The picture of a name from elsewhere, where "-" is a file like any other.
Image read_picture_file(const std::string& name);

}  // namespace kvlm
