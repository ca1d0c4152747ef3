#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvlm {

/// Words of `text` in lines of at most `width` columns, each but the first after `indent` blanks.
std::string wrapped(const std::string& text, size_t width, size_t indent);

/// CLI11's help with descriptions that are wrapped at 80 columns. A list of subcommands has the
/// first line of what each does. An option is shown with its first long name: further ones are
/// aliases for people who come from other tools.
class HelpFormatter final : public CLI::Formatter {
 public:
  /// `operands` follow "[OPTIONS]" in the usage line.
  explicit HelpFormatter(std::string operands = {}) : operands_(std::move(operands)) {
    column_width(30);
  }
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_subcommand(const CLI::App* command) const override;

 private:
  std::string entry(std::string name, const std::string& text) const;

  std::string operands_;
};

/// What the footers of all three programs end with: exit status and environment variables.
extern const char* const kStatusHelp;

/// What is wrong with a value of an option, as a sentence.
std::string parse_failure(const CLI::App& app, const CLI::ParseError& error);

/// Throws Error{kInvalidArgument} for a long option with one hyphen: CLI11 would take -temp for -t
/// with the value "emp".
void refuse_single_hyphens(const CLI::App& app, std::span<char* const> arguments);

/// Makes --json=no an error: a flag is given or left out.
void refuse_values_of_flags(CLI::App& app);

/// What is wrong with arguments that no option took, the first flag among them before all others,
/// with the option that is near it: "--imge is not an option of vlm-run; did you mean --image?".
std::string unexpected_arguments(const CLI::App& app, const std::vector<std::string>& arguments);

/// An empty value is what an unset variable of a shell leaves, not the default: throws
/// Error{kInvalidArgument} that names the option.
void refuse_empty_values(const CLI::App& app);

/// Parses the arguments of a program that has subcommands, of which one is to be given. The exit
/// status where help or the version was asked for, which is printed. Throws
/// Error{kInvalidArgument}: no or another subcommand, an empty value, what CLI11 finds wrong.
std::optional<int> parse_subcommand(CLI::App& app, int argc, char** argv);

}  // namespace kvlm
