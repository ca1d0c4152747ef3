#include "tools/common/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "tools/common/messages.h"
#include "tools/common/program.h"

// The line of stderr that shows how far a load, a prefill or a batch is. It is drawn on a terminal
// only, never wider than it, a few times a second, and taken off before anything else is printed.
namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

/// stderr's last line, which everything that shows progress shares.
struct StatusLine {
  bool terminal = is_terminal(2) && environment("TERM") != "dumb";
  size_t columns = 0;       // of what is drawn
  Progress* job = nullptr;  // that phases belong to
};

StatusLine& status() {
  static StatusLine line;
  return line;
}

/// Of the terminal now: the user may have changed it.
size_t terminal_columns() noexcept {
  constexpr size_t kUnknown = 80;
  winsize size{};
  if (ioctl(2, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUnknown;
  return size.ws_col;
}

/// The width of the character that `text` starts with, and its bytes.
struct Character {
  size_t columns;
  size_t bytes;
};

Character first_character(std::string_view text) {
  utf8proc_int32_t code = 0;
  const utf8proc_ssize_t bytes =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                       static_cast<utf8proc_ssize_t>(text.size()), &code);
  if (bytes <= 0) return {1, 1};
  return {static_cast<size_t>(std::max(0, utf8proc_charwidth(code))), static_cast<size_t>(bytes)};
}

size_t width_of(std::string_view text) {
  size_t columns = 0;
  while (!text.empty()) {
    const Character next = first_character(text);
    columns += next.columns;
    text.remove_prefix(next.bytes);
  }
  return columns;
}

/// What takes the line off the terminal.
std::string erasure() {
  StatusLine& line = status();
  if (line.columns == 0) return {};
  // A terminal that became narrower has wrapped what was drawn.
  const size_t rows = (std::exchange(line.columns, 0) - 1) / terminal_columns();
  return (rows > 0 ? fmt::format("\033[{}A", rows) : std::string()) + "\r\033[J";
}

void draw_line(const ProgressLine& content) {
  StatusLine& line = status();
  if (!line.terminal) {
    std::string text = fmt::format("{} {}", content.title, content.count);
    if (content.seconds_left)
      text += fmt::format(", {} left", human_seconds(*content.seconds_left));
    if (!content.note.empty()) text += fmt::format(", {}", content.note);
    print_message("{}\n", text);
    return;
  }
  const std::string text = safe_message(format_progress(content, terminal_columns()));
  write_terminal(erasure() + text);
  line.columns = width_of(text);
}

/// Between two drawings.
Clock::duration pause() {
  return status().terminal ? Clock::duration(std::chrono::milliseconds(100))
                           : Clock::duration(std::chrono::seconds(5));
}

std::string percent(size_t done, size_t total) {
  return fmt::format("{} %", total == 0 ? 100 : 100 * done / total);
}

}  // namespace

std::string_view fit_columns(std::string_view text, size_t columns) {
  size_t bytes = 0;
  while (bytes < text.size()) {
    const Character next = first_character(text.substr(bytes));
    if (next.columns > columns) break;
    columns -= next.columns;
    bytes += next.bytes;
  }
  return text.substr(0, bytes);
}

std::string human_seconds(double seconds) {
  if (seconds < 100) return fmt::format("{:.0f} s", seconds);
  if (seconds < 100 * 60) return fmt::format("{:.0f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

std::string format_progress(const ProgressLine& line, size_t columns) {
  constexpr size_t kLongBar = 28, kShortBar = 8;
  const size_t most = columns > 0 ? columns - 1 : 0;  // a full line would wrap on some terminals
  std::string figures = line.count;
  if (line.seconds_left) figures += fmt::format(", {} left", human_seconds(*line.seconds_left));
  std::string noted = figures;
  if (!line.note.empty()) noted += fmt::format(", {}", line.note);
  for (const std::string& tail : {noted, figures}) {
    const size_t around = width_of(line.title) + width_of(tail) + 4;  // " [", "] "
    if (around + kShortBar > most) continue;
    const size_t bar = std::min(kLongBar, most - around);
    const double share = std::clamp(line.share, 0.0, 1.0);
    const auto filled = static_cast<size_t>(share * static_cast<double>(bar));
    return fmt::format("{} [{}{}] {}", line.title, std::string(filled, '#'),
                       std::string(bar - filled, '.'), tail);
  }
  return std::string(fit_columns(fmt::format("{} {}", line.title, figures), most));
}

std::optional<double> seconds_left(const JobCount& count, size_t total, double elapsed_s) {
  const double worked = static_cast<double>(count.done - count.skipped) + count.under_way;
  if (worked <= 0) return std::nullopt;
  const double rest = static_cast<double>(total - count.done) - count.under_way;
  return elapsed_s * std::max(rest, 0.0) / worked;
}

Progress::Progress(std::string title, size_t total, bool quiet)
    : title_(std::move(title)), total_(total), quiet_(quiet) {
  if (!status().terminal) drawn_ = started_;  // no line before there is something to say
  if (!quiet_) status().job = this;
}

Progress::~Progress() { finish(); }

void Progress::update(const JobCount& count, std::string_view note) {
  count_ = count;
  note_ = note;
  draw();
}

void Progress::show_phase(std::string phase) {
  phase_ = std::move(phase);
  draw();
}

void Progress::draw() {
  if (quiet_) return;
  const Clock::time_point now = Clock::now();
  if (drawn_ && now - *drawn_ < pause()) return;
  drawn_ = now;
  const double elapsed_s = std::chrono::duration<double>(now - started_).count();
  const std::string_view separator = note_.empty() || phase_.empty() ? "" : ", ";
  const std::string note = fmt::format("{}{}{}", phase_, separator, note_);
  draw_line(
      {title_, total_ == 0 ? 1 : static_cast<double>(count_.done) / static_cast<double>(total_),
       fmt::format("{}/{}", count_.done, total_), seconds_left(count_, total_, elapsed_s), note});
}

void Progress::clear() noexcept {
  write_terminal(erasure());
  if (status().terminal) drawn_.reset();
}

void Progress::finish() noexcept {
  if (status().job != this) return;
  write_terminal(erasure());
  status().job = nullptr;
}

TerminalWatch::~TerminalWatch() { clear(); }

void TerminalWatch::clear() noexcept {
  if (!quiet_ && status().job == nullptr) write_terminal(erasure());
}

bool TerminalWatch::cancelled() const noexcept { return interrupted(); }

void TerminalWatch::progress(std::string_view phase, size_t done, size_t total) {
  if (quiet_) return;
  if (status().job != nullptr) {
    status().job->show_phase(done == total ? std::string()
                                           : fmt::format("{} {}", phase, percent(done, total)));
    return;
  }
  const Clock::time_point now = Clock::now();
  const bool begins = done == 0 || phase != phase_;
  if (begins) {
    phase_ = phase;
    started_ = drawn_ = now;
  }
  if (done == total) return clear();
  // On a terminal at once: what comes first may take long.
  if (now - drawn_ < pause() && !(begins && status().terminal)) return;
  drawn_ = now;
  const double elapsed_s = std::chrono::duration<double>(now - started_).count();
  draw_line({phase, static_cast<double>(done) / static_cast<double>(total), percent(done, total),
             seconds_left({done, 0, 0}, total, elapsed_s), ""});
}

}  // namespace kvlm
