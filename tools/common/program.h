#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/device.h"

namespace kvlm {

/// Runs a program's body, reports an Error as one line "PROGRAM: SENTENCE" on stderr, and returns
/// the exit status: 0 done, 1 a run-time failure, 2 usage, 130 interrupted. A standard stream that
/// is closed stays unusable but is taken, so that no file is opened in its place. Weights that
/// somebody cuts meanwhile end the process with such a line too.
int run_program(const char* program, const std::function<int()>& body);

/// Ctrl+C and SIGTERM: the first asks the program to finish what it is at and leave; the second
/// ends it at once. A closed pipe and a limit on the size of files become failed writes.
void catch_interrupts();
bool interrupted() noexcept;
/// Makes the next Ctrl+C the first again, for a program that has obeyed and goes on. Not after
/// SIGTERM: then false.
bool forget_interrupts() noexcept;

inline constexpr int kExitFailed = 1;
inline constexpr int kExitInterrupted = 130;

/// The process's environment, for find_model().
std::optional<std::string> environment(std::string_view name);

/// Where the bundled models are: KVLM_HOME/pocket if that variable is set, whatever is there; else
/// share/kvlm/pocket of the prefix that the program is installed in, else tools/pocket of the tree
/// that it runs in, else of the one that it was built in.
std::filesystem::path bundled_models();

/// Runs a Python script of tools/, named relative to it. It is looked for where the bundled models
/// are, but whatever KVLM_HOME is: it goes with the program. Throws Error{kUnsupported} with its
/// exit status if it fails, having said why.
void run_script(const std::string& script, const std::vector<std::string>& arguments);

/// Commit, compiler, CPU target and CUDA version, as --version prints them and --json carries them.
std::string version_line();

/// "auto" | "cpu" | "cuda[:N]". Throws Error{kInvalidArgument}, Error{kUnsupported} for what is not
/// built in.
Device parse_device(const std::string& text);

/// "5GB" or "5G" (1e9), "4GiB" or "4Gi" (2^30), "512MiB", "100000": bytes, the value of
/// `option`. Throws Error{kInvalidArgument}.
size_t parse_bytes(const char* option, const std::string& text);

/// Whether a stream is a terminal: 1 stdout, 2 stderr, 0 stdin.
bool is_terminal(int descriptor) noexcept;

}  // namespace kvlm
