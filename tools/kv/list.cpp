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

namespace kvlm {

namespace {

struct ListOptions {
  std::string name;  // empty: all
  std::string markdown;
  bool json = false;
};

constexpr const char* kKinds[] = {"quantizer", "retention", "sharing"};

std::string_view value_or(std::string_view value, std::string_view fallback) {
  return value.empty() ? fallback : value;
}

/// The policy of a name, or share for share=codes; all for no name.
std::vector<const PolicyInfo*> listed(const std::string& name) {
  if (name.empty()) return policies();
  const PolicyInfo* info = find_policy(name.substr(0, name.find('=')));
  if (info != nullptr) return {info};
  const std::string_view near = nearest_spelling(name, part_names());
  throw Error(ErrorCode::kInvalidArgument,
              near.empty()
                  ? fmt::format("\"{}\" is not a policy; see vlm-kv list", printable(name))
                  : fmt::format("\"{}\" is not a policy; did you mean {}?", printable(name), near));
}

void print_json(const std::string& name) {
  nlohmann::ordered_json json{{"policies", nlohmann::ordered_json::array()}};
  for (const PolicyInfo* info : listed(name)) {
    nlohmann::ordered_json policy{{"name", info->name},
                                  {"kind", kKinds[static_cast<size_t>(info->kind)]},
                                  {"plain", find_format(info->name).has_value()},
                                  {"source", info->source},
                                  {"stores", info->stores},
                                  {"composes", info->composes},
                                  {"options", nlohmann::ordered_json::array()}};
    for (const OptionInfo* option : options_of(*info)) {
      policy["options"].push_back({{"key", option->key},
                                   {"legal", legal_values(*option)},
                                   {"default", option->standard},
                                   {"official", value_or(option->official, option->standard)},
                                   {"paper", value_or(option->paper, option->standard)},
                                   {"help", option->help}});
    }
    json["policies"].push_back(std::move(policy));
  }
  json["version"] = version_line();
  fmt::print("{}\n", json.dump());
}

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
    fmt::print("{} ({})\n", spec_name(*info), kKinds[static_cast<size_t>(info->kind)]);
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
      print_json(options->name);
    } else {
      print_text(options->name);
    }
    return 0;
  };
}

}  // namespace kvlm
