#pragma once

#include <string>
#include <string_view>

#include "vision/image.h"

namespace kvlm {

/// Whether a file's name ends as one of a picture, of a format that is read here or not.
bool is_picture_name(std::string_view name);

/// The path that a picture's name stands for: itself, or what follows file://. Throws
/// Error{kUnsupported} for addresses of the network and for data URIs, Error{kInvalidArgument} for
/// a name with a NUL byte or without a byte.
std::string picture_path(const std::string& name);

/// picture_path() of a name that comes from elsewhere than the command line: "-" is a file.
std::string picture_file_path(const std::string& name);

/// Throws Error{kCorruptFile} if a picture named on the command line does not exist or is a folder;
/// nothing is opened.
void require_picture(const std::string& name);

/// The picture of a name on the command line; "-" is standard input. Throws like load_image().
Image read_picture(const std::string& name);

/// The picture of a name from elsewhere, where "-" is a file like any other.
Image read_picture_file(const std::string& name);

}  // namespace kvlm
