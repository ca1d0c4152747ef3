#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvlm {

/// One line of the input, read but not judged: what is wrong with it becomes its result.
struct Record {
  size_t line = 0;
  nlohmann::ordered_json id;  // null if the line has none
  std::vector<std::string> images;
  std::string prompt;
  std::string error;
};

/// The records of a file, in its order. Throws Error{kCorruptFile} if it cannot be read; a line
/// that is no record is one with an error.
std::vector<Record> read_records(const std::string& path);

}  // namespace kvlm
