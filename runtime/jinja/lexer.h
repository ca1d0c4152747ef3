#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm::jinja {

struct Token {
  enum class Kind : unsigned char {
    kText,        // template text
    kBlockBegin,  // {%
    kBlockEnd,
    kPrintBegin,  // {{
    kPrintEnd,
    kName,
    kString,
    kInteger,
    kReal,
    kOperator,
    kEnd,
  } kind = Kind::kEnd;
  std::string text;
  int line = 1;
};

/// Cuts a template into tokens as Jinja2 does with trim_blocks and lstrip_blocks: newlines are
/// normalised, one at the very end is dropped, comments are gone and raw blocks are text.
/// Throws Error{kCorruptFile}; `name` is the template's name in messages.
std::vector<Token> tokenize(std::string_view source, const std::string& name);

/// Python's str.isspace() for one character.
bool is_python_space(char32_t c);

}  // namespace kvlm::jinja
