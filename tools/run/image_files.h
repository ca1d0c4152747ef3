#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// Says which files are the program's own: they count as nothing.
using IgnoreFile = std::function<bool(const std::string&)>;

/// The files that are named like images, as has_picture_suffix() says, in a folder, by name.
/// `left_out` becomes a sentence on the rest with the way to get it, or empty: folders, videos,
/// hidden files, files of other names, some of which are images. Throws Error{kCorruptFile} if the
/// folder cannot be read.
std::vector<std::string> images_in(const std::string& folder, const IgnoreFile& ignored,
                                   std::string& left_out);

/// Whether a path is a pattern: it has *, ? or [, and no file has that name.
bool is_pattern(const std::string& path);

/// The files that a pattern matches, by name: * and ? match within a name, ** any number of
/// folders; at the end of a pattern, ** matches images, and `left_out` says of the rest what that
/// of images_in() does. Hidden names are matched by a dot only. Throws Error{kCorruptFile} if a
/// folder cannot be read.
std::vector<std::string> files_of_pattern(const std::string& pattern, const IgnoreFile& ignored,
                                          std::string& left_out);

/// The part of a pattern that names one folder: all before the first name with a wildcard.
std::string folder_of_pattern(const std::string& pattern);

/// Whether a file with this beginning is an image, whatever its name.
bool begins_like_image(std::string_view head);

/// Whether a file is named like a video.
bool has_video_suffix(std::string_view name);

}  // namespace kvlm
