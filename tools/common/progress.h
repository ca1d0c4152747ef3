#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/base/watch.h"

namespace kvlm {

/// What one line of progress says.
struct ProgressLine {
  std::string_view title;
  double share = 0;   ///< done, 0 to 1
  std::string count;  ///< "3/15" or "35 %"
  std::optional<double> seconds_left;
  std::string_view note;
};

/// The line for a terminal of `columns`, in fewer than those: it must not wrap. Where it is narrow
/// the bar becomes shorter, then the note goes, then the bar, then the rest from its end.
std::string format_progress(const ProgressLine& line, size_t columns);

/// The beginning of `text` that fits into `columns` of a terminal, in whole characters. A character
/// of East Asian width takes two, a combining mark none.
std::string_view fit_columns(std::string_view text, size_t columns);

/// "12 s", "3 min", "2.5 h".
std::string human_seconds(double seconds);

/// How far a job of many records is.
struct JobCount {
  size_t done = 0;
  size_t skipped = 0;    ///< of those, that took no time, such as refused ones
  double under_way = 0;  ///< work done on others, in records
};

/// Seconds that the rest of a job takes at the rate so far, or nothing if there is none yet.
std::optional<double> seconds_left(const JobCount& count, size_t total, double elapsed_s);

/// How far a job of many records is, on stderr: a bar that redraws itself on a terminal, else a
/// plain line now and then. One at a time. A stderr that cannot be written is no error.
class Progress {
 public:
  Progress(std::string title, size_t total, bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `note` is shown behind the figures, for example how many records run.
  void update(const JobCount& count, std::string_view note);
  /// Takes the bar off the terminal, for a message; the next update() draws it again.
  void clear() noexcept;
  /// Ends the job.
  void finish() noexcept;

 private:
  friend class TerminalWatch;
  using Clock = std::chrono::steady_clock;
  void show_phase(std::string phase);
  void draw();

  std::string title_;
  size_t total_;
  bool quiet_;
  JobCount count_;
  std::string note_;
  std::string phase_;  // of the record that is being prepared
  Clock::time_point started_ = Clock::now();
  std::optional<Clock::time_point> drawn_;
};

/// The watch of a program: shows every phase on stderr as Progress does a job, beside it if there
/// is one, and obeys Ctrl+C.
class TerminalWatch final : public Watch {
 public:
  /// `quiet` shows nothing.
  explicit TerminalWatch(bool quiet) : quiet_(quiet) {}
  ~TerminalWatch() override;
  TerminalWatch(const TerminalWatch&) = delete;
  TerminalWatch& operator=(const TerminalWatch&) = delete;

  void progress(std::string_view phase, size_t done, size_t total) override;
  bool cancelled() const noexcept override;
  /// Takes an unfinished phase off the terminal.
  void clear() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  bool quiet_;
  std::string phase_;
  Clock::time_point started_;
  Clock::time_point drawn_;
};

}  // namespace kvlm
