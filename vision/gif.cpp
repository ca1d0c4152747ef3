#include <algorithm>
#include <array>

#include "vision/decoders.h"
#include "vision/gif_blocks.h"

namespace kvlm {

namespace {

/// The first picture and the canvas, which a picture that is larger extends.
struct GifHeader {
  int height;
  int width;
  GifPalette palette;
  GifFrame frame;
};

GifHeader read_header(GifReader& reader, const std::string& name) {
  const std::optional<GifFrame> frame = reader.next();
  if (!frame) throw_damaged(kGifFormat, name, "it has no image");
  const GifArea& area = frame->area;
  return {.height = std::max(reader.height(), area.top + area.height),
          .width = std::max(reader.width(), area.left + area.width),
          .palette = frame->palette.value_or(reader.palette().value_or(grey_palette())),
          .frame = *frame};
}

}  // namespace

ImageHeader read_gif_header(std::span<const std::byte> bytes, const std::string& name) {
  GifReader reader(bytes, name);
  const GifHeader header = read_header(reader, name);
  return {.height = header.height, .width = header.width};
}

DecodedImage decode_gif(std::span<const std::byte> bytes, const std::string& name) {
  GifReader reader(bytes, name);
  const GifHeader header = read_header(reader, name);
  check_size(header.height, header.width, kGifFormat, name);
  const GifArea& area = header.frame.area;
  GifLoss loss;
  const std::vector<uint8_t> indices = decode_gif_codes(header.frame, name, &loss);
  auto warnings = warn_of_missing(loss.missing, kGifFormat, name, loss.detail);
  DecodedImage result;
  const std::optional<uint8_t> transparent = header.frame.transparent;
  const int channels = transparent ? 4 : 3;
  result.image = allocate_image(header.height, header.width, name, channels);
  result.image.warnings = std::move(warnings);
  const auto ground = header.palette[transparent.value_or(0)];
  uint8_t* pixels = result.image.rgb.data();
  for (uint8_t* out = pixels; out < pixels + result.image.rgb.size(); out += channels) {
    std::ranges::copy(ground, out);
  }
  const uint8_t* index = indices.data();
  for (int64_t y = area.top; y < area.top + area.height; ++y) {
    uint8_t* out = pixels + (y * header.width + area.left) * channels;
    for (int x = 0; x < area.width; ++x, ++index, out += channels) {
      std::ranges::copy(header.palette[*index], out);
      if (transparent) out[3] = *index == transparent ? 0 : 255;
    }
  }
  if (transparent) result.key = ground;
  return result;
}

}  // namespace kvlm
