#include <fmt/format.h>
#include <libheif/heif.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "kernels/base/printable.h"
#include "vision/decoders.h"

// HEIC through libheif: the primary image, upright, as 8-bit RGB without its alpha.
namespace kvlm {

namespace {

constexpr char kFormat[] = "HEIC";

template <auto kFree>
struct HeifFree {
  template <class T>
  void operator()(T* object) const noexcept {
    kFree(object);
  }
};
using Context = std::unique_ptr<heif_context, HeifFree<heif_context_free>>;
using Handle = std::unique_ptr<heif_image_handle, HeifFree<heif_image_handle_release>>;
using Pixels = std::unique_ptr<heif_image, HeifFree<heif_image_release>>;
using DecodingOptions =
    std::unique_ptr<heif_decoding_options, HeifFree<heif_decoding_options_free>>;

void require_ok(const heif_error& error, const std::string& name) {
  if (error.code == heif_error_Ok) return;
  if (error.code == heif_error_Memory_allocation_error) throw std::bad_alloc();
  if (error.subcode == heif_suberror_End_of_data) throw_truncated(kFormat, name);
  const std::string detail = printable(error.message != nullptr ? error.message : "no reason");
  if (error.code == heif_error_Unsupported_filetype ||
      error.code == heif_error_Unsupported_feature) {
    throw_unsupported("a HEIC file that the libheif here does not decode (" + detail + ")", name);
  }
  throw_damaged(kFormat, name, detail);
}

struct Heif {
  Context context;
  Handle image;
};

/// Reads the boxes of a file, which must outlive the result; no pixel.
Heif open_heif(std::span<const std::byte> bytes, const std::string& name) {
  Heif heif;
  heif.context.reset(heif_context_alloc());
  if (heif.context == nullptr) throw std::bad_alloc();
  require_ok(heif_context_read_from_memory_without_copy(heif.context.get(), bytes.data(),
                                                        bytes.size(), nullptr),
             name);
  heif_image_handle* image = nullptr;
  require_ok(heif_context_get_primary_image_handle(heif.context.get(), &image), name);
  heif.image.reset(image);
  return heif;
}

}  // namespace

bool is_heif(std::string_view head) noexcept {
  if (head.size() < 12 || head.substr(4, 4) != "ftyp") return false;
  const std::string_view brand = head.substr(8, 4);
  return brand.starts_with("hei") || brand.starts_with("hev") || brand == "mif1" || brand == "msf1";
}

ImageHeader read_heif_header(std::span<const std::byte> bytes, const std::string& name) {
  const Heif heif = open_heif(bytes, name);
  return {.height = heif_image_handle_get_height(heif.image.get()),
          .width = heif_image_handle_get_width(heif.image.get())};
}

DecodedImage decode_heif(std::span<const std::byte> bytes, const std::string& name) {
  const Heif heif = open_heif(bytes, name);
  const int64_t height = heif_image_handle_get_height(heif.image.get());
  const int64_t width = heif_image_handle_get_width(heif.image.get());
  check_size(height, width, kFormat, name);
  const DecodingOptions options(heif_decoding_options_alloc());
  if (options == nullptr) throw std::bad_alloc();
  options->convert_hdr_to_8bit = 1;
  const bool alpha = heif_image_handle_has_alpha_channel(heif.image.get()) != 0;
  const int64_t channels = alpha ? 4 : 3;
  heif_image* decoded = nullptr;
  require_ok(heif_decode_image(heif.image.get(), &decoded, heif_colorspace_RGB,
                               alpha ? heif_chroma_interleaved_RGBA : heif_chroma_interleaved_RGB,
                               options.get()),
             name);
  const Pixels pixels(decoded);
  int stride = 0;
  const uint8_t* rows = heif_image_get_plane_readonly(decoded, heif_channel_interleaved, &stride);
  if (rows == nullptr || heif_image_get_width(decoded, heif_channel_interleaved) != width ||
      heif_image_get_height(decoded, heif_channel_interleaved) != height) {
    throw_damaged(kFormat, name, "its sizes differ");
  }
  DecodedImage result;  // the rotation that the file states is applied already
  result.image = allocate_image(height, width, name, static_cast<int>(channels));
  for (int64_t y = 0; y < height; ++y) {
    std::copy_n(rows + y * stride, width * channels,
                result.image.rgb.begin() + y * width * channels);
  }
  return result;
}

}  // namespace kvlm
