#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "kernels/base/error.h"

namespace kvlm {

/// The path that the name of a picture or video stands for: itself, or what follows file://. `kind`
/// is what messages call it: "image", "video". Throws Error{kUnsupported} for addresses of the
/// network (SCHEME://) and for data URIs, Error{kInvalidArgument} for a name with a NUL byte or
/// without a byte.
std::string path_of_name(const std::string& name, std::string_view kind);

/// Replaces %41 by A; a % that is not followed by two hex digits stays.
std::string percent_decoded(std::string_view text);

/// What is odd about a name that no file has, and the way out: blanks at an end, backslashes,
/// control characters, base64 in place of a name. Empty if nothing is.
std::string oddity_of_name(const std::string& name);

/// path_of_file_name(), relative to `folder`. Throws Error{kInvalidArgument} also for a file that
/// is not there because its name is odd.
std::string path_in(const std::filesystem::path& folder, const std::string& name,
                    std::string_view kind);

/// path_of_name() of a name that comes from elsewhere than the command line: "-" is a file.
std::string path_of_file_name(const std::string& name, std::string_view kind);

/// Throws: `found` says what is wrong with it, and what to do.
[[noreturn]] void refuse_name(ErrorCode code, std::string_view kind, const std::string& name,
                              std::string_view found);

}  // namespace kvlm
