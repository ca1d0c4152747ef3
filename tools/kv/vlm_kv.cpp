#include "tools/kv/vlm_kv.h"

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/common/help.h"
#include "tools/common/program.h"
#include "tools/kv/commands.h"

namespace kvlm {
namespace {

constexpr std::array kCommands = {
    KvCommand{"list", "List every policy: what it stores, and its options",
              "  vlm-kv list\n  vlm-kv list kivi", &add_list},
    KvCommand{"explain", "Memory of a policy, by component and layer",
              "  vlm-kv explain kivi,bits=2 -m pocket --tokens 624 --visual 576\n"
              "  vlm-kv explain \"visual=calibquant text=kivi\" --tokens 4096 --json",
              &add_explain},
    KvCommand{"fidelity", "Compare the outputs under a policy with an f16 cache",
              "  vlm-kv fidelity --kv kivi --kv vidkv --data captions.jsonl --plot plots\n"
              "  vlm-kv fidelity --kv int4 --data captions.jsonl --records 10 --csv",
              &add_fidelity},
    KvCommand{"profile", "Calibrate policy parameters on a model",
              "  vlm-kv profile -m pocket --data captions.jsonl --out pocket.profile.json",
              &add_profile},
    KvCommand{"values", "Statistics of a model's keys and values, layer by layer",
              "  vlm-kv values -m pocket --data captions.jsonl --records 5\n"
              "  vlm-kv values -m pocket --data captions.jsonl --plot plots",
              &add_values},
};

int run(int argc, char** argv) {
  CLI::App app{"vlm-kv: inspects, compares and calibrates cache policies", "vlm-kv"};
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", version_line());
  app.footer(std::string("vlm-kv SUBCOMMAND --help shows options and examples.\n\n") + kStatusHelp);
  std::vector<std::pair<CLI::App*, std::function<int()>>> commands;
  for (const KvCommand& command : kCommands) {
    CLI::App* subcommand = app.add_subcommand(command.name, command.what);
    subcommand->footer(std::string("Examples:\n") + command.examples);
    commands.emplace_back(subcommand, command.add(*subcommand));
  }
  if (const auto status = parse_subcommand(app, argc, argv)) return *status;
  for (const auto& [subcommand, body] : commands) {
    if (subcommand->parsed()) return body();
  }
  return 0;
}

}  // namespace

int vlm_kv(int argc, char** argv) {
  return run_program("vlm-kv", [&] { return run(argc, argv); });
}

}  // namespace kvlm
