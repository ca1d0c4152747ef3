#include "tools/common/help.h"

#include <sstream>

namespace kvlm {

namespace {

constexpr size_t kColumns = 80;

}  // namespace

std::string wrapped(const std::string& text, size_t width, size_t indent) {
  std::istringstream words(text);
  std::string out;
  size_t column = 0;
  for (std::string word; words >> word;) {
    if (column > 0 && column + 1 + word.size() > width) {
      out += "\n" + std::string(indent, ' ');
      column = 0;
    } else if (column > 0) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  const size_t indent = get_column_width();
  std::string line = "  " + make_option_name(option, is_positional) + make_option_opts(option);
  const std::string text = wrapped(make_option_desc(option), kColumns - indent, indent);
  if (text.empty()) return line + "\n";
  // A name that leaves no blank before the description has a line of its own.
  line += line.size() < indent ? std::string(indent - line.size(), ' ')
                               : "\n" + std::string(indent, ' ');
  return line + text + "\n";
}

}  // namespace kvlm
