#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "tools/run/chat_line.h"

namespace kvlm {

/// Lines typed at a terminal, with cursor keys, history (of this run) and Tab. ~/.editrc is read.
/// What is pasted goes into the line as it is, with its line ends, where the terminal tells pasted
/// text from keys.
class LineEditor {
 public:
  enum class End { kLine, kInterrupted, kClosed, kTooLong };
  using Complete = std::function<Completion(std::string_view before_cursor)>;

  /// A line of more than `most` letters ends as kTooLong.
  LineEditor(size_t most, Complete complete);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  /// Shows the prompt and reads one line, without its end, into `line`. Ctrl+C gives it up.
  End read(std::string& line, std::string prompt);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
