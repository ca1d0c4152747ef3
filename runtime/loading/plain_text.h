#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvlm {

/// Converts the bytes of a text that a person wrote to UTF-8 with \n line ends, as they arrive.
///
/// A byte order mark is dropped, and at the end a Ctrl-Z and then a \r. UTF-16 is converted; its
/// mark or zero bytes in the first two characters say that it is. \r\n becomes \n, and so does \r
/// in a text without any \n. Other bytes pass unchanged: require_utf8() checks them.
class TextDecoder {
 public:
  /// `name` starts messages: "--batch in.jsonl".
  explicit TextDecoder(std::string name) : name_(std::move(name)) {}

  /// The text of the next bytes; `last`: no bytes follow. Holds back a few bytes, and from a \r on
  /// all until the first \n. Throws Error{kCorruptFile} for UTF-7, UTF-32, and UTF-16 that is cut
  /// or has unpaired surrogates.
  std::string decode(std::string_view bytes, bool last);

 private:
  enum class Encoding : uint8_t { kUnknown, kUtf8, kUtf16Little, kUtf16Big };

  void recognise();
  void append_utf16(std::string& text, bool last);
  char32_t unit(size_t at) const;  // of held_
  [[noreturn]] void fail(const std::string& defect) const;

  std::string name_;
  Encoding encoding_ = Encoding::kUnknown;
  std::string held_;     // bytes of which more are needed
  std::string waiting_;  // decoded: its line ends depend on what follows
  char line_end_ = 0;    // \n or \r; 0: unknown so far
};

/// Throws Error{kCorruptFile} that starts with `name`, gives the line and the byte, and says how to
/// convert the text, unless it is UTF-8 without NUL. `line` is the number of its first line.
void require_utf8(std::string_view text, const std::string& name, size_t line = 1);

/// All of a file's bytes as TextDecoder and require_utf8() have them.
std::string plain_text(std::string_view bytes, const std::string& name);

}  // namespace kvlm
