#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvlm {

/// Private to vision/gif.cpp and vision/gif_video.cpp: the blocks of a GIF and the codes in them.
/// What throws, throws Error{kCorruptFile}.

inline constexpr char kGifFormat[] = "GIF";

/// Colours by index; those that a file lacks are black, as with Pillow.
using GifPalette = std::array<std::array<uint8_t, 3>, 256>;

/// Every index its own grey.
GifPalette grey_palette() noexcept;

/// Where a picture is on the canvas.
struct GifArea {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
};

/// What happens to a picture's area before the next one is drawn.
enum class GifDisposal : uint8_t { kUnstated = 0, kKeep = 1, kBackground = 2, kPrevious = 3 };

/// One picture of a file, not decoded.
struct GifFrame {
  GifArea area;
  bool interlaced = false;
  /// Of its own. One that lists the greys by their own numbers has `greys` set: Pillow takes it for
  /// no palette, which makes a first picture one of the global palette and later ones grey.
  std::optional<GifPalette> palette;
  bool greys = false;
  size_t colours = 0;                  // entries of `palette`
  std::optional<uint8_t> transparent;  // an index
  int delay_cs = 0;                    // hundredths of a second
  GifDisposal disposal = GifDisposal::kUnstated;
  std::span<const std::byte>
      codes;  // the size of the first codes, then pieces behind their lengths
};

/// Reads a file front to back; it must outlive the reader.
class GifReader {
 public:
  /// Reads up to the first picture. `bytes` begins as a GIF does; `name` is fit for messages.
  GifReader(std::span<const std::byte> bytes, const std::string& name);

  int width() const noexcept { return width_; }
  int height() const noexcept { return height_; }
  /// Nothing without a global palette, or with one that lists the greys by their own numbers.
  const std::optional<GifPalette>& palette() const noexcept { return palette_; }
  size_t colours() const noexcept { return colours_; }
  uint8_t background() const noexcept { return background_; }

  /// The next picture, whose codes have not been looked at, or nothing after the last: behind it
  /// are the end mark and what follows, or nothing.
  std::optional<GifFrame> next();
  /// Passes over the codes of the picture that next() gave. Throws where the file ends before.
  void skip_codes();

 private:
  std::span<const std::byte> take(size_t count);
  uint8_t u8();
  int u16();
  std::span<const std::byte> take_pieces();
  std::optional<GifPalette> take_palette(size_t colours);

  std::span<const std::byte> rest_;
  const std::string& name_;
  int width_ = 0;
  int height_ = 0;
  std::optional<GifPalette> palette_;
  size_t colours_ = 0;
  uint8_t background_ = 0;
  bool any_ = false;  // whether there was a picture
};

/// What of a frame's pixels its codes do not hold.
struct GifLoss {
  double missing = 0;  // share of the pixels
  std::string detail;  // empty where the file ends
};

/// The indices of a picture, row-major (height, width), interlaced rows in their places. Codes that
/// follow the last pixel are passed over. If the codes end before the pixels do, the rest are index
/// 0 and `loss` says how many; without one, it throws.
std::vector<uint8_t> decode_gif_codes(const GifFrame& frame, const std::string& name,
                                      GifLoss* loss = nullptr);

}  // namespace kvlm
