#include <CLI/CLI.hpp>
#include <optional>

#include "kernels/base/error.h"
#include "tools/bench/kernels.h"
#include "tools/bench/latency.h"
#include "tools/common/program.h"

namespace kvlm {
namespace {

constexpr const char* kExamples = R"(Examples:
  vlm-bench latency -m synthetic:llava-tinyllama-1.1b
  vlm-bench latency -m pocket --kv f16 --kv kivi --json
  vlm-bench kernels --only "2 bits" -t 1
  vlm-bench kernels --device cuda --batch 32 --rows 8192)";

std::optional<int> parse(int argc, char** argv, LatencyOptions& latency, KernelsOptions& kernels,
                         bool& wants_kernels) {
  CLI::App app{"vlm-bench: measures what the runtime does against what the machine can do"};
  app.footer(kExamples);
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);
  CLI::App* command = app.add_subcommand("latency", "One sequence: vision, prefill and decode");
  command->add_option("-m,--model", latency.session.model, "As vlm-run's -m")
      ->capture_default_str();
  command->add_option("--kv", latency.specs, "Cache policy; repeatable")->capture_default_str();
  command->add_option("--device", latency.session.device, "auto, cpu or cuda[:N]");
  command->add_option("--dtype", latency.session.dtype, "auto, f32, f16 or bf16");
  command->add_option("-t,--threads", latency.session.threads, "CPU threads; 0 is one per core");
  command->add_option("--prompt-tokens", latency.prompt_tokens, "Rows of the prefill")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--tokens", latency.tokens, "Decode steps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--repeats", latency.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_flag("--json", latency.json, "One JSON object a spec");
  command->add_flag("--csv", latency.csv, "Comma-separated values")->excludes("--json");
  CLI::App* attention =
      app.add_subcommand("kernels", "Decode attention over packed rows against f16 rows");
  attention->add_option("-t,--threads", kernels.threads, "CPU threads; 0 is one per core");
  attention->add_option("--device", kernels.device, "auto, cpu or cuda[:N]")->capture_default_str();
  attention->add_option("--batch", kernels.batch, "Sequences")
      ->check(CLI::Range(1, 1 << 12))
      ->capture_default_str();
  attention->add_option("--rows", kernels.rows, "Cached rows, a multiple of 32")
      ->check(CLI::Range(32, 1 << 20))
      ->capture_default_str();
  attention->add_option("--repeats", kernels.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  attention->add_option("--only", kernels.only, "Formats whose name holds this text");
  attention->add_flag("--json", kernels.json, "One JSON object a format");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::string message = error.what();
    throw Error(ErrorCode::kInvalidArgument,
                message.substr(0, message.find('\n')) + "; see vlm-bench --help");
  }
  wants_kernels = attention->parsed();
  return std::nullopt;
}

int run(int argc, char** argv) {
  LatencyOptions latency;
  KernelsOptions kernels;
  bool wants_kernels = false;
  if (const auto status = parse(argc, argv, latency, kernels, wants_kernels)) return *status;
  catch_interrupts();
  return wants_kernels ? run_kernels(kernels) : run_latency(latency);
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-bench", [&] { return kvlm::run(argc, argv); });
}
