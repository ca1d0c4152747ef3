#include "tools/run/batch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/registry.h"
#include "runtime/config.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/run/report.h"
#include "vision/image.h"

namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// One line of the input, read but not judged: what is wrong with it becomes its result.
struct Record {
  size_t line = 0;
  Json id;  // null if the line has none
  std::vector<std::string> images;
  std::string prompt;
  std::string error;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || file.bad() || std::filesystem::is_directory(path)) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("--batch {} cannot be read: {}; give a file with one JSON record a line", path,
                    std::strerror(errno == 0 ? EIO : errno)));
  }
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(std::move(line));
  }
  return lines;
}

/// A relative path is relative to the records' own folder.
std::string resolve(const std::filesystem::path& folder, const std::string& path) {
  return std::filesystem::path(path).is_absolute() ? path : (folder / path).string();
}

void parse_into(Record& record, const std::string& line, const std::filesystem::path& folder) {
  const nlohmann::json json = parse_json(line, fmt::format("line {}", record.line));
  const ConfigReader reader(json, fmt::format("line {}", record.line));
  const nlohmann::json& id = reader.raw("id");
  if (!id.is_string() && !id.is_number_integer()) reader.fail("id", "a string or an integer");
  record.id = id;
  if (reader.has("video")) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("line {}: videos are not built in for this model; give its frames as "
                            "images",
                            record.line));
  }
  if (reader.has("image")) record.images.push_back(reader.required_string("image"));
  const nlohmann::json& images = reader.raw("images");
  if (!images.is_null() && !images.is_array()) reader.fail("images", "a list of file names");
  for (const nlohmann::json& image : images) {
    if (!image.is_string()) reader.fail("images", "a list of file names");
    record.images.push_back(image.get<std::string>());
  }
  for (std::string& image : record.images) image = resolve(folder, image);
  record.prompt = reader.string("prompt", "");
  if (record.images.empty() && record.prompt.empty()) {
    reader.fail("image", "a file name, or images, or a prompt");
  }
}

std::vector<Record> read_records(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::vector<Record> records;
  std::map<std::string, size_t> seen;
  size_t number = 0;
  for (const std::string& line : lines_of(read_file(path))) {
    ++number;
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    Record record;
    record.line = number;
    try {
      parse_into(record, line, folder);
      const auto [first, inserted] = seen.emplace(record.id.dump(), number);
      if (!inserted) {
        record.error =
            fmt::format("line {}: id {} is that of line {} too; give each record its own", number,
                        record.id.dump(), first->second);
        record.id = nullptr;
      }
    } catch (const Error& error) {
      record.error = error.what();
    }
    records.push_back(std::move(record));
  }
  return records;
}

/// How every record that this program writes begins.
constexpr std::string_view kRecordStart = R"({"id":)";

/// The output file: every finished record is one complete line, or is not there.
class Output {
 public:
  /// Opens for appending, cuts off a torn last record, and notes what is there already. A file that
  /// holds anything but records is refused and left as it is.
  explicit Output(const std::string& path) : path_(path) {
    descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor_ < 0)
      fail("opened for writing", "give a file in a folder that you may write to");
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
  ~Output() { close(descriptor_); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool has(const Record& record) const {
    return !record.id.is_null() && ids_.contains(record.id.dump());
  }
  bool repaired() const noexcept { return repaired_; }
  /// Whether an earlier start could not serve it; it is tried again, and the later line counts.
  bool failed_before(const Record& record) const {
    return !has(record) && failed_.contains(record.id.is_null() ? Json(record.line) : record.id);
  }

  /// Appends one line; on failure what was written of it is cut off again.
  void append(const Json& json) {
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

 private:
  [[noreturn]] void fail(const char* what, const char* cure) const {
    throw Error(ErrorCode::kCorruptFile, fmt::format("--out {} cannot be {}: {}; {}", path_, what,
                                                     std::strerror(errno), cure));
  }

  void read_existing() {
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
    } else if (!Json::accept(tail) &&
               kRecordStart.starts_with(tail.substr(0, kRecordStart.size()))) {
      repaired_ = true;
      if (ftruncate(descriptor_, size_) != 0) fail("repaired", kRepair);
    } else {
      refuse(tail);
    }
  }

  [[noreturn]] void refuse(const std::string& line) const {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--out {} holds a line that is no record of a batch: \"{:.40}\"; give "
                            "another file or remove that line",
                            path_, printable(line)));
  }

  /// Notes a line's record; whether it is one. A record that failed counts as not there.
  bool note(const std::string& line) {
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

  static constexpr const char* kRepair = "start again with a writable file and free space";

  std::string path_;
  int descriptor_ = -1;
  off_t size_ = 0;
  bool repaired_ = false;
  std::set<std::string> ids_;  // of records that were served
  std::set<Json> failed_;      // ids, or lines without one, of those that were not
};

/// All records through one generator, up to batch_size of them at a time.
class Batch {
 public:
  Batch(const RunOptions& options, Session& session, std::vector<Record> records, Output& output)
      : options_(options),
        session_(session),
        records_(std::move(records)),
        output_(output),
        cache_(session.make_cache(static_cast<int>(std::clamp<size_t>(
                                      records_.size(), 1, static_cast<size_t>(options.batch_size))),
                                  rows_of_longest(), options.kv_memory)),
        generator_(session.model(), *cache_, session.stream()),
        progress_("batch", records_.size(), options.quiet) {}

  int run() {
    while (!interrupted()) {
      while (!interrupted() && next_ < records_.size() && running_.size() < limit_) start_next();
      if (running_.empty()) break;
      generator_.step();
      generator_.deliver();
      collect();
    }
    progress_.finish();
    if (!options_.quiet) {
      print_message("batch: {} of {} records done, {} failed\n", done_, records_.size(), failed_);
    }
    if (interrupted()) return kExitInterrupted;
    return failed_ > 0 ? kExitFailed : 0;
  }

 private:
  struct Running {
    int key;
    const Record* record;
  };

  /// An upper bound of the tokens of any record, without opening a picture.
  int rows_of_longest() {
    Model& model = session_.model();
    const int context = model.decoder().max_positions();
    const int max_tokens = options_.max_tokens.value_or(model.defaults().max_tokens);
    size_t longest = 1;
    for (const Record& record : records_) {
      if (!record.error.empty()) continue;
      const std::vector<ChatMessage> messages =
          conversation(question(record), record.images.size());
      const size_t text_rows = model.tokenizer().encode(model.render(messages)).size();
      longest = std::max(longest,
                         text_rows +
                             record.images.size() * static_cast<size_t>(model.max_image_tokens()) +
                             static_cast<size_t>(max_tokens));
    }
    return static_cast<int>(std::min<size_t>(longest, static_cast<size_t>(context)));
  }

  /// What a record asks: its own prompt, else -p, else for a caption.
  std::string question(const Record& record) {
    if (!record.prompt.empty()) return record.prompt;
    if (!options_.prompt.empty()) return options_.prompt;
    return std::string(session_.model().caption_prompt());
  }

  std::vector<ChatMessage> conversation(const std::string& text, size_t images) {
    std::vector<ChatMessage> messages = opening(options_);
    messages.push_back(
        user_message(text, static_cast<int>(images), session_.model().image_token()));
    return messages;
  }

  void start_next() {
    const Record& record = records_[next_];
    if (!record.error.empty()) {
      ++next_;
      write_error(record, record.error);
      return;
    }
    try {
      GenerationRequest request = base_request(options_, session_.model());
      request.id = name_of(record);
      request.messages = conversation(question(record), record.images.size());
      for (const std::string& image : record.images) request.images.push_back(load_image(image));
      const int key = generator_.admit(std::move(request), {});
      generator_.deliver();
      running_.push_back({key, &record});
      ++next_;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) throw;  // lost for the records that follow, too
      if (error.code() == ErrorCode::kOutOfMemory && !running_.empty()) {
        limit_ = running_.size();  // the cache holds no more at a time; wait for one to leave
        return;
      }
      ++next_;
      write_error(record, error.what());
    }
    collect();
  }

  void collect() {
    for (auto entry = running_.begin(); entry != running_.end();) {
      if (!generator_.finished(entry->key)) {
        ++entry;
        continue;
      }
      const GenerationResult result = generator_.take(entry->key);
      Json json{{"id", entry->record->id}};
      json.update(result_json(result, session_, session_.model(), cache_->spec()));
      output_.append(json);
      entry = running_.erase(entry);
      count();
      limit_ = static_cast<size_t>(options_.batch_size);  // its memory is free: try again
    }
  }

  static std::string name_of(const Record& record) {
    return record.id.is_null() ? fmt::format("line {}", record.line)
                               : fmt::format("record {}", record.id.dump());
  }

  void write_error(const Record& record, const std::string& message) {
    Json json{{"id", record.id}};
    if (record.id.is_null()) json["line"] = record.line;
    json["error"] = message;
    output_.append(json);
    if (!options_.quiet) {
      progress_.clear();
      const std::string who = name_of(record);  // which some messages start with already
      print_message("vlm-run: {}{}\n", message.starts_with(who) ? "" : who + ": ", message);
    }
    ++failed_;
    count();
  }

  void count() {
    ++done_;
    progress_.update(done_, fmt::format("({} running)", running_.size()));
  }

  const RunOptions& options_;
  Session& session_;
  std::vector<Record> records_;
  Output& output_;
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  Progress progress_;
  std::vector<Running> running_;
  size_t limit_ = static_cast<size_t>(options_.batch_size);
  size_t next_ = 0;
  size_t done_ = 0;
  size_t failed_ = 0;
};

}  // namespace

std::function<int(Session&)> prepare_batch(const RunOptions& options) {
  std::vector<Record> records = read_records(options.batch_in);
  const auto output = std::make_shared<Output>(options.batch_out);
  const size_t all = records.size();
  std::erase_if(records, [&](const Record& record) { return output->has(record); });
  if (!options.quiet) {
    if (output->repaired()) {
      print_message("batch: cut off a torn last line of {}\n", options.batch_out);
    }
    if (records.size() < all) {
      print_message("batch: {} of {} records are in {} already\n", all - records.size(), all,
                    options.batch_out);
    }
    const auto again = std::count_if(records.begin(), records.end(), [&](const Record& record) {
      return output->failed_before(record);
    });
    if (again > 0) {
      print_message("batch: {} record{} of {} failed before and {} tried again\n", again,
                    again == 1 ? "" : "s", options.batch_out, again == 1 ? "is" : "are");
    }
  }
  return [&options, output, records = std::move(records)](Session& session) {
    return Batch(options, session, records, *output).run();
  };
}

}  // namespace kvlm
