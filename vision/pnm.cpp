#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "vision/decoders.h"

namespace kvlm {

namespace {

// Nothing here wants decoding, and stb_image would leave samples of 16 bits in the wrong order and
// the greatest value unread.
constexpr char kFormat[] = "PNM";

bool is_blank(char c) noexcept { return c == ' ' || (c >= '\t' && c <= '\r'); }

/// Reads the numbers of a header, with comments between them.
class HeaderReader {
 public:
  HeaderReader(std::string_view rest, const std::string& name) noexcept
      : rest_(rest), name_(name) {}

  /// The next number; what follows it must be a blank, which is taken, too.
  int64_t number() {
    skip_blanks();
    int64_t value = 0;
    size_t digits = 0;
    for (; digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9'; ++digits) {
      if (digits == 10) fail();
      value = value * 10 + (rest_[digits] - '0');
    }
    if (digits == rest_.size()) throw_truncated(kFormat, name_);
    if (digits == 0 || !is_blank(rest_[digits])) fail();
    rest_.remove_prefix(digits + 1);
    return value;
  }
  std::string_view rest() const noexcept { return rest_; }

 private:
  [[noreturn]] void fail() const {
    throw_damaged(kFormat, name_, "its header has a field that is not a number");
  }
  void skip_blanks() noexcept {
    while (!rest_.empty() && (is_blank(rest_[0]) || rest_[0] == '#')) {
      const bool comment = rest_[0] == '#';
      const size_t end = comment ? rest_.find_first_of("\r\n") : 1;
      rest_.remove_prefix(std::min(end, rest_.size()));
    }
  }

  std::string_view rest_;
  const std::string& name_;
};

struct PnmHeader {
  int64_t height;
  int64_t width;
  int64_t max_value;
  int channels;
  std::string_view samples;
};

PnmHeader read_header(std::span<const std::byte> bytes, const std::string& name) {
  const std::string_view text = as_text(bytes);
  const char kind = text[1];
  if (kind != '5' && kind != '6') {
    throw_unsupported(std::string("a PNM file in text, of bits or with alpha (P") + kind + ")",
                      name);
  }
  HeaderReader reader(text.substr(2), name);
  PnmHeader header{};
  header.width = reader.number();
  header.height = reader.number();
  header.max_value = reader.number();
  header.channels = kind == '5' ? 1 : 3;
  header.samples = reader.rest();
  if (header.max_value < 1 || header.max_value > 65535) {
    throw_damaged(kFormat, name, "its largest value is " + std::to_string(header.max_value));
  }
  return header;
}

/// `value` of `max_value` in 0 to `limit`, rounded as Python does.
int64_t scaled(int64_t value, int64_t max_value, int64_t limit) noexcept {
  const double part = static_cast<double>(value) / static_cast<double>(max_value);
  return std::min(static_cast<int64_t>(std::nearbyint(part * static_cast<double>(limit))), limit);
}

/// What becomes of every sample. Pillow holds grey of more than 8 bits in integers up to 65535,
/// which it then clips at 255 instead of scaling them.
std::vector<uint8_t> sample_table(const PnmHeader& header) {
  const bool wide = header.max_value > 255;
  const int64_t limit = wide && header.channels == 1 ? 65535 : 255;
  std::vector<uint8_t> table(wide ? 65536 : 256);
  for (size_t i = 0; i < table.size(); ++i) {
    const int64_t value = scaled(static_cast<int64_t>(i), header.max_value, limit);
    table[i] = static_cast<uint8_t>(std::min<int64_t>(value, 255));
  }
  return table;
}

}  // namespace

bool is_pnm(std::string_view head) noexcept {
  return head.size() > 2 && head[0] == 'P' && head[1] >= '1' && head[1] <= '7' && is_blank(head[2]);
}

ImageHeader read_pnm_header(std::span<const std::byte> bytes, const std::string& name) {
  const PnmHeader header = read_header(bytes, name);
  return {.height = header.height, .width = header.width};
}

DecodedImage decode_pnm(std::span<const std::byte> bytes, const std::string& name) {
  const PnmHeader header = read_header(bytes, name);
  check_size(header.height, header.width, kFormat, name);
  const bool wide = header.max_value > 255;
  const int64_t count = header.height * header.width * header.channels;
  const auto needed = static_cast<size_t>(count * (wide ? 2 : 1));
  const size_t missing = needed - std::min(needed, header.samples.size());
  auto warnings =
      warn_of_missing(static_cast<double>(missing) / static_cast<double>(needed), kFormat, name);
  const auto samples = std::as_bytes(std::span(header.samples));
  std::vector<std::byte> padded;
  if (missing > 0) padded = with_zeros(samples, needed);
  const std::vector<uint8_t> table = sample_table(header);
  const auto* in = reinterpret_cast<const uint8_t*>((missing > 0 ? padded : samples).data());
  DecodedImage result;
  result.image = allocate_image(header.height, header.width, name);
  result.image.warnings = std::move(warnings);
  const int copies = 3 / header.channels;  // grey is replicated
  const bool wide_grey = wide && header.channels == 1;
  int64_t clipped = 0;
  for (auto out = result.image.rgb.begin(); out != result.image.rgb.end(); out += copies) {
    size_t sample = *in++;
    if (wide) sample = sample << 8 | *in++;
    std::fill_n(out, copies, table[sample]);
    clipped += wide_grey && scaled(static_cast<int64_t>(sample), header.max_value, 65535) > 255;
  }
  const auto clipped_share = static_cast<double>(clipped) / static_cast<double>(count);
  for (std::string& warning : warn_of_clipped(clipped_share, kFormat, name)) {
    result.image.warnings.push_back(std::move(warning));
  }
  return result;
}

}  // namespace kvlm
