#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// What a line of a chat asks for.
struct ChatLine {
  enum class Kind { kNothing, kQuestion, kImage, kVideo, kClear, kQuit };
  Kind kind = Kind::kNothing;
  std::string text;  ///< the question, or the path of the picture or video
};

inline constexpr std::string_view kChatHelp =
    "/image FILE adds an image, /video FILE a video, /clear starts over, /quit ends";

/// Reads a line. A path may be in quotes, have its blanks behind backslashes or as they are, and
/// start with ~/. Throws Error{kInvalidArgument} with the nearest command for one that is unknown,
/// with the usage for one that lacks its FILE or has what it does not take.
ChatLine parse_chat_line(std::string_view line);

/// What Tab makes of the text before the cursor.
struct Completion {
  std::string insert;                ///< goes in at the cursor; may be empty
  std::vector<std::string> choices;  ///< to show where several go on differently
};

/// Completes commands, and behind /image and /video the names of files, folders with a slash.
Completion complete_chat_line(std::string_view before_cursor);

}  // namespace kvlm
