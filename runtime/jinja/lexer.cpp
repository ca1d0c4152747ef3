#include "runtime/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/unicode.h"

// Cuts a template into text, tags and their tokens, as Jinja2 does with trim_blocks and
// lstrip_blocks: which white space around a tag goes is settled here, so that the parser sees none
// of it.
namespace kvlm::jinja {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

std::string normalize_newlines(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

size_t leading_space(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    const Utf8Step step = utf8_step(text, pos);
    if (!is_python_space(step.value)) break;
    pos += step.bytes;
  }
  return pos;
}

std::string_view without_trailing_space(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
    if (!is_python_space(utf8_step(text, start).value)) break;
    text = text.substr(0, start);
  }
  return text;
}

class Lexer {
 public:
  Lexer(std::string source, const std::string& name) : source_(std::move(source)), name_(name) {}

  std::vector<Token> run() {
    while (pos_ < source_.size()) {
      const size_t tag = find_tag();
      const std::string_view text = view(pos_, tag);
      if (tag == source_.size()) {
        push_text(text);
        break;
      }
      const char kind = source_[tag + 1];
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      push_text(text_before(text, kind, sign));
      advance(tag);
      advance(tag + (sign == '-' || sign == '+' ? 3 : 2));
      if (kind == '#') {
        comment();
      } else if (kind == '%' && raw_begin()) {
        raw();
      } else {
        expression(kind);
      }
    }
    tokens_.push_back({Token::Kind::kEnd, "end of template", line_});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} line {}: {}; repair the template or download it again", name_,
                            line_, printable(what)));
  }

  std::string_view view(size_t start, size_t end) const {
    return std::string_view(source_).substr(start, end - start);
  }
  std::string_view rest() const { return std::string_view(source_).substr(pos_); }

  /// Moves on to `end`, counting lines.
  void advance(size_t end) {
    line_ += static_cast<int>(std::ranges::count(view(pos_, end), '\n'));
    if (end > pos_) after_newline_ = source_[end - 1] == '\n';
    pos_ = end;
  }

  size_t find_tag() const {
    for (size_t i = pos_; i + 1 < source_.size(); ++i) {
      if (source_[i] != '{') continue;
      const char next = source_[i + 1];
      if (next == '%' || next == '{' || next == '#') return i;
    }
    return source_.size();
  }

  void push(Token::Kind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), line_});
  }
  void push_text(std::string_view text) {
    if (!text.empty()) push(Token::Kind::kText, std::string(text));
  }

  /// Text in front of a tag, less what the tag's sign or lstrip_blocks takes from its end.
  std::string_view text_before(std::string_view text, char kind, char sign) const {
    if (sign == '-') return without_trailing_space(text);
    if (kind == '{' || sign == '+') return text;
    const size_t newline = text.rfind('\n');
    if (newline == text.npos && !after_newline_) return text;
    const size_t line_start = newline == text.npos ? 0 : newline + 1;
    const std::string_view indent = text.substr(line_start);
    return leading_space(indent) == indent.size() ? text.substr(0, line_start) : text;
  }

  /// Just behind the end of a tag: what its sign or trim_blocks takes from the text that follows.
  void trim_after(char sign, bool is_block) {
    if (sign == '-') {
      advance(pos_ + leading_space(rest()));
    } else if (is_block && sign != '+' && rest().starts_with('\n')) {
      advance(pos_ + 1);
    }
  }

  void comment() {
    const size_t end = source_.find("#}", pos_);
    if (end == std::string::npos) fail("{# without #}");
    const char sign = end > pos_ ? source_[end - 1] : '\0';
    advance(end + 2);
    trim_after(sign, true);
  }

  /// Consumes "raw %}" and says so, or leaves everything alone.
  bool raw_begin() {
    size_t pos = pos_ + leading_space(rest());
    if (!view(pos, source_.size()).starts_with("raw")) return false;
    pos += 3;
    pos += leading_space(view(pos, source_.size()));
    const bool trim = pos < source_.size() && source_[pos] == '-';
    if (trim) ++pos;
    if (!view(pos, source_.size()).starts_with("%}")) return false;
    advance(pos + 2);
    if (trim) trim_after('-', true);  // trim_blocks does not reach into a raw block
    return true;
  }

  void raw() {
    for (size_t tag = source_.find("{%", pos_); tag != std::string::npos;
         tag = source_.find("{%", tag + 2)) {
      size_t pos = tag + 2;
      char sign = '\0';
      if (pos < source_.size() && (source_[pos] == '-' || source_[pos] == '+'))
        sign = source_[pos++];
      pos += leading_space(view(pos, source_.size()));
      if (!view(pos, source_.size()).starts_with("endraw")) continue;
      pos += 6;
      pos += leading_space(view(pos, source_.size()));
      char end_sign = '\0';
      if (pos < source_.size() && (source_[pos] == '-' || source_[pos] == '+')) {
        end_sign = source_[pos++];
      }
      if (!view(pos, source_.size()).starts_with("%}")) continue;
      push_text(text_before(view(pos_, tag), '%', sign));
      advance(pos + 2);
      trim_after(end_sign, true);
      return;
    }
    fail("raw without endraw");
  }

  /// The inside of {% %} or {{ }}, and its end.
  void expression(char kind) {
    const bool is_block = kind == '%';
    push(is_block ? Token::Kind::kBlockBegin : Token::Kind::kPrintBegin, is_block ? "{%" : "{{");
    const std::string_view end = is_block ? "%}" : "}}";
    std::string closers;  // of the brackets that are open
    for (;;) {
      advance(pos_ + leading_space(rest()));
      const std::string_view left = rest();
      if (left.empty()) fail(fmt::format("missing {}", end));
      const char c = left.front();
      if (closers.empty()) {
        const bool signed_end =
            (c == '-' || (c == '+' && is_block)) && left.substr(1).starts_with(end);
        if (signed_end || left.starts_with(end)) {
          push(is_block ? Token::Kind::kBlockEnd : Token::Kind::kPrintEnd, std::string(end));
          advance(pos_ + (signed_end ? 3 : 2));
          trim_after(signed_end ? c : '\0', is_block);
          return;
        }
      }
      if (c == '\'' || c == '"') {
        string(c);
      } else if (is_digit(c)) {
        number();
      } else if (is_name_start(c)) {
        size_t size = 1;
        while (size < left.size() && (is_name_start(left[size]) || is_digit(left[size]))) ++size;
        push(Token::Kind::kName, std::string(left.substr(0, size)));
        advance(pos_ + size);
      } else {
        operation(closers);
      }
    }
  }

  void operation(std::string& closers) {
    const std::string_view left = rest();
    constexpr std::array<std::string_view, 7> kLong = {"==", "!=", ">=", "<=", "//", "**", "~"};
    for (const std::string_view text : kLong) {
      if (!left.starts_with(text)) continue;
      push(Token::Kind::kOperator, std::string(text));
      advance(pos_ + text.size());
      return;
    }
    const char c = left.front();
    if (std::string_view("+-*/%()[]{}<>=.:|,").find(c) == std::string_view::npos) {
      fail(fmt::format("unexpected character '{}'", c));
    }
    if (c == '(') closers += ')';
    if (c == '[') closers += ']';
    if (c == '{') closers += '}';
    if (c == ')' || c == ']' || c == '}') {
      if (!closers.ends_with(c)) fail(fmt::format("unexpected '{}'", c));
      closers.pop_back();
    }
    push(Token::Kind::kOperator, std::string(1, c));
    advance(pos_ + 1);
  }

  void number() {
    const std::string_view left = rest();
    size_t size = 0;
    const auto digits = [&] {
      while (size < left.size() && is_digit(left[size])) ++size;
    };
    digits();
    bool real = false;
    if (size + 1 < left.size() && left[size] == '.' && is_digit(left[size + 1])) {
      real = true;
      ++size;
      digits();
    }
    if (size < left.size() && (left[size] == 'e' || left[size] == 'E')) {
      size_t exponent = size + 1;
      if (exponent < left.size() && (left[exponent] == '+' || left[exponent] == '-')) ++exponent;
      if (exponent < left.size() && is_digit(left[exponent])) {
        real = true;
        size = exponent;
        digits();
      }
    }
    if (size < left.size() && is_name_start(left[size])) {
      fail(fmt::format("number \"{}\" is not supported; write it in plain decimals",
                       left.substr(0, size + 1)));
    }
    push(real ? Token::Kind::kReal : Token::Kind::kInteger, std::string(left.substr(0, size)));
    advance(pos_ + size);
  }

  /// A string literal with Python's escapes.
  void string(char quote) {
    const std::string_view left = rest();
    std::string text;
    size_t i = 1;
    for (;; ++i) {
      if (i >= left.size()) fail("a string without its closing quote");
      if (left[i] == quote) break;
      if (left[i] != '\\') {
        text += left[i];
        continue;
      }
      if (++i >= left.size()) fail("a string without its closing quote");
      i += escape(left.substr(i), text);
    }
    push(Token::Kind::kString, std::move(text));
    advance(pos_ + i + 1);
  }

  /// Appends what the escape at text[0] (behind the backslash) stands for; returns the bytes it has
  /// beyond the first.
  size_t escape(std::string_view text, std::string& out) const {
    constexpr std::string_view kFrom = "abfnrtv\\'\"";
    constexpr std::string_view kTo = "\a\b\f\n\r\t\v\\'\"";
    const char c = text.front();
    if (const size_t simple = kFrom.find(c); simple != kFrom.npos) {
      out += kTo[simple];
      return 0;
    }
    if (c == '\n') return 0;
    if (c >= '0' && c <= '7') {
      size_t size = 0;
      char32_t value = 0;
      while (size < 3 && size < text.size() && text[size] >= '0' && text[size] <= '7') {
        value = value * 8 + static_cast<char32_t>(text[size++] - '0');
      }
      append_utf8(out, value);
      return size - 1;
    }
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0) {
      if (c == 'N') fail("\\N in a string is not supported");
      out += '\\';
      out += c;
      return 0;
    }
    char32_t value = 0;
    for (size_t i = 1; i <= digits; ++i) {
      const char digit = i < text.size() ? text[i] : '\0';
      const bool decimal = is_digit(digit);
      const char lower = static_cast<char>(digit | 0x20);
      if (!decimal && (lower < 'a' || lower > 'f')) fail("a damaged escape in a string");
      value = value * 16 + static_cast<char32_t>(decimal ? digit - '0' : lower - 'a' + 10);
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      fail("an escape in a string is not a valid character");
    }
    append_utf8(out, value);
    return digits;
  }

  std::string source_;
  const std::string& name_;
  size_t pos_ = 0;
  int line_ = 1;
  bool after_newline_ = true;  // the character before pos_ ended a line, or there is none
  std::vector<Token> tokens_;
};

}  // namespace

bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

std::vector<Token> tokenize(std::string_view source, const std::string& name) {
  constexpr size_t kMaxBytes = 1 << 20;
  if (source.size() > kMaxBytes) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}: the template has {} bytes; expected at most {}; download it again",
                            name, source.size(), kMaxBytes));
  }
  if (!is_valid_utf8(source)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}: the template is not UTF-8; save it as UTF-8", name));
  }
  if (source.starts_with("\xef\xbb\xbf")) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("{}: starts with a byte order mark, which every prompt would have; save "
                    "it as UTF-8 without the mark",
                    name));
  }
  return Lexer(normalize_newlines(source), name).run();
}

}  // namespace kvlm::jinja
