#include "tools/run/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/strict_json.h"
#include "tools/common/program.h"
#include "tools/run/report.h"

// The file of a batch's results. It is appended to, a record a write, under a lock; a run that
// starts again reads it, drops a record that a kill left half written, refuses a file of other
// settings, and skips what is answered.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// How every record that this program writes begins.
constexpr std::string_view kRecordStart = R"({"id":)";
constexpr const char* kRepair = "run the command again with a writable file and free space";

std::string string_of(const nlohmann::json& json, const char* key) {
  const auto place = json.find(key);
  return place != json.end() && place->is_string() ? place->get<std::string>() : std::string();
}

/// A line that this program may have written, else nothing.
std::optional<OutputLine> parse_line(std::string_view text) {
  nlohmann::json json;
  try {
    json = parse_json(text, "a line");
  } catch (const Error&) {
    return std::nullopt;
  }
  const auto id = json.is_object() ? json.find("id") : json.end();
  if (id == json.end() || !(id->is_null() || id->is_string() || id->is_number_integer()) ||
      (!json.contains("text") && !json.contains("error"))) {
    return std::nullopt;
  }
  for (const char* key : {"text", "error"}) {
    if (json.contains(key) && !json[key].is_string()) return std::nullopt;
  }
  OutputLine line;
  line.id = *id;
  line.failed = json.contains("error");
  line.lean = json.contains("finish_reason") && !json.contains("model");
  line.text = string_of(json, "text");
  for (const char* key : {"images", "videos", "content"}) {
    const auto files = json.find(key);
    if (files != json.end() && files->is_array() &&
        std::ranges::all_of(*files, [](const auto& file) { return file.is_string(); })) {
      line.asked[key] = *files;
    }
  }
  if (const std::string prompt = string_of(json, "prompt"); !prompt.empty()) {
    line.asked["prompt"] = prompt;
  }
  line.settings.model = string_of(json, "model");
  if (const auto kv = json.find("kv"); kv != json.end() && kv->is_object()) {
    line.settings.spec = string_of(*kv, "spec");
  }
  if (const auto flags = json.find("settings"); flags != json.end() && flags->is_object()) {
    line.settings.flags = *flags;
  }
  return line;
}

/// Bytes that a kill or a full disk may have left of a record.
bool is_torn(std::string_view tail) {
  return !Json::accept(tail) && kRecordStart.starts_with(tail.substr(0, kRecordStart.size()));
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

OutputText parse_output(std::string_view text, const std::string& name) {
  OutputText output;
  std::map<std::string, size_t> answers;  // where each is among the lines, by id as JSON
  while (output.good_bytes < text.size()) {
    const size_t begin = output.good_bytes;
    const size_t end = text.find('\n', begin);
    const std::string_view content = text.substr(begin, end - begin);
    if (end != std::string_view::npos && content.find_first_not_of(" \t\r") == content.npos) {
      output.good_bytes = end + 1;  // a line left blank by hand
      continue;
    }
    std::optional<OutputLine> line = parse_line(content);
    if (!line && end == std::string_view::npos && is_torn(content)) break;
    if (!line) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("--out {}: line {} is not a record of a batch: \"{:.40}\"; give "
                              "another file or remove that line",
                              printable(name), 1 + std::ranges::count(text.substr(0, begin), '\n'),
                              printable(content)));
    }
    if (!line->failed && !line->id.is_null()) {
      const auto [first, inserted] = answers.emplace(json_line(line->id), output.lines.size());
      if (!inserted && output.lines[first->second].text != line->text) {
        throw Error(
            ErrorCode::kCorruptFile,
            fmt::format("--out {} has two answers to record {} that differ, in lines {} and "
                        "{}; remove one of them",
                        printable(name), printable(first->first), first->second + 1,
                        output.lines.size() + 1));
      }
    }
    output.open_end = end == std::string_view::npos;
    line->offset = begin;
    line->length = content.size() + (output.open_end ? 0 : 1);
    output.good_bytes += line->length;
    output.lines.push_back(std::move(*line));
  }
  return output;
}

Output::Output(const std::string& path, const BatchSettings& settings, bool lean) : path_(path) {
  if (is_stream()) return;
  try {
    open_locked();
    const std::string text = read_all();
    OutputText output = parse_output(text, path);
    const bool shared = share(settings, lean, std::ranges::any_of(output.lines, &OutputLine::lean));
    for (OutputLine& line : output.lines) {
      if (line.failed) {
        failures_.push_back(std::move(line));
        continue;
      }
      require_settings(line, path, settings);
      unsettled_ += line.settings.flags.is_null() && !shared ? 1 : 0;
      if (!line.id.is_null()) answered_[json_line(line.id)] = std::move(line.asked);
    }
    size_ = static_cast<off_t>(output.good_bytes);
    repaired_ = output.good_bytes < text.size();
    if (repaired_ && ftruncate(descriptor_, size_) != 0) fail("repaired", kRepair);
    if (output.open_end) {
      write_all(descriptor_, "\n");
      ++size_;
    }
  } catch (...) {
    close_file();
    throw;
  }
}

Output::~Output() { close_file(); }

std::string Output::name() const { return is_stream() ? "standard output" : printable(path_); }

bool Output::share(const BatchSettings& settings, bool write, bool expected) const {
  const std::string path = path_ + ".run.json";
  std::error_code unknown;
  if (std::filesystem::exists(path, unknown)) {
    std::ifstream file(path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const nlohmann::json json = parse_json(text, printable(path));
    const BatchSettings earlier{string_of(json, "model"), string_of(json, "spec"),
                                json.value("settings", Json())};
    if (const auto differs = difference(earlier, settings)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} says that the answers of --out {} were made {}; give another "
                              "--out, so that answers of both do not mix, or the earlier setting",
                              printable(path), name(), *differs));
    }
    return true;
  }
  if (expected) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("--out {} has answers of --lean, and {}, which says how they were made, "
                    "is missing; give another --out, or put that file back",
                    name(), printable(path)));
  }
  if (!write) return false;
  const Json json{{"model", settings.model},
                  {"spec", settings.spec},
                  {"settings", settings.flags},
                  {"version", version_line()}};
  std::ofstream file(path);
  if (!(file << json_line(json) << std::endl)) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("{} cannot be written: {}; give --out in a folder that you may write to",
                    printable(path), std::strerror(errno)));
  }
  return true;
}

void Output::require_settings(const OutputLine& line, const std::string& path,
                              const BatchSettings& settings) const {
  const auto differs = difference(line.settings, settings);
  if (!differs) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--out {} has an answer to record {} {}; give another --out, so that "
                          "answers of both do not mix, or the earlier setting",
                          printable(path), printable(json_line(line.id)), *differs));
}

void Output::read_also(const std::string& path, const BatchSettings& settings, bool join) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{}, a shard's answers to the same batch, cannot be read: {}; give a "
                            "file that you may read, or another --out",
                            printable(path), std::strerror(errno)));
  }
  for (OutputLine& line : parse_output(text, path).lines) {
    if (line.failed || line.id.is_null()) continue;
    require_settings(line, path, settings);
    std::string copy = join ? text.substr(line.offset, line.length) : std::string();
    elsewhere_[json_line(line.id)] = {std::move(line.asked), std::move(copy)};
  }
}

void Output::close_file() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void Output::open_locked() {
  for (;;) {
    descriptor_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      fail("opened for writing", "give a file in a folder that you may write to");
    }
    struct stat opened {};
    if (fstat(descriptor_, &opened) != 0 || !S_ISREG(opened.st_mode)) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("--out {} is not a regular file, so that a later run could not "
                              "resume; give a file, and follow it with tail -f",
                              path_));
    }
    if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("--out {} is being written by another vlm-run; wait for it or give "
                              "another file",
                              path_));
    }
    // Between the two calls another program's retry() may have put a new file in its place.
    struct stat named {};
    if (stat(path_.c_str(), &named) == 0 && same_file(opened, named)) return;
    close_file();
  }
}

std::string Output::read_all() const {
  std::string text;
  char block[65536];
  for (ssize_t count;
       (count = pread(descriptor_, block, sizeof block, static_cast<off_t>(text.size()))) != 0;) {
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", "give a file that you may read");
    text.append(block, static_cast<size_t>(count));
  }
  return text;
}

bool Output::has(const Record& record) {
  const std::string id = json_line(record.id);
  const auto place = answered_.find(id);
  const auto other = place == answered_.end() ? elsewhere_.find(id) : elsewhere_.end();
  if (place == answered_.end() && other == elsewhere_.end()) return false;
  const Json& asked = other == elsewhere_.end() ? place->second : other->second.asked;
  const auto differs = record.error.empty()
                           ? difference_of_asked(asked, asked_of(record, /*content=*/false))
                           : std::nullopt;
  if (differs) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--out {} has an answer to record {} {}; give another --out, or the "
                            "record another id",
                            path_, printable(id), *differs));
  }
  if (other == elsewhere_.end()) return true;
  if (other->second.line.empty()) {
    used_others_ = true;
    return true;
  }
  require_unchanged();
  const std::string line = other->second.line + (other->second.line.ends_with('\n') ? "" : "\n");
  write_all(descriptor_, line);
  size_ += static_cast<off_t>(line.size());
  answered_[id] = std::move(other->second.asked);
  return true;
}

size_t Output::retry(const std::vector<Record>& records) {
  std::set<std::string> ids;
  for (const Record& record : records) {
    if (!record.id.is_null()) ids.insert(json_line(record.id));
  }
  std::set<std::string> again;
  std::vector<OutputLine> dropped;
  for (const OutputLine& line : failures_) {
    const std::string id = json_line(line.id);
    const bool answered = answered_.contains(id);
    if (ids.contains(id) && !answered) again.insert(id);
    if (ids.contains(id) || answered || line.id.is_null()) dropped.push_back(line);
  }
  if (dropped.empty()) return 0;
  const std::string text = read_all();
  std::string kept;
  size_t next = 0;
  for (const OutputLine& line : dropped) {
    kept.append(text, next, line.offset - next);
    next = std::min(line.offset + line.length, text.size());
  }
  kept.append(text, next);
  if (!replace(kept)) rewrite(kept, std::min(dropped.front().offset, kept.size()));
  failures_.clear();
  return again.size();
}

void Output::rewrite(const std::string& text, size_t from) {
  constexpr const char* kCure = "make its folder writable and run the command again";
  const int flags = fcntl(descriptor_, F_GETFL);
  if (flags < 0 || fcntl(descriptor_, F_SETFL, flags & ~O_APPEND) != 0) fail("rewritten", kCure);
  // Bytes only move towards the beginning and the end is cut last: a kill loses no answer.
  for (size_t at = from; at < text.size();) {
    const ssize_t count =
        pwrite(descriptor_, text.data() + at, text.size() - at, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("rewritten", kCure);
    at += static_cast<size_t>(count);
  }
  if (ftruncate(descriptor_, static_cast<off_t>(text.size())) != 0 ||
      fcntl(descriptor_, F_SETFL, flags) != 0) {
    fail("rewritten", kCure);
  }
  size_ = static_cast<off_t>(text.size());
}

bool Output::replace(const std::string& text) {
  // Through symbolic links, so that what they point to is replaced and not they.
  std::error_code unknown;
  const std::string target = std::filesystem::canonical(path_, unknown).string();
  std::string name = (unknown ? path_ : target) + ".XXXXXX";
  struct stat before {};
  const int fresh =
      fstat(descriptor_, &before) == 0 ? mkostemp(name.data(), O_APPEND | O_CLOEXEC) : -1;
  if (fresh < 0) return false;
  const auto give_up = [&] {
    const int reason = errno;
    close(fresh);
    unlink(name.c_str());
    errno = reason;
  };
  try {
    write_all(fresh, text);
  } catch (...) {
    give_up();
    throw;
  }
  const bool same_owner = fchown(fresh, before.st_uid, before.st_gid) == 0;
  if (!same_owner || fchmod(fresh, before.st_mode & 07777) != 0 || fsync(fresh) != 0 ||
      flock(fresh, LOCK_EX | LOCK_NB) != 0 ||
      rename(name.c_str(), (unknown ? path_ : target).c_str()) != 0) {
    give_up();
    return false;
  }
  close_file();
  descriptor_ = fresh;
  size_ = static_cast<off_t>(text.size());
  return true;
}

void Output::append(const Json& json) {
  if (is_stream()) {
    const std::string line = json_line(json) + "\n";
    std::fwrite(line.data(), 1, line.size(), stdout);
    if (std::fflush(stdout) == 0) return;
    const int reason = errno;
    throw Error(ErrorCode::kCorruptFile,
                reason == EPIPE
                    ? "standard output was closed by the program that read it; no more is answered"
                    : fmt::format("standard output cannot be written: {}; redirect it to another "
                                  "disk, or give --out FILE",
                                  std::strerror(reason)));
  }
  require_unchanged();
  const std::string line = json_line(json) + "\n";
  write_all(descriptor_, line);
  size_ += static_cast<off_t>(line.size());
}

void Output::require_unchanged() const {
  struct stat now {};
  if (fstat(descriptor_, &now) != 0) fail("looked at", kRepair);
  if (now.st_nlink > 0 && now.st_size == size_) return;
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--out {} was {} by another program during the batch; its content is "
                          "left as it is, check it and run the command again",
                          path_,
                          now.st_nlink == 0     ? "deleted or replaced"
                          : now.st_size < size_ ? "cut short"
                                                : "written to"));
}

void Output::write_all(int descriptor, std::string_view text) const {
  struct stat before {};
  if (fstat(descriptor, &before) != 0) fail("looked at", kRepair);
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(descriptor, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int reason = errno;
      struct stat now {};
      if (fstat(descriptor, &now) == 0 &&
          now.st_size == before.st_size + static_cast<off_t>(written)) {
        // Best effort; Ubuntu's headers want the status looked at.
        [[maybe_unused]] const int status = ftruncate(descriptor, before.st_size);
      }
      errno = reason;
      fail("written", "the finished records are kept; run the command again with free space");
    }
    written += static_cast<size_t>(count);
  }
}

void Output::fail(const char* what, const char* cure) const {
  throw Error(ErrorCode::kCorruptFile, fmt::format("--out {} cannot be {}: {}; {}", path_, what,
                                                   std::strerror(errno), cure));
}

}  // namespace kvlm
