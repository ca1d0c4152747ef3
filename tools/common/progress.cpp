#include "tools/common/progress.h"

#include <algorithm>

#include "tools/common/messages.h"
#include "tools/common/program.h"

namespace kvlm {

Progress::Progress(std::string title, size_t total, bool quiet)
    : title_(std::move(title)), total_(total), quiet_(quiet), terminal_(is_terminal(2)) {}

Progress::~Progress() { finish(); }

void Progress::update(size_t done, std::string_view note) {
  if (quiet_) return;
  const Clock::time_point now = Clock::now();
  const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5);
  if (done < total_ && now - last_ < pause) return;
  last_ = now;
  draw(done, note);
}

void Progress::draw(size_t done, std::string_view note) {
  const double share = total_ == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total_);
  const double elapsed = std::chrono::duration<double>(last_ - started_).count();
  const double left = done == 0 ? 0 : elapsed / share - elapsed;
  if (terminal_) {
    constexpr size_t kWidth = 28;
    const auto filled = static_cast<size_t>(share * kWidth);
    print_message("\r{} [{}{}] {}/{} {:.0f} s left {}\033[K", title_, std::string(filled, '#'),
                  std::string(kWidth - filled, '.'), done, total_, left, note);
    drawn_ = true;
  } else {
    print_message("{} {}/{}, {:.0f} s left {}\n", title_, done, total_, left, note);
  }
}

void Progress::clear() {
  if (!drawn_) return;
  print_message("\r\033[K");
  drawn_ = false;
}

void Progress::finish() {
  if (drawn_) print_message("\n");
  drawn_ = false;
}

}  // namespace kvlm
