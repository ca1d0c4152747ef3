#include "tools/common/help.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace kvlm {

namespace {

constexpr size_t kColumns = 80;

std::vector<const CLI::App*> subcommands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

/// "list, explain or fidelity".
std::string names_of_subcommands(const CLI::App& app) {
  const std::vector<const CLI::App*> commands = subcommands_of(app);
  std::string names;
  for (size_t i = 0; i < commands.size(); ++i) {
    if (i > 0) names += i + 1 == commands.size() ? " or " : ", ";
    names += commands[i]->get_name();
  }
  return names;
}

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

std::optional<int> parse_subcommand(CLI::App& app, int argc, char** argv) {
  const auto refuse = [](const std::string& sentence) {
    throw Error(ErrorCode::kInvalidArgument, sentence);
  };
  const std::string name = app.get_name();
  if (argc < 2) {
    refuse(fmt::format("no subcommand was given; give {}; see {} --help", names_of_subcommands(app),
                       name));
  }
  const auto commands = subcommands_of(app);
  const auto is_given = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argv[1][0] != '-' && std::none_of(commands.begin(), commands.end(), is_given)) {
    refuse(fmt::format("\"{}\" is not a subcommand of {}; give {}", printable(argv[1]), name,
                       names_of_subcommands(app)));
  }
  app.require_subcommand(1);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::string message = error.what();
    const auto given = app.get_subcommands();
    refuse(fmt::format("{}; see {}{} --help", message.substr(0, message.find('\n')), name,
                       given.empty() ? "" : " " + given[0]->get_name()));
  }
  return std::nullopt;
}

}  // namespace kvlm
