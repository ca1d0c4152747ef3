#include "vision/gif_blocks.h"

#include <algorithm>

#include "vision/decoders.h"

// Takes a GIF apart: palettes, control blocks and the LZW codes of each frame. Every length is
// checked against the file before it is followed.
namespace kvlm {

namespace {

constexpr int kHasPalette = 0x80;
// A code of 12 bits stands for at most 4096 pixels.
constexpr int64_t kPixelsPerByte = 4096;

size_t colours_of(int flags) noexcept { return size_t{2} << (flags & 7); }

/// The bits of codes, from pieces that each stand behind their length, the least significant first.
class CodeReader {
 public:
  explicit CodeReader(std::span<const std::byte> pieces) noexcept : rest_(pieces) {}

  /// The next code of `width` bits (at most 12), or nothing where there are no more.
  std::optional<unsigned> take(unsigned width) noexcept {
    while (count_ < width) {
      if (piece_ == 0) {
        if (rest_.empty()) {
          cut_ = !ended_;
          return std::nullopt;
        }
        piece_ = std::to_integer<size_t>(rest_[0]);
        rest_ = rest_.subspan(1);
        ended_ = piece_ == 0;
        if (ended_) rest_ = {};
        continue;
      }
      if (rest_.empty()) {
        cut_ = true;
        return std::nullopt;
      }
      bits_ |= std::to_integer<unsigned>(rest_[0]) << count_;
      rest_ = rest_.subspan(1);
      --piece_;
      count_ += 8;
    }
    const unsigned code = bits_ & ((1u << width) - 1);
    bits_ >>= width;
    count_ -= width;
    return code;
  }
  /// Whether there are no more because the file ends.
  bool is_cut() const noexcept { return cut_; }

 private:
  std::span<const std::byte> rest_;
  bool ended_ = false;
  bool cut_ = false;
  size_t piece_ = 0;  // bytes left of the current one
  unsigned bits_ = 0;
  unsigned count_ = 0;
};

/// Takes indices in the order of a file and puts them where they belong.
class PixelWriter {
 public:
  explicit PixelWriter(const GifFrame& frame)
      : width_(static_cast<size_t>(frame.area.width)),
        height_(static_cast<size_t>(frame.area.height)),
        passes_(frame.interlaced ? std::span<const Pass>(kInterlaced) : kPlain),
        indices_(width_ * height_) {}

  bool is_full() const noexcept { return row_ >= height_; }
  /// The share of the pixels that were not put.
  double missing() const noexcept {
    return 1 - static_cast<double>(put_) / static_cast<double>(indices_.size());
  }
  /// Writes one run, or as much of it as has a place.
  void put(std::span<const uint8_t> run) noexcept {
    while (!run.empty() && !is_full()) {
      const size_t count = std::min(run.size(), width_ - column_);
      std::copy_n(run.begin(), count, indices_.data() + row_ * width_ + column_);
      run = run.subspan(count);
      column_ += count;
      put_ += count;
      if (column_ == width_) end_row();
    }
  }
  std::vector<uint8_t> take() noexcept { return std::move(indices_); }

 private:
  /// Rows first, first + step, ...
  struct Pass {
    size_t first;
    size_t step;
  };
  static constexpr std::array kPlain = {Pass{0, 1}};
  static constexpr std::array kInterlaced = {Pass{0, 8}, Pass{4, 8}, Pass{2, 4}, Pass{1, 2}};

  void end_row() noexcept {
    column_ = 0;
    row_ += passes_[0].step;
    while (row_ >= height_ && passes_.size() > 1) {
      passes_ = passes_.subspan(1);
      row_ = passes_[0].first;
    }
  }

  size_t width_;
  size_t height_;
  std::span<const Pass> passes_;  // this one and those to come
  size_t row_ = 0;
  size_t column_ = 0;
  size_t put_ = 0;
  std::vector<uint8_t> indices_;
};

}  // namespace

GifPalette grey_palette() noexcept {
  GifPalette palette;
  for (size_t i = 0; i < palette.size(); ++i) palette[i].fill(static_cast<uint8_t>(i));
  return palette;
}

GifReader::GifReader(std::span<const std::byte> bytes, const std::string& name)
    : rest_(bytes), name_(name) {
  take(6);  // the signature
  width_ = u16();
  height_ = u16();
  const int flags = u8();
  background_ = u8();
  take(1);  // aspect ratio
  if ((flags & kHasPalette) == 0) {
    background_ = 0;
    return;
  }
  colours_ = colours_of(flags);
  palette_ = take_palette(colours_);
}

std::optional<GifFrame> GifReader::next() {
  GifFrame frame;
  for (;;) {
    if (rest_.empty() && any_) return std::nullopt;  // the end mark may be missing
    const uint8_t mark = u8();
    if (mark == ';') return std::nullopt;
    if (mark == '!') {
      const bool graphic_control = u8() == 0xf9;
      const auto block = take_pieces();
      if (!graphic_control || block.size() < 4) continue;
      const auto flags = std::to_integer<unsigned>(block[0]);
      if ((flags & 1) != 0) frame.transparent = std::to_integer<uint8_t>(block[3]);
      frame.delay_cs = std::to_integer<int>(block[1]) | std::to_integer<int>(block[2]) << 8;
      frame.disposal = static_cast<GifDisposal>(std::min(flags >> 2 & 7, 3u));
    }
    if (mark == ',') break;  // bytes between the blocks are passed over
  }
  frame.area.left = u16();
  frame.area.top = u16();
  frame.area.width = u16();
  frame.area.height = u16();
  const int flags = u8();
  frame.interlaced = (flags & 0x40) != 0;
  if ((flags & kHasPalette) != 0) {
    frame.colours = colours_of(flags);
    frame.palette = take_palette(frame.colours);
    frame.greys = !frame.palette;
  }
  frame.codes = rest_;
  any_ = true;
  return frame;
}

void GifReader::skip_codes() {
  take(1);  // the size of the first codes
  take_pieces();
}

std::span<const std::byte> GifReader::take(size_t count) {
  if (count > rest_.size()) throw_truncated(kGifFormat, name_);
  const auto taken = rest_.first(count);
  rest_ = rest_.subspan(count);
  return taken;
}

uint8_t GifReader::u8() { return std::to_integer<uint8_t>(take(1)[0]); }

int GifReader::u16() {
  const int low = u8();
  return low | u8() << 8;
}

/// Takes pieces, each behind its length, up to an empty one; returns the first.
std::span<const std::byte> GifReader::take_pieces() {
  const auto first = take(u8());
  for (size_t length = first.size(); length > 0;) {
    length = u8();
    take(length);
  }
  return first;
}

std::optional<GifPalette> GifReader::take_palette(size_t colours) {
  const GifPalette greys = grey_palette();
  GifPalette palette{};
  for (size_t i = 0; i < colours; ++i) {
    for (uint8_t& value : palette[i]) value = u8();
  }
  if (std::equal(palette.begin(), palette.begin() + colours, greys.begin())) return std::nullopt;
  return palette;
}

std::vector<uint8_t> decode_gif_codes(const GifFrame& frame, const std::string& name,
                                      GifLoss* loss) {
  constexpr size_t kMaxCodes = 4096;
  if (frame.area.width < 1 || frame.area.height < 1) {
    throw_damaged(kGifFormat, name, "an image in it has no pixels");
  }
  if (frame.codes.empty()) throw_truncated(kGifFormat, name);
  const auto index_bits = std::to_integer<unsigned>(frame.codes[0]);
  if (index_bits < 1 || index_bits > 8) {
    throw_damaged(kGifFormat, name, "the width of its first codes is not 1 to 8 bits");
  }
  check_file_bytes(frame.area.height, frame.area.width, frame.codes.size(), kPixelsPerByte,
                   kGifFormat, name);
  const unsigned clear = 1u << index_bits;
  const unsigned end = clear + 1;

  // Entry c is the string of entry before[c], then last[c]; it has lengths[c] indices.
  std::array<uint16_t, kMaxCodes> before{};
  std::array<uint16_t, kMaxCodes> lengths{};
  std::array<uint8_t, kMaxCodes> last{};
  for (unsigned i = 0; i < clear; ++i) {
    last[i] = static_cast<uint8_t>(i);
    lengths[i] = 1;
  }
  std::array<uint8_t, kMaxCodes + 1> run{};
  CodeReader codes(frame.codes.subspan(1));
  PixelWriter pixels(frame);
  unsigned width = index_bits + 1;
  unsigned next = end + 1;        // the entry to be made
  unsigned previous = kMaxCodes;  // none
  while (!pixels.is_full()) {
    const std::optional<unsigned> code = codes.take(width);
    if (!code || *code == end) {
      const char* detail = codes.is_cut() ? "" : "its codes end before its pixels";
      if (loss != nullptr) {
        *loss = {pixels.missing(), detail};
        return pixels.take();
      }
      if (codes.is_cut()) throw_truncated(kGifFormat, name);
      throw_damaged(kGifFormat, name, detail);
    }
    if (*code == clear) {
      width = index_bits + 1;
      next = end + 1;
      previous = kMaxCodes;
      continue;
    }
    // A code may name the entry that it completes: the string before it, then its first index.
    const bool known = *code < next;
    if (!known && (previous == kMaxCodes || *code != next)) {
      const char* detail = "it uses a code before defining it";
      if (loss == nullptr) throw_damaged(kGifFormat, name, detail);
      *loss = {pixels.missing(), detail};
      return pixels.take();
    }
    unsigned at = known ? *code : previous;
    const size_t length = lengths[at];
    for (size_t i = length; i-- > 0; at = before[at]) run[i] = last[at];
    run[length] = run[0];
    pixels.put(std::span(run).first(known ? length : length + 1));
    if (previous < kMaxCodes && next < kMaxCodes) {  // a full table stays as it is
      before[next] = static_cast<uint16_t>(previous);
      last[next] = run[0];
      lengths[next] = static_cast<uint16_t>(lengths[previous] + 1);
      ++next;
      if (next == 1u << width && width < 12) ++width;
    }
    previous = *code;
  }
  return pixels.take();
}

}  // namespace kvlm
