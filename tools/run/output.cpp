#include "tools/run/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/run/report.h"

namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// How every record that this program writes begins.
constexpr std::string_view kRecordStart = R"({"id":)";
constexpr const char* kRepair = "start again with a writable file and free space";

}  // namespace

Output::Output(const std::string& path) : path_(path) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    fail("opened for writing", "give a file in a folder that you may write to");
  }
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--out {} is not a regular file, so a later start could not see what "
                            "is done; give a file, and read it with tail -f",
                            path));
  }
  if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--out {} is being written by another vlm-run; wait for it or give "
                            "another file",
                            path));
  }
  read_existing();
}

Output::~Output() { close(descriptor_); }

bool Output::has(const Record& record) const {
  return !record.id.is_null() && ids_.contains(record.id.dump());
}

bool Output::failed_before(const Record& record) const {
  return !has(record) && failed_.contains(record.id.is_null() ? Json(record.line) : record.id);
}

void Output::append(const Json& json) {
  const std::string line = json_line(json) + "\n";
  size_t written = 0;
  while (written < line.size()) {
    const ssize_t count = pwrite(descriptor_, line.data() + written, line.size() - written,
                                 size_ + static_cast<off_t>(written));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int reason = errno;
      static_cast<void>(ftruncate(descriptor_, size_));
      errno = reason;
      fail("written", "the finished records are kept, start again with free space");
    }
    written += static_cast<size_t>(count);
  }
  size_ += static_cast<off_t>(line.size());
}

void Output::fail(const char* what, const char* cure) const {
  throw Error(ErrorCode::kCorruptFile, fmt::format("--out {} cannot be {}: {}; {}", path_, what,
                                                   std::strerror(errno), cure));
}

void Output::refuse(const std::string& line) const {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--out {} holds a line that is no record of a batch: \"{:.40}\"; give "
                          "another file or remove that line",
                          path_, printable(line)));
}

void Output::read_existing() {
  std::string text;
  char block[65536];
  for (ssize_t count;
       (count = pread(descriptor_, block, sizeof block, static_cast<off_t>(text.size()))) != 0;) {
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", "give a file that you may read");
    text.append(block, static_cast<size_t>(count));
  }
  size_t good = 0;
  for (size_t begin = 0; begin < text.size(); begin = good) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    if (!note(text.substr(begin, end - begin))) refuse(text.substr(begin, end - begin));
    good = end + 1;
  }
  size_ = static_cast<off_t>(good);
  if (good == text.size()) return;
  // A last line without an end: whole, or torn when a run was killed, or not ours.
  const std::string tail = text.substr(good);
  if (note(tail)) {
    size_ = static_cast<off_t>(text.size());
    if (pwrite(descriptor_, "\n", 1, size_) != 1) fail("repaired", kRepair);
    ++size_;
  } else if (!Json::accept(tail) && kRecordStart.starts_with(tail.substr(0, kRecordStart.size()))) {
    repaired_ = true;
    if (ftruncate(descriptor_, size_) != 0) fail("repaired", kRepair);
  } else {
    refuse(tail);
  }
}

bool Output::note(const std::string& line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object() || !json.contains("id") ||
      (!json.contains("text") && !json.contains("error"))) {
    return false;
  }
  if (json.contains("error")) {
    failed_.insert(json["id"].is_null() ? json.value("line", Json()) : json["id"]);
  } else if (!json["id"].is_null()) {
    ids_.insert(json["id"].dump());
  }
  return true;
}

}  // namespace kvlm
