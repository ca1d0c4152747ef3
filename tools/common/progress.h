#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace kvlm {

/// How far a long job is, on stderr: a bar that redraws itself on a terminal, else a plain line now
/// and then.
class Progress {
 public:
  Progress(std::string title, size_t total, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `note` is shown behind the figures, for example a rate.
  void update(size_t done, std::string_view note);
  /// Takes the bar off the terminal, for a message; the next update() draws it again.
  void clear();
  /// Ends the bar's line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(size_t done, std::string_view note);

  std::string title_;
  size_t total_;
  bool quiet_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point started_ = Clock::now();
  Clock::time_point last_{};
};

}  // namespace kvlm
