#pragma once

#include <filesystem>
#include <string_view>

namespace kvlm {

/// Whether a file is named like a picture, of a format that is read or not: such a file is named
/// in a refusal, not passed over.
bool has_picture_suffix(std::string_view name);

/// Whether a file whose name has no suffix is an image by its first bytes: one that a reader of
/// folders leaves out and has to count.
bool is_unnamed_picture(const std::filesystem::path& path);

/// Whether `a` comes before `b` in natural order: runs of digits count as numbers, so frame2 is
/// before frame10; other bytes by their codes; names that differ in leading zeros alone by those.
bool natural_less(std::string_view a, std::string_view b) noexcept;

}  // namespace kvlm
