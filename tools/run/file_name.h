#pragma once

#include <string>
#include <string_view>

#include "kernels/base/error.h"

namespace kvlm {

/// The path that the name of a picture or video stands for: itself, or what follows file://. `kind`
/// is what messages call it: "image", "video". Throws Error{kUnsupported} for addresses of the
/// network and for data URIs, Error{kInvalidArgument} for a name with a NUL byte or without a byte.
std::string path_of_name(const std::string& name, std::string_view kind);

/// path_of_name() of a name that comes from elsewhere than the command line: "-" is a file.
std::string path_of_file_name(const std::string& name, std::string_view kind);

/// Throws: `found` says what is wrong with it, and what to do.
[[noreturn]] void refuse_name(ErrorCode code, std::string_view kind, const std::string& name,
                              std::string_view found);

}  // namespace kvlm
