#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// What a line of a chat asks for.
struct ChatLine {
  enum class Kind { kNothing, kQuestion, kImage, kVideo, kClear, kHelp, kQuit };
  Kind kind = Kind::kNothing;
  std::string text;  ///< the question, or the path of the picture or video
};

inline constexpr std::string_view kChatHelp =
    "/image FILE adds an image, /video FILE a video, /clear starts over, /help lists all, /quit "
    "ends";

/// What /help prints.
inline constexpr std::string_view kChatCommands =
    R"(/image FILE   adds an image to the next question
/video FILE   adds a video to the next question
/clear        starts over, without images and videos
/help, /?     prints this list
/quit         ends the chat, as do /exit, exit, quit and Ctrl+D
"""           begins and ends a question of several lines; a text that is
              pasted at a terminal is one question
              A question that starts with / needs a blank before it.
)";

inline constexpr size_t kMaxChatLine = size_t{4} << 20;  ///< bytes, also of a question of several

/// Reads a line. A question keeps its blanks. A path may be in quotes, have its blanks behind
/// backslashes or as they are, and start with ~/. Throws Error{kInvalidArgument} for a command that
/// is unknown, with the one that is near or how to ask it as a question; and with the usage for one
/// that lacks its FILE or has what it does not take.
ChatLine parse_chat_line(std::string_view line);

/// Whether what starts with a line like this is a command, known or not.
bool is_chat_command(std::string_view line) noexcept;

/// Joins the lines between one that starts with `"""` and one that ends with it into a question.
class ChatBlock {
 public:
  /// Takes a line. False if it belongs to a question that goes on; else `line` is whole, and
  /// `joined` tells whether it was between the quotes. Throws Error{kInvalidArgument} if the
  /// question has more than kMaxChatLine bytes.
  bool take(std::string& line, bool& joined);
  bool open() const noexcept { return open_; }
  void forget() noexcept { open_ = false; }

 private:
  bool open_ = false;
  std::string text_;
};

/// What Tab makes of the text before the cursor.
struct Completion {
  std::string insert;                ///< goes in at the cursor; may be empty
  std::vector<std::string> choices;  ///< to show where several go on differently
};

/// Completes commands, and behind /image and /video the names of files, folders with a slash.
Completion complete_chat_line(std::string_view before_cursor);

}  // namespace kvlm
