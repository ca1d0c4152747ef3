#include "tools/run/chat_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"
#include "tools/common/program.h"

// What a line of a chat means: a question, or a command with a path as a shell would read it; and
// what completes a line that is half typed.
namespace kvlm {

namespace {

constexpr std::string_view kBlanks = " \t";

struct Command {
  std::string_view name;
  ChatLine::Kind kind;
  /// What it says without the FILE that it needs; empty for one that takes nothing.
  std::string_view usage = {};
};

constexpr std::array kCommands = {
    Command{
        "/image", ChatLine::Kind::kImage,
        "/image needs the FILE of an image, for example /image cat.png; Tab completes its name"},
    Command{"/video", ChatLine::Kind::kVideo,
            "/video needs the FILE of a video, for example /video cat.mp4; Tab completes its name"},
    Command{"/clear", ChatLine::Kind::kClear},
    Command{"/help", ChatLine::Kind::kHelp},
    Command{"/quit", ChatLine::Kind::kQuit},
    Command{"/exit", ChatLine::Kind::kQuit}};

const Command* find_command(std::string_view name) noexcept {
  if (name == "/?") name = "/help";
  if (name == "/bye") name = "/quit";  // as other tools call it
  const auto command = std::ranges::find(kCommands, name, &Command::name);
  return command == kCommands.end() ? nullptr : &*command;
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

/// As a shell reads it: without quotes, and backslashes outside of single ones.
std::string unquoted(std::string_view text) {
  std::string out;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char letter = text[i];
    if (letter == '\\' && quote != '\'' && i + 1 < text.size()) {
      out += text[++i];
    } else if (quote != 0 ? letter == quote : letter == '\'' || letter == '"') {
      quote = quote != 0 ? '\0' : letter;
    } else {
      out += letter;
    }
  }
  return out;
}

std::string with_home(std::string path) {
  if (path != "~" && !path.starts_with("~/")) return path;
  const auto home = environment("HOME");
  return home ? *home + path.substr(1) : path;
}

std::string read_path(std::string_view text) {
  // A name with blanks, quotes or backslashes of its own is taken as it is.
  std::string plain = with_home(std::string(text));
  std::error_code error;
  if (std::filesystem::exists(plain, error)) return plain;
  return with_home(unquoted(text));
}

/// How a name goes on a line behind what `start` has: as it is within quotes, else with
/// backslashes.
std::string escaped(std::string_view name, char quote) {
  std::string out;
  for (const char letter : name) {
    const bool special = quote == 0 ? std::string_view(" \t'\"\\").find(letter) != std::string::npos
                                    : quote == '"' && (letter == '"' || letter == '\\');
    if (special) out += '\\';
    out += letter;
  }
  return out;
}

std::string common_start(const std::vector<std::string>& names) {
  std::string start = names.front();
  for (const std::string& name : names) {
    const auto end = std::mismatch(start.begin(), start.end(), name.begin(), name.end()).first;
    start.erase(end, start.end());
  }
  // Not in the middle of a letter.
  while (!start.empty() && start.size() < names.front().size() &&
         (static_cast<unsigned char>(names.front()[start.size()]) & 0xC0) == 0x80) {
    start.pop_back();
  }
  return start;
}

/// A line that starts with / and is no command: one that was misspelt, a file that was dropped on
/// the terminal, or a question.
[[noreturn]] void refuse_command(std::string_view line, std::string_view name) {
  std::vector<std::string_view> names;
  for (const Command& entry : kCommands) names.push_back(entry.name);
  const std::string_view near = nearest_spelling(name, names);
  std::string advice = fmt::format("did you mean {}?", near);
  if (near.empty()) {
    std::error_code error;
    const std::string path = read_path(line);
    advice = std::filesystem::exists(path, error)
                 ? fmt::format("did you mean /image {0} or /video {0}?", printable(path))
                 : "to ask it as a question, write a blank before it";
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is not a command; {} ({})", printable(name), advice, kChatHelp));
}

Completion complete_file(std::string_view typed) {
  typed.remove_prefix(std::min(typed.find_first_not_of(kBlanks), typed.size()));
  const char quote = typed.starts_with('\'') || typed.starts_with('"') ? typed[0] : '\0';
  const std::string path = unquoted(typed);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string start = slash == std::string::npos ? path : path.substr(slash + 1);
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(with_home(folder), error), end;
       !error && entry != end; entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (!name.starts_with(start) || (start.empty() && name.starts_with('.'))) continue;
    std::error_code unknown;
    if (entry->is_directory(unknown)) name += '/';
    names.push_back(std::move(name));
  }
  if (names.empty()) return {};
  std::sort(names.begin(), names.end());
  const std::string common = common_start(names);
  Completion completion{escaped(std::string_view(common).substr(start.size()), quote), {}};
  if (names.size() == 1 && !common.ends_with('/') && quote != 0) completion.insert += quote;
  if (names.size() > 1 && completion.insert.empty()) completion.choices = std::move(names);
  return completion;
}

}  // namespace

bool is_chat_command(std::string_view line) noexcept { return line.starts_with('/'); }

ChatLine parse_chat_line(std::string_view line) {
  const std::string_view words = trimmed(line);
  if (words.empty()) return {};
  if (words == "exit" || words == "quit") return {ChatLine::Kind::kQuit, {}};
  if (!is_chat_command(line)) return {ChatLine::Kind::kQuestion, std::string(line)};
  line = words;
  const size_t end = std::min(line.find_first_of(kBlanks), line.size());
  const std::string_view name = line.substr(0, end);
  const std::string_view rest = trimmed(line.substr(end));
  const Command* command = find_command(name);
  if (command == nullptr) refuse_command(line, name);
  if (!command->usage.empty()) {
    if (rest.empty()) throw Error(ErrorCode::kInvalidArgument, std::string(command->usage));
    return {command->kind, read_path(rest)};
  }
  if (!rest.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} takes no argument, found \"{}\"; write {} alone", name,
                            printable(rest), name));
  }
  return {command->kind, {}};
}

bool ChatBlock::take(std::string& line, bool& joined) {
  constexpr std::string_view kQuotes = "\"\"\"";
  joined = open_ || line.starts_with(kQuotes);
  if (!joined) return true;
  const std::string_view added =
      std::string_view(line).substr(open_ ? 0 : std::min(kQuotes.size(), line.size()));
  if (!open_) text_.clear();
  const bool ends = added.ends_with(kQuotes);
  const std::string_view words = added.substr(0, added.size() - (ends ? kQuotes.size() : 0));
  if (text_.size() + words.size() > kMaxChatLine) {
    open_ = false;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a question between \"\"\" has more than {} bytes; ask a shorter one",
                            kMaxChatLine));
  }
  if (!text_.empty() && !(ends && words.empty())) text_ += '\n';
  text_ += words;
  open_ = !ends;
  if (ends) line = std::move(text_);
  return ends;
}

Completion complete_chat_line(std::string_view before_cursor) {
  if (!before_cursor.starts_with('/')) return {};
  const size_t end = before_cursor.find_first_of(kBlanks);
  if (end != std::string_view::npos) {
    const Command* command = find_command(before_cursor.substr(0, end));
    if (command == nullptr || command->usage.empty()) return {};
    return complete_file(before_cursor.substr(end));
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    if (command.name.starts_with(before_cursor)) names.emplace_back(command.name);
  }
  if (names.empty()) return {};
  if (names.size() == 1) {
    const bool takes_file = !find_command(names[0])->usage.empty();
    return {names[0].substr(before_cursor.size()) + (takes_file ? " " : ""), {}};
  }
  const std::string common = common_start(names);
  if (common.size() > before_cursor.size()) return {common.substr(before_cursor.size()), {}};
  return {{}, std::move(names)};
}

}  // namespace kvlm
