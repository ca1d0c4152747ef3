#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "vision/image.h"

namespace kvlm {

/// Private to vision/image.cpp: one function per file format. `bytes` starts with the format's
/// signature; `name` is only used in messages. They throw what decode_image says.
struct DecodedImage {
  Image image;
  int orientation = 1;  // EXIF, 1 to 8; not applied yet
};

DecodedImage decode_jpeg(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_png(std::span<const std::byte> bytes, const std::string& name);
DecodedImage decode_bmp(std::span<const std::byte> bytes, const std::string& name);

/// An image of that size, zeroed. Throws Error{kCorruptFile} before any allocation if a side is not
/// positive, or the pixels are more than 2^28 or more than `file_bytes` could describe in `format`.
Image allocate_image(int64_t height, int64_t width, size_t file_bytes, const char* format,
                     const std::string& name);

/// Throws Error{kCorruptFile}: the file is not whole.
[[noreturn]] void throw_truncated(const char* format, const std::string& name);
/// Throws Error{kCorruptFile}: `detail` says what is wrong with it.
[[noreturn]] void throw_damaged(const char* format, const std::string& name,
                                const std::string& detail);
/// Throws Error{kUnsupported}: `detail` says which kind of file it is.
[[noreturn]] void throw_unsupported(const std::string& detail, const std::string& name);

}  // namespace kvlm
