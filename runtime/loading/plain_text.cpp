#include "runtime/loading/plain_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/base/error.h"
#include "llm/unicode.h"

// A person's text in whatever encoding an editor left it: UTF-8 or UTF-16, with or without a mark,
// and any line ends are read; UTF-32, UTF-7, NUL bytes and the rest are refused by name.
namespace kvlm {

namespace {

constexpr std::string_view kMark = "\xef\xbb\xbf";
constexpr std::string_view kMarkLittle("\xff\xfe", 2);
constexpr std::string_view kMarkBig("\xfe\xff", 2);
constexpr std::string_view kMark32Little("\xff\xfe\0\0", 4);
constexpr std::string_view kMark32Big("\0\0\xfe\xff", 4);
/// In UTF-7: a mark, {" and [{.
constexpr std::string_view kUtf7[] = {"+/v8", "+AHs", "+AFs"};
/// Bytes that tell the encoding.
constexpr size_t kFirstBytes = 4;
/// A text without \n so far that is longer has \r as its line end.
constexpr size_t kMostWaiting = size_t{1} << 26;

bool is_high_surrogate(char32_t unit) { return unit >= 0xd800 && unit < 0xdc00; }
bool is_surrogate(char32_t unit) { return unit >= 0xd800 && unit < 0xe000; }

/// Whether two-byte units have a zero byte at `zero` (0 or 1) and none at the other.
bool has_zeros_at(std::string_view bytes, size_t zero) {
  if (bytes.size() < 2) return false;
  for (size_t i = 0; i + 1 < std::min(bytes.size(), kFirstBytes); i += 2) {
    if (bytes[i + zero] != '\0' || bytes[i + 1 - zero] == '\0') return false;
  }
  return true;
}

/// Whether the first four bytes have two zero bytes at `zeros` (0 or 2) and not at the others.
bool has_two_zeros_at(std::string_view bytes, size_t zeros) {
  constexpr std::string_view kZeros("\0\0", 2);
  return bytes.size() >= 4 && bytes.substr(zeros, 2) == kZeros &&
         bytes.substr(2 - zeros, 2) != kZeros;
}

}  // namespace

void TextDecoder::fail(const std::string& defect) const {
  throw Error(ErrorCode::kCorruptFile, fmt::format("{} {}", name_, defect));
}

void TextDecoder::recognise() {
  const std::string_view start = held_;
  const auto refuse = [&](const char* encoding) {
    fail(fmt::format("is {0} text; save it as UTF-8, for example with iconv -f {0} -t UTF-8",
                     encoding));
  };
  if (start.starts_with(kMark32Little) || start.starts_with(kMark32Big)) refuse("UTF-32");
  if (has_two_zeros_at(start, 2)) refuse("UTF-32LE");
  if (has_two_zeros_at(start, 0)) refuse("UTF-32BE");
  if (std::ranges::find(kUtf7, start.substr(0, kFirstBytes)) != std::end(kUtf7)) refuse("UTF-7");
  size_t mark = 0;
  if (start.starts_with(kMark)) {
    encoding_ = Encoding::kUtf8;
    mark = kMark.size();
  } else if (start.starts_with(kMarkLittle) || start.starts_with(kMarkBig)) {
    encoding_ = start.starts_with(kMarkLittle) ? Encoding::kUtf16Little : Encoding::kUtf16Big;
    mark = kMarkLittle.size();
  } else if (has_zeros_at(start, 1)) {
    encoding_ = Encoding::kUtf16Little;
  } else {
    encoding_ = has_zeros_at(start, 0) ? Encoding::kUtf16Big : Encoding::kUtf8;
  }
  held_.erase(0, mark);
}

char32_t TextDecoder::unit(size_t at) const {
  const auto first = static_cast<unsigned char>(held_[at]);
  const auto second = static_cast<unsigned char>(held_[at + 1]);
  const bool big = encoding_ == Encoding::kUtf16Big;
  return static_cast<char32_t>(big ? first << 8 | second : second << 8 | first);
}

void TextDecoder::append_utf16(std::string& text, bool last) {
  size_t at = 0;
  while (at + 2 <= held_.size()) {
    char32_t value = unit(at);
    size_t bytes = 2;
    if (is_high_surrogate(value)) {
      if (at + 4 > held_.size() && !last) break;
      const char32_t low = at + 4 <= held_.size() ? unit(at + 2) : 0;
      if (is_surrogate(low) && !is_high_surrogate(low)) {
        value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
        bytes = 4;
      }
    }
    if (is_surrogate(value)) {
      fail("is UTF-16 text with half of a surrogate pair; save it again as UTF-8");
    }
    append_utf8(text, value);
    at += bytes;
  }
  held_.erase(0, at);
  if (last && !held_.empty()) fail("is UTF-16 text that ends within a character; copy it again");
}

std::string TextDecoder::decode(std::string_view bytes, bool last) {
  held_ += bytes;
  if (encoding_ == Encoding::kUnknown) {
    if (held_.size() < kFirstBytes && !last) return {};
    recognise();
  }
  std::string text = std::exchange(waiting_, {});
  if (encoding_ == Encoding::kUtf8) {
    text += held_;
    held_.clear();
  } else {
    append_utf16(text, last);
  }
  for (const char end : {'\x1a', '\r'}) {
    if (last && text.ends_with(end)) text.pop_back();
  }
  if (line_end_ == 0 && text.find('\n') != std::string::npos) line_end_ = '\n';
  if (line_end_ == 0) {
    const size_t waiting = text.size() - std::min(text.find('\r'), text.size());
    if (last || waiting > kMostWaiting) line_end_ = '\r';
  }
  if (!last) {
    size_t whole = line_end_ == 0 ? std::min(text.find('\r'), text.size()) : text.size();
    for (int i = 0; i < 2 && whole > 0; ++i) {
      if (text[whole - 1] == '\r' || text[whole - 1] == '\x1a') --whole;
    }
    waiting_ = text.substr(whole);
    text.resize(whole);
  }
  if (line_end_ == '\r') std::ranges::replace(text, '\r', '\n');
  size_t to = 0;
  for (size_t from = 0; from < text.size(); ++from) {
    if (text[from] == '\r' && from + 1 < text.size() && text[from + 1] == '\n') continue;
    text[to++] = text[from];
  }
  text.resize(to);
  return text;
}

void require_utf8(std::string_view text, const std::string& name, size_t line) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    if (step.valid) {
      if (text[at] == '\0') {
        throw Error(
            ErrorCode::kCorruptFile,
            fmt::format("{} has a NUL byte in line {}; remove it with tr -d '\\0', or where "
                        "it separates names write a line for each with tr '\\0' '\\n'",
                        name, line));
      }
      if (text[at] == '\n') ++line;
      at += step.bytes;
      continue;
    }
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} is not UTF-8: line {} has the byte 0x{:02x}, as Latin-1 and "
                            "Windows-1252 write letters; convert it, for example with iconv -f "
                            "WINDOWS-1252 -t UTF-8",
                            name, line, static_cast<unsigned char>(text[at])));
  }
}

std::string plain_text(std::string_view bytes, const std::string& name) {
  std::string text = TextDecoder(name).decode(bytes, true);
  require_utf8(text, name);
  return text;
}

}  // namespace kvlm
