#include "tools/common/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/base/queue.h"
#include "kernels/cpu_target.h"
#include "runtime/loading/mapped_file.h"
#include "tools/common/messages.h"
#include "tools/common/version.h"

namespace kvlm {

namespace {

// Written by the signal handler, read by the loops.
std::atomic<int> interrupts{0};

std::atomic<bool> told_to_end{false};

void on_interrupt(int signal) {
  if (signal != SIGINT) told_to_end = true;
  if (interrupts.fetch_add(1) > 0) _exit(kExitInterrupted);
}

// For the handler below.
const char* program_name = "kvlm";

void write_error(const char* text) noexcept {
  static_cast<void>(::write(2, text, std::strlen(text)) + 1);
}

/// A file of weights that is cut while it is mapped. Anything else dies as it would without.
void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  const char* file = mapped_file_at(info->si_addr);
  if (file == nullptr) {
    std::signal(signal, SIG_DFL);  // which the same instruction meets next
    return;
  }
  write_error(program_name);
  write_error(": ");
  write_error(file);
  write_error(
      ": became shorter while it was in use, or its disk fails; write the whole file again and "
      "start anew\n");
  _exit(kExitFailed);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigaction(signal, &action, nullptr);
}

void report(std::string_view program, std::string_view message) noexcept {
  std::fflush(stdout);
  print_error(program, message);
}

constexpr const char* kLostOutput =
    "standard output cannot be written; free space on its disk or redirect elsewhere";

/// A program can be started with 0, 1 or 2 closed. The next file opened would get that number, and
/// messages would be written into it; /dev/null takes the place, opened the wrong way round, so
/// that using it fails as before.
void fill_standard_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    static_cast<void>(open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY));
  }
}

/// What is shipped with the program under that name, in the first of the places that has it.
std::filesystem::path shipped(std::string_view name) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    for (const char* data : {kInstalledData, "../../../tools"}) {  // <root>/build/<preset>/tools
      std::filesystem::path path = (program.parent_path() / data / name).lexically_normal();
      if (std::filesystem::exists(path, error)) return path;
    }
  }
  return std::filesystem::path(kSourceFolder) / "tools" / name;
}

}  // namespace

int run_program(const char* program, const std::function<int()>& body) {
  fill_standard_streams();
  program_name = program;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
  try {
    const int status = body();
    const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    if (lost && status == 0) {
      report(program, kLostOutput);
      return kExitFailed;
    }
    return status;
  } catch (const Error& error) {
    report(program, error.what());
    if (error.code() == ErrorCode::kCancelled) return kExitInterrupted;
    return error.code() == ErrorCode::kInvalidArgument ? 2 : kExitFailed;
  } catch (const std::bad_alloc&) {
    report(program, "the machine is out of memory; use a smaller model, batch or cache");
    return kExitFailed;
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) {  // fmt::print() throws where a write fails
      report(program, kLostOutput);
    } else {
      report(program, fmt::format("unexpected failure: {}; please report it", error.what()));
    }
    return kExitFailed;
  }
}

void catch_interrupts() {
  handle(SIGINT, on_interrupt);  // no SA_RESTART: a read at a prompt returns
  handle(SIGTERM, on_interrupt);
  handle(SIGPIPE, SIG_IGN);  // a closed pipe is reported by the write, not by death
  handle(SIGXFSZ, SIG_IGN);  // nor is a limit on the size of files
}

bool interrupted() noexcept { return interrupts.load() > 0; }

bool forget_interrupts() noexcept {
  if (!told_to_end) interrupts = 0;
  return !told_to_end;
}

std::optional<std::string> environment(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::filesystem::path bundled_models() {
  if (const auto home = environment("KVLM_HOME")) return std::filesystem::path(*home) / "pocket";
  return shipped("pocket");
}

std::string version_line() {
  return fmt::format("kvlm {} (commit {}, {}, CPU target {}, CUDA {})", kVersion, kCommit,
                     kCompiler, cpu_target(), kCudaVersion);
}

Device parse_device(const std::string& text) {
  const auto refuse = [&](const std::string& hint = {}) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--device is \"{}\"; expected auto, cpu or cuda[:N]{}", printable(text), hint));
  };
  if (text == "cpu") return {};
  if (text == "auto") {
    return cuda::device_count() > 0 ? Device{DeviceKind::kCuda, 0} : Device{};
  }
  if (text == "cuda" || text.starts_with("cuda:")) {
    int index = 0;
    const char* end = text.data() + text.size();
    if (text.size() > 4) {
      const auto [rest, error] = std::from_chars(text.data() + 5, end, index);
      if (error != std::errc() || rest != end || index < 0) refuse();
    }
    static_cast<void>(cuda::device_facts(index));  // refused here, before anything is read
    return {DeviceKind::kCuda, index};
  }
  const size_t digits = text.find_first_of("0123456789");
  const std::string number =
      digits == std::string::npos ? "" : fmt::format(":{}", text.substr(digits));
  const std::string name = text.substr(0, std::min(digits, text.find(':')));
  for (const char* gpu : {"gpu", "GPU", "cuda", "CUDA"}) {
    if (name == gpu) refuse(fmt::format("; did you mean cuda{}?", number));
  }
  refuse(", and no other device is supported");
  return {};
}

size_t parse_bytes(const char* option, const std::string& text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(rest, static_cast<size_t>(text.data() + text.size() - rest));
  const auto factor = [&]() -> double {
    if (unit.empty() || unit == "B") return 1;
    if (unit == "K" || unit == "KB" || unit == "kB") return 1e3;
    if (unit == "M" || unit == "MB") return 1e6;
    if (unit == "G" || unit == "GB") return 1e9;
    if (unit == "Ki" || unit == "KiB") return 1024;
    if (unit == "Mi" || unit == "MiB") return 1048576;
    if (unit == "Gi" || unit == "GiB") return 1073741824;
    return 0;
  }();
  if (error != std::errc() || factor == 0 || !(value > 0) || value * factor > 1e15) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is \"{}\"; expected a memory size, for example 500MB, 5GB or 4GiB",
                            option, printable(text)));
  }
  return static_cast<size_t>(value * factor);
}

bool is_terminal(int descriptor) noexcept { return isatty(descriptor) == 1; }

void run_script(const std::string& script, const std::vector<std::string>& arguments) {
  const std::string path = shipped(script).string();
  std::vector<std::string> words{"python3", "-B", path};  // no __pycache__ among installed files
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  int status = posix_spawnp(&child, "python3", nullptr, nullptr, argv.data(), environ);
  if (status == 0) waitpid(child, &status, 0);
  if (status != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("python3 {} ended with status {}; see its message above", path,
                            WIFEXITED(status) ? WEXITSTATUS(status) : status));
  }
}

}  // namespace kvlm
