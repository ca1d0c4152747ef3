#include "tools/common/help.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"

// Help at 80 columns, and what the programs say about arguments that they have not.
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

/// Every long name of every option, without its hyphens.
std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    std::ranges::copy(option->get_lnames(), std::back_inserter(names));
  }
  return names;
}

/// CLI11's message as the beginning of a sentence: its first line without what ends it.
std::string first_line(const std::string& message) {
  std::string line = message.substr(0, message.find('\n'));
  while (!line.empty() && (line.back() == '.' || line.back() == ' ')) line.pop_back();
  return line;
}

bool is_flag(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

/// "vlm-kv list", for messages.
std::string full_name(const CLI::App& app) {
  const CLI::App* parent = app.get_parent();
  return parent == nullptr ? app.get_name() : parent->get_name() + " " + app.get_name();
}

}  // namespace

const char* const kStatusHelp = R"(Exit status:
  0 done, 1 a failure at run time, 2 a wrong command line, 130 interrupted
Variables:
  KVLM_HOME     folder of pocket/ with the bundled models
  HF_HUB_CACHE  Hugging Face cache, where an org/name is looked for; else hub/
                in HF_HOME, then ~/.cache/huggingface)";

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

std::string HelpFormatter::make_usage(const CLI::App* app, std::string name) const {
  std::string usage = CLI::Formatter::make_usage(app, std::move(name));
  const size_t end = usage.find_last_not_of('\n') + 1;
  return operands_.empty() ? usage : usage.insert(end, " " + operands_);
}

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  if (is_positional || option->get_lnames().empty()) {
    return CLI::Formatter::make_option_name(option, is_positional);
  }
  std::string names;
  for (const std::string& name : option->get_snames()) names += "-" + name + ",";
  return names + "--" + option->get_lnames().front();
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

std::string parse_failure(const CLI::App& app, const CLI::ParseError& error) {
  const std::string message = error.what();
  const std::string see = fmt::format("; see {} --help", full_name(app));
  // Begins with the option, of which CLI11 leaves out a flag's hyphens.
  std::string_view about = message;
  constexpr std::string_view kConversion = "Could not convert: ";
  if (about.starts_with(kConversion)) about.remove_prefix(kConversion.size());
  about.remove_prefix(std::min(about.find_first_not_of('-'), about.size()));
  about = about.substr(0, about.find_first_of(": "));
  const std::vector<const CLI::Option*> options = app.get_options();
  const auto named = std::ranges::find_if(options, [&](const CLI::Option* option) {
    const std::string name = option->get_name();
    return name.ends_with(about) && name.find_first_not_of('-') == name.size() - about.size();
  });
  const bool mismatch = dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr;
  const bool value = dynamic_cast<const CLI::ConversionError*>(&error) != nullptr ||
                     message.find(" not in range ") != std::string::npos;
  if (named == options.end() || !(mismatch || value)) return first_line(message) + see;
  const CLI::Option& option = **named;
  const std::string name = option.get_name();
  const std::vector<std::string>& values = option.results();
  if (option.get_expected_max() == 0) return name + " takes no value; write it alone";
  if (std::cmp_greater(values.size(), option.get_items_expected_max())) {
    return fmt::format("{} is given {} times; give it once", name, values.size());
  }
  // "INT:INT in [1 - 8]", of an option with a range.
  const std::string type = option.get_type_name();
  const bool digits =
      !values.empty() && values.back().find_first_not_of("0123456789") == std::string::npos;
  std::string expected = type == "INT" && digits     ? "a smaller integer"
                         : type.starts_with("INT")   ? "an integer"
                         : type.starts_with("UINT")  ? "an integer from 0"
                         : type.starts_with("FLOAT") ? "a number"
                                                     : "a value";
  if (const size_t range = type.find(" in ["); range != std::string::npos) {
    expected += " from " + type.substr(range + 5, type.rfind(']') - range - 5);
    if (const size_t dash = expected.find(" - "); dash != std::string::npos) {
      expected.replace(dash, 3, " to ");
    }
  }
  if (values.empty()) return fmt::format("{} has no value; expected {}{}", name, expected, see);
  if (expected == "a value") return first_line(message) + see;
  return fmt::format("{} is \"{}\"; expected {}{}", name, printable(values.back()), expected, see);
}

void refuse_single_hyphens(const CLI::App& app, std::span<char* const> arguments) {
  for (const std::string_view word : arguments) {
    if (word == "--") return;
    const std::string name(word.substr(0, word.find('=')));
    if (!is_flag(name) || name[1] == '-' || !app.get_option_no_throw("-" + name)) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{0} is not an option of {1}; did you mean -{0}?", name, full_name(app)));
  }
}

void refuse_values_of_flags(CLI::App& app) {
  for (CLI::Option* option : app.get_options([](CLI::Option*) { return true; })) {
    if (option->get_expected_max() == 0) option->disable_flag_override();
  }
}

std::string unexpected_arguments(const CLI::App& app, const std::vector<std::string>& arguments) {
  const auto flag = std::ranges::find_if(arguments, &is_flag);
  const std::string program = full_name(app);
  if (flag == arguments.end()) {
    std::string words;
    for (const std::string& word : arguments) words += (words.empty() ? "" : " ") + word;
    return fmt::format("\"{}\" was not expected; see {} --help", printable(words), program);
  }
  const std::string name = flag->substr(0, flag->find('='));
  const std::vector<std::string> names = long_names(app);
  const std::string_view near = nearest_spelling(
      std::string_view(name).substr(std::min(name.find_first_not_of('-'), name.size())),
      {names.begin(), names.end()});
  return near.empty() ? fmt::format("{} is not an option of {}; see {} --help", printable(name),
                                    program, program)
                      : fmt::format("{} is not an option of {}; did you mean --{}?",
                                    printable(name), program, near);
}

void refuse_empty_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      if (!value.empty()) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is empty; give it a value or leave it out", option->get_name()));
    }
  }
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
  app.require_subcommand(1);
  const auto commands = subcommands_of(app);
  if (std::string_view(argv[1]) == "help") {
    const auto asked = std::ranges::find_if(commands, [&](const CLI::App* command) {
      return argc > 2 && command->check_name(argv[2]);
    });
    fmt::print("{}", asked == commands.end() ? app.help() : (*asked)->help(name));
    return 0;
  }
  const auto is_given = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argv[1][0] != '-' && std::none_of(commands.begin(), commands.end(), is_given)) {
    std::vector<std::string> names;
    for (const CLI::App* command : commands) names.push_back(command->get_name());
    const std::string_view near = nearest_spelling(argv[1], {names.begin(), names.end()});
    refuse(fmt::format("\"{}\" is not a subcommand of {}{}; give {}", printable(argv[1]), name,
                       near.empty() ? "" : fmt::format("; did you mean {}?", near),
                       names_of_subcommands(app)));
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    refuse_values_of_flags(*command);
    if (is_given(command)) {
      refuse_single_hyphens(*command, std::span(argv, static_cast<size_t>(argc)).subspan(2));
    }
  }
  try {
    app.parse(argc, argv);
    for (const CLI::App* command : app.get_subcommands()) refuse_empty_values(*command);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::vector<CLI::App*> given = app.get_subcommands();
    const CLI::App& command = given.empty() ? app : *given[0];
    // A misspelt option is named rather than the one that is missing for it.
    const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
    const bool extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
    if (extra || std::ranges::any_of(rest, &is_flag)) refuse(unexpected_arguments(command, rest));
    refuse(parse_failure(command, error));
  }
  return std::nullopt;
}

}  // namespace kvlm
