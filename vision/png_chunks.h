#pragma once

#include <cstddef>
#include <span>

namespace kvlm {

/// The EXIF orientation that a PNG file states, wherever in the file: by its eXIf chunk, else by
/// the text "Raw profile type exif" that ImageMagick writes, else by XMP; 1 without any. `bytes`
/// begins with the signature. Reads the list of chunks itself and inflates at most one text of each
/// kind, up to a mebibyte, where libpng would keep every text of the file. Chunks with a wrong
/// checksum are passed over. Throws nothing but std::bad_alloc.
int png_orientation(std::span<const std::byte> bytes);

}  // namespace kvlm
