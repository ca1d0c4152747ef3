#include "vision/decoders.h"

// A build without libheif: image.cpp refuses the files by name.
namespace kvlm {

bool is_heif(std::string_view) noexcept { return false; }

ImageHeader read_heif_header(std::span<const std::byte>, const std::string& name) {
  throw_unsupported("a HEIC file", name);
}

DecodedImage decode_heif(std::span<const std::byte>, const std::string& name) {
  throw_unsupported("a HEIC file", name);
}

}  // namespace kvlm
