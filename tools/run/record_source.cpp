#include "tools/run/record_source.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "kernels/base/error.h"
#include "tools/common/input_text.h"
#include "tools/run/list_form.h"

namespace kvlm {

namespace {

constexpr size_t kMaxLine = size_t{1} << 26;
constexpr size_t kMaxWhole = size_t{1} << 29;

}  // namespace

ListedRecords::ListedRecords(std::vector<Record> records) {
  records_.reserve(records.size());
  for (Record& record : records) {
    records_.push_back(std::make_shared<const Record>(std::move(record)));
  }
}

std::shared_ptr<const Record> ListedRecords::take(bool /*wait*/) {
  return ended() ? nullptr : std::move(records_[next_++]);
}

StreamedRecords::StreamedRecords(std::function<bool(const Record&)> skip)
    : skip_(std::move(skip)), parser_({}) {}

std::shared_ptr<const Record> StreamedRecords::take(bool wait) {
  if (lines_.empty() && !ended_ && read_more(wait ? kPatienceMs : 0)) parse_lines();
  if (lines_.empty()) return nullptr;
  std::shared_ptr<const Record> record = std::move(lines_.front());
  lines_.pop_front();
  return record;
}

bool StreamedRecords::read_more(int patience_ms) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, patience_ms) <= 0) return false;  // nothing yet, or a signal
  std::array<char, 65536> block;
  const ssize_t count = read(STDIN_FILENO, block.data(), block.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return false;
  if (count < 0) {
    ended_ = true;
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--batch - cannot be read: {}; give a JSON Lines file of records",
                            std::strerror(errno)));
  }
  ended_ = count == 0;
  text_ += decoder_.decode({block.data(), static_cast<size_t>(count)}, ended_);
  return true;
}

void StreamedRecords::parse_lines() {
  const auto add = [this](Record&& record) {
    if (!skip_(record)) lines_.push_back(std::make_shared<const Record>(std::move(record)));
  };
  if (!begun_) {
    const std::string_view start = record_text(text_);
    const size_t lines = ended_ ? start.size() : start.rfind('\n');
    if (lines == std::string_view::npos && text_.size() <= kMaxLine) return;
    begun_ = true;
    whole_ = !start.starts_with('{');
    if (!whole_) require_json_lines(start.substr(0, lines), "--batch -");
  }
  const size_t most = whole_ ? kMaxWhole : kMaxLine;
  if (text_.size() > most) {
    ended_ = true;
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--batch - has {} of more than {} bytes; give a JSON Lines file of "
                            "records, one object a line",
                            whole_ ? "a list" : "a line", most));
  }
  if (whole_) {
    if (!ended_) return;
    for (Record& record : parse_list(text_, kStandardInput, {})) add(std::move(record));
    text_.clear();
    return;
  }
  size_t begin = 0;
  for (size_t end; begin < text_.size(); begin = end + 1) {
    end = text_.find('\n', begin);
    if (end == std::string::npos && !ended_) break;
    end = std::min(end, text_.size());
    if (auto record = parser_.parse(std::string_view(text_).substr(begin, end - begin))) {
      add(std::move(*record));
    }
  }
  text_.erase(0, std::min(begin, text_.size()));
}

}  // namespace kvlm
