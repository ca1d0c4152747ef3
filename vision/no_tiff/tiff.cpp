#include "vision/decoders.h"

// A build without libtiff: image.cpp refuses the files by name.
namespace kvlm {

bool is_tiff(std::string_view) noexcept { return false; }

ImageHeader read_tiff_header(std::span<const std::byte>, const std::string& name) {
  throw_unsupported("a TIFF file", name);
}

DecodedImage decode_tiff(std::span<const std::byte>, const std::string& name) {
  throw_unsupported("a TIFF file", name);
}

}  // namespace kvlm
