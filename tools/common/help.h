#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace kvlm {

/// Words of `text` in lines of at most `width` columns, each but the first after `indent` blanks.
std::string wrapped(const std::string& text, size_t width, size_t indent);

/// CLI11's help with descriptions that are wrapped at 80 columns.
class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(30); }
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
};

}  // namespace kvlm
