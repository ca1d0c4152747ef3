#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tools/run/chat_line.h"

namespace kvlm {

/// Lines typed at a terminal, with cursor keys, history (of this run) and Tab. ~/.editrc is read.
class LineEditor {
 public:
  enum class End { kLine, kInterrupted, kClosed };
  using Complete = std::function<Completion(std::string_view before_cursor)>;

  LineEditor(std::string prompt, Complete complete);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  /// Shows the prompt and reads one line, without its end, into `line`. Ctrl+C gives it up.
  End read(std::string& line);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
