#include "tools/kv/list.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/registry.h"
#include "kvcache/spec/words.h"
#include "tools/common/help.h"
#include "tools/common/program.h"
#include "tools/kv/commands.h"
#include "tools/kv/estimate_json.h"

namespace kvlm {

namespace {

struct ListOptions {
  std::string name;  // empty: all
  std::string markdown;
  bool json = false;
};

constexpr size_t kOptionColumns = 78;
constexpr size_t kOptionIndent = 29;

void print_option(const OptionInfo& option) {
  std::string text(option.help);
  if (!option.official.empty()) text += fmt::format("; official: {}", option.official);
  if (!option.paper.empty()) text += fmt::format("; paper: {}", option.paper);
  text += fmt::format(" ({})", legal_values(option));
  fmt::print("    {:<24} {}\n", fmt::format("{}={}", option.key, option.standard),
             wrapped(text, kOptionColumns - kOptionIndent, kOptionIndent));
}

void print_line(std::string_view name, const std::string& text) {
  fmt::print("  {:<9} {}\n", name, wrapped(text, kOptionColumns - 12, 12));
}

void print_text(const std::string& name) {
  for (const PolicyInfo* info : listed(name)) {
    fmt::print("{} ({})\n", spec_name(*info), kind_name(info->kind));
    print_line(info->kind == PartKind::kRetention ? "keeps" : "stores", std::string(info->stores));
    print_line("source", std::string(info->source) +
                             (info->arxiv.empty() ? "" : fmt::format(", arXiv {}", info->arxiv)));
    print_line("goes with", std::string(info->composes));
    print_line("example", std::string(info->example));
    for (const OptionInfo& option : info->options) {
      if (option.key != "what") print_option(option);  // which the name says
    }
    if (name.empty()) fmt::print("\n");
  }
  if (!name.empty()) return;
  fmt::print("Options of every quantizer, unless listed above, and profile of every policy:\n");
  for (const OptionInfo* option : general_options()) print_option(*option);
  fmt::print(
      "\nAn option is shown with its default; official and paper are its values under\n"
      "profile=official and profile=paper, where they differ. A spec joins parts by\n"
      "'+': at most one retention rule, one quantizer for each scope and one sharing\n"
      "part. visual=NAME is short for NAME,scope=visual. See docs/policies.md and\n"
      "docs/policy-options.md.\n");
}

}  // namespace

std::string spec_name(const PolicyInfo& info) {
  return info.kind == PartKind::kSharing ? fmt::format("{}=codes", info.name)
                                         : std::string(info.name);
}

std::vector<const OptionInfo*> general_options() {
  const OptionInfo own;
  const PolicyInfo any{.options = {&own, 1}};
  std::vector<const OptionInfo*> options = options_of(any);
  std::erase(options, &own);
  return options;
}

std::function<int()> add_list(CLI::App& app) {
  const auto options = std::make_shared<ListOptions>();
  auto* markdown =
      app.add_option("--markdown", options->markdown,
                     "Print a page of the documentation: overview (docs/policies.md, the default) "
                     "or options (docs/policy-options.md)")
          ->type_name("PAGE")
          ->expected(0, 1)
          ->default_str("overview")
          ->check(CLI::IsMember({"overview", "options"}));
  app.add_option("NAME", options->name, "Only this policy")->excludes(markdown);
  app.add_flag("--json", options->json, "Print one JSON object")->excludes(markdown);
  return [options, markdown] {
    if (markdown->count() > 0) {
      fmt::print("{}", options->markdown == "options" ? options_markdown() : policies_markdown());
    } else if (options->json) {
      fmt::print("{}\n", nlohmann::ordered_json{{"policies", policies_json(options->name)},
                                                {"version", version_line()}}
                             .dump());
    } else {
      print_text(options->name);
    }
    return 0;
  };
}

}  // namespace kvlm
