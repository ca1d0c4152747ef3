#include "tools/kv/list.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "kvcache/registry.h"
#include "tools/common/program.h"
#include "tools/kv/commands.h"

namespace kvlm {

namespace {

struct ListOptions {
  bool markdown = false;
  bool json = false;
};

constexpr const char* kKinds[] = {"quantizer", "retention", "sharing"};

std::string_view value_or(std::string_view value, std::string_view fallback) {
  return value.empty() ? fallback : value;
}

void print_json() {
  nlohmann::ordered_json json{{"policies", nlohmann::ordered_json::array()}};
  for (const PolicyInfo* info : policies()) {
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

void print_option(const OptionInfo& option) {
  fmt::print("    {:<24} {}", fmt::format("{}={}", option.key, option.standard), option.help);
  if (!option.official.empty()) fmt::print("; official {}", option.official);
  if (!option.paper.empty()) fmt::print("; paper {}", option.paper);
  fmt::print(" ({})\n", legal_values(option));
}

void print_text() {
  for (const PolicyInfo* info : policies()) {
    fmt::print("{} ({}; {})\n  stores {}\n  goes with {}\n", spec_name(*info),
               kKinds[static_cast<size_t>(info->kind)], info->source, info->stores, info->composes);
    for (const OptionInfo& option : info->options) {
      if (option.key != "what") print_option(option);  // which the name says
    }
    fmt::print("\n");
  }
  fmt::print("Every quantizer, unless said otherwise above, and every policy (profile):\n");
  for (const OptionInfo* option : general_options()) print_option(*option);
  fmt::print(
      "\nA spec joins parts by '+': at most one retention, a quantizer for each scope, one "
      "sharing.\n"
      "visual=NAME is short for NAME,scope=visual. See docs/policies.md.\n");
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
  auto* markdown = app.add_flag("--markdown", options->markdown, "As docs/policies.md");
  app.add_flag("--json", options->json, "One JSON object")->excludes(markdown);
  return [options] {
    if (options->markdown) {
      fmt::print("{}", policies_markdown());
    } else if (options->json) {
      print_json();
    } else {
      print_text();
    }
    return 0;
  };
}

}  // namespace kvlm
