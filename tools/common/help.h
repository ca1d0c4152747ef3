#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace kvlm {

/// Words of `text` in lines of at most `width` columns, each but the first after `indent` blanks.
std::string wrapped(const std::string& text, size_t width, size_t indent);

/// CLI11's help with descriptions that are wrapped at 80 columns. A list of subcommands has the
/// first line of what each does.
class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(30); }
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_subcommand(const CLI::App* command) const override;

 private:
  std::string entry(std::string name, const std::string& text) const;
};

/// Parses the arguments of a program that has subcommands, of which one is to be given. The exit
/// status where help or the version was asked for, which is printed. Throws
/// Error{kInvalidArgument}: no or another subcommand, what CLI11 finds wrong.
std::optional<int> parse_subcommand(CLI::App& app, int argc, char** argv);

}  // namespace kvlm
