#pragma once

#include <string>

#include "runtime/loading/plain_text.h"

namespace kvlm {

/// What a line may have: a prompt of a million words.
inline constexpr size_t kMaxLineBytes = size_t{16} << 20;

/// The lines of a text as they arrive, for example through a pipe; see TextDecoder.
class TextLines {
 public:
  /// Does not own `descriptor`. `name` starts messages.
  TextLines(int descriptor, const std::string& name);

  /// Takes the next line, without its end; false at the end of the text, or once the program is
  /// interrupted while it waits. Throws Error{kCorruptFile} if the text cannot be read, or the line
  /// is longer than kMaxLineBytes or not UTF-8.
  bool next(std::string& line);

  /// Of the latest line, from 1.
  size_t number() const noexcept { return number_; }

 private:
  bool read_more();

  int descriptor_;
  std::string name_;
  TextDecoder decoder_;
  std::string text_;   // decoded
  size_t begin_ = 0;   // of it: before this all is taken
  size_t looked_ = 0;  // of it: before this no untaken newline
  size_t number_ = 0;
  bool ended_ = false;
};

}  // namespace kvlm
