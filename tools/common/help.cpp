#include "tools/common/help.h"

#include <sstream>
#include <utility>

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

/// A name in the left column and its description beside it.
std::string HelpFormatter::entry(std::string name, const std::string& text) const {
  const size_t indent = get_column_width();
  std::string line = "  " + std::move(name);
  const std::string lines = wrapped(text, kColumns - indent, indent);
  if (lines.empty()) return line + "\n";
  // A name that leaves no blank before the description has a line of its own.
  line += line.size() < indent ? std::string(indent - line.size(), ' ')
                               : "\n" + std::string(indent, ' ');
  return line + lines + "\n";
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return entry(make_option_name(option, is_positional) + make_option_opts(option),
               make_option_desc(option));
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  std::istringstream paragraphs(app->get_description());
  std::string out;
  for (std::string line; std::getline(paragraphs, line);) out += wrapped(line, kColumns, 0) + "\n";
  return out;
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  const std::string text = command->get_description();
  return entry(command->get_name(), text.substr(0, text.find('\n')));
}

}  // namespace kvlm
