#pragma once

#include <span>
#include <string>
#include <vector>

namespace kvlm {

/// What the arguments outside of options mean: files that exist are images, or videos by their
/// suffix; the other one is the question, as -p takes it.
struct Operands {
  std::vector<std::string> images;
  std::vector<std::string> videos;
  std::string question;
};

/// Throws Error{kInvalidArgument} with what to write for a file of another kind (records, a text, a
/// checkpoint), for a name of an image or a video that does not exist, for more than one question
/// (words without quotes) and for an empty one.
Operands read_operands(std::span<const std::string> words);

}  // namespace kvlm
