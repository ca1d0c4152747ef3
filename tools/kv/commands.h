#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace kvlm {

/// A subcommand of vlm-kv. `add` declares its flags and returns what runs it once they are parsed.
struct KvCommand {
  const char* name;
  const char* what;
  const char* examples;
  std::function<int()> (*add)(CLI::App& app);
};

std::function<int()> add_list(CLI::App& app);
std::function<int()> add_explain(CLI::App& app);
std::function<int()> add_fidelity(CLI::App& app);
std::function<int()> add_profile(CLI::App& app);
std::function<int()> add_values(CLI::App& app);

}  // namespace kvlm
