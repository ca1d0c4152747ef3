#include "tools/run/batch_devices.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/program.h"
#include "tools/run/batch_log.h"
#include "tools/run/report.h"
#include "tools/run/requests.h"

// A batch on several devices. This process owns --out, reads no weight and uses no device; the
// others hold a model each and own nothing, so one that is lost costs the records it had.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

// Records that one process has at most: as many as run at once, and those that it prepares ahead.
constexpr size_t kMostAtOne = 320;
constexpr size_t kFewestAtOne = 8;
constexpr int kPatienceMs = 50;

/// The command line of a process for `device`: that of this one, with a stream in place of files.
std::vector<std::string> arguments_for(const RunOptions& options, const std::string& device) {
  std::vector<std::string> kept{"/proc/self/exe"};
  const std::vector<std::string>& typed = options.arguments;
  for (size_t i = 1; i < typed.size(); ++i) {
    const auto is = [&](const char* name) {
      return typed[i] == name || typed[i].starts_with(std::string(name) + "=");
    };
    if (is("--batch") || is("--out") || is("--device") || is("--gpus") || is("--shard")) {
      i += typed[i].find('=') == std::string::npos ? 1 : 0;
    } else if (!is("--lean") && !is("-q") && !is("--quiet")) {
      kept.push_back(typed[i]);
    }
  }
  for (const char* more : {"--batch", "-", "--out", "-", "--shard", "1/1", "-q", "--device"}) {
    kept.emplace_back(more);
  }
  kept.push_back(device);
  return kept;
}

/// A process that answers records of one device.
class Worker {
 public:
  Worker(const RunOptions& options, std::string device) : device_(std::move(device)) {
    std::array<int, 2> in{-1, -1};
    std::array<int, 2> out{-1, -1};
    if (pipe2(in.data(), O_CLOEXEC) != 0 || pipe2(out.data(), O_CLOEXEC) != 0) fail();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::vector<std::string> words = arguments_for(options, device_);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    errno = posix_spawn(&process_, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
    if (errno != 0) fail();
    fcntl(to_, F_SETFL, fcntl(to_, F_GETFL) | O_NONBLOCK);
  }
  ~Worker() {
    close_input();
    close(from_);
    if (process_ <= 0) return;
    kill(process_, SIGTERM);
    wait_for_end();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const std::string& device() const noexcept { return device_; }
  int to() const noexcept { return to_; }
  int from() const noexcept { return from_; }
  size_t records() const noexcept { return records_.size(); }
  bool writes() const noexcept { return !unwritten_.empty(); }

  void give(std::shared_ptr<const Record> record) {
    Json json{{"id", record->id}};
    if (!record->images.empty()) json["images"] = record->images;
    if (!record->videos.empty()) json["videos"] = record->videos;
    if (!record->prompt.empty()) json["prompt"] = record->prompt;
    unwritten_ += json_line(json) + "\n";
    records_.emplace(json_line(record->id), std::move(record));
  }
  /// Writes what the pipe takes. False if its reader is gone.
  bool write_some() {
    const ssize_t count = write(to_, unwritten_.data(), unwritten_.size());
    if (count > 0) unwritten_.erase(0, static_cast<size_t>(count));
    return count >= 0 || errno == EAGAIN || errno == EINTR;
  }
  /// The lines that are there. False at the end.
  bool read_some(std::vector<std::string>& lines) {
    std::array<char, 65536> block;
    const ssize_t count = read(from_, block.data(), block.size());
    if (count < 0) return errno == EINTR || errno == EAGAIN;
    unread_.append(block.data(), static_cast<size_t>(count));
    size_t begin = 0;
    for (size_t end; (end = unread_.find('\n', begin)) != std::string::npos; begin = end + 1) {
      lines.push_back(unread_.substr(begin, end - begin));
    }
    unread_.erase(0, begin);
    return count > 0;
  }
  /// The record that an answer is of, which it has no longer.
  std::shared_ptr<const Record> take(const Json& answer) {
    const auto place = records_.find(json_line(answer.at("id")));
    if (place == records_.end()) return nullptr;
    std::shared_ptr<const Record> record = std::move(place->second);
    records_.erase(place);
    return record;
  }
  void close_input() {
    if (to_ >= 0) close(to_);
    to_ = -1;
  }
  /// Its exit status.
  int wait_for_end() {
    int status = 0;
    while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
    }
    process_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(ErrorCode::kDevice, fmt::format("cannot start a process for {}: {}; use fewer "
                                                "devices",
                                                printable(device_), std::strerror(errno)));
  }

  std::string device_;
  pid_t process_ = -1;
  int to_ = -1;
  int from_ = -1;
  std::string unwritten_;
  std::string unread_;
  std::map<std::string, std::shared_ptr<const Record>> records_;  // unanswered, by id
};

class Devices {
 public:
  Devices(const RunOptions& options, BatchJob& job)
      : options_(options),
        job_(job),
        log_(options, job.settings, *job.output, job.total),
        most_(std::clamp(job.total.value_or(kMostAtOne) / (2 * options.devices.size()),
                         kFewestAtOne, kMostAtOne)) {
    for (const std::string& device : options.devices) {
      workers_.push_back(std::make_unique<Worker>(options, device));
    }
  }

  int run() {
    while (!interrupted()) {
      give_records();
      size_t left = 0;
      for (const auto& worker : workers_) left += worker->records();
      log_.show_progress(left, 0, 0);
      if (left == 0 && job_.source->ended()) break;
      exchange();
    }
    for (const auto& worker : workers_) worker->close_input();
    if (!interrupted()) {
      for (const auto& worker : workers_) worker->wait_for_end();
    }
    return log_.finish(0, interrupted());
  }

 private:
  /// Each to the process that has fewest.
  void give_records() {
    for (;;) {
      Worker& worker =
          **std::ranges::min_element(workers_, {}, [](const auto& one) { return one->records(); });
      if (worker.records() >= most_ || job_.source->ended()) return;
      std::shared_ptr<const Record> record = job_.source->take(/*wait=*/false);
      if (!record) return;
      if (record->error.empty()) {
        worker.give(std::move(record));
      } else {
        log_.add_error(*record, ErrorCode::kInvalidArgument, record->error);
      }
    }
  }

  /// Waits for what the processes take or give.
  void exchange() {
    std::vector<pollfd> ready;
    for (const auto& worker : workers_) {
      ready.push_back({worker->from(), POLLIN, 0});
      ready.push_back({worker->writes() ? worker->to() : -1, POLLOUT, 0});
    }
    if (poll(ready.data(), ready.size(), kPatienceMs) < 0) return;  // a signal
    for (size_t i = 0; i < workers_.size(); ++i) {
      Worker& worker = *workers_[i];
      bool there = true;
      if (ready[2 * i + 1].revents != 0) there = worker.write_some();
      if (ready[2 * i].revents != 0) there = take_answers(worker) && there;
      if (!there && !interrupted()) lose(worker);
    }
  }

  bool take_answers(Worker& worker) {
    std::vector<std::string> lines;
    const bool there = worker.read_some(lines);
    for (const std::string& line : lines) {
      Json answer = Json::parse(line);
      const std::shared_ptr<const Record> record = worker.take(answer);
      if (!record) continue;
      if (answer.contains("error")) {
        log_.add_error(*record, failure_of(answer), answer["error"].get<std::string>());
      } else {
        log_.add_answer(*record, std::move(answer));
      }
    }
    return there;
  }

  [[noreturn]] void lose(Worker& worker) {
    const size_t records = worker.records();
    const int status = worker.wait_for_end();
    throw Error(
        ErrorCode::kDevice,
        fmt::format("the process of {} ended with status {} and {} unanswered record{}; run "
                    "the same command again to go on",
                    printable(worker.device()), status, records, records == 1 ? "" : "s"));
  }

  const RunOptions& options_;
  BatchJob& job_;
  BatchLog log_;
  size_t most_;  // records that a process has at once
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

int run_batch_on_devices(const RunOptions& options, BatchJob& job) {
  std::signal(SIGPIPE, SIG_IGN);
  job.begin(options);
  return Devices(options, job).run();
}

}  // namespace kvlm
