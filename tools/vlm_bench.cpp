#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "tools/bench/kernels.h"
#include "tools/bench/latency.h"
#include "tools/bench/throughput.h"
#include "tools/bench/vision.h"
#include "tools/common/help.h"
#include "tools/common/program.h"
#include "tools/common/weight_options.h"

// vlm-bench: the subcommands and their options. Each measures in a file of tools/bench/.
namespace kvlm {
namespace {

constexpr const char* kLatencyExamples = R"(Examples:
  vlm-bench latency -m synthetic:llava-tinyllama-1.1b
  vlm-bench latency -m pocket --kv f16 --kv kivi --json)";

constexpr const char* kThroughputExamples = R"(Examples:
  vlm-bench throughput -m synthetic:internvl2.5-8b --kv-memory 5G,30G --dry-run
  vlm-bench throughput -m synthetic:internvl2.5-8b --device cuda --kv-memory 5G)";

constexpr const char* kKernelsExamples = R"(Examples:
  vlm-bench kernels --only "2 bits" -t 1
  vlm-bench kernels --device cuda --batch 32 --rows 8192)";

constexpr const char* kVisionExamples = R"(Examples:
  vlm-bench vision -m pocket --size 240x320,960x1280
  vlm-bench vision -m synthetic:llava-1.5-7b --device cuda --batch 16 --json
  vlm-bench vision -m pocket --image page.png -t 2)";

constexpr const char* kThroughputHelp =
    "Times decode steps of as many sequences as fit into a memory budget.\n\nPrompts are random "
    "keys and values, passed to the cache layer by layer without running the decoder: the speed of "
    "a step does not depend on them. The timed steps run the whole decoder.\n\nA SIZE is "
    "500MB (1e6 bytes each), 5GB (1e9) or 5GiB (2^30). --dry-run prints the batch that a policy "
    "reaches "
    "within a budget, in seconds.";

/// The command line of every subcommand, and which was given.
struct Options {
  LatencyOptions latency;
  ThroughputOptions throughput;
  KernelsOptions kernels;
  VisionOptions vision;
  int (*run)(const Options& options) = nullptr;
};

void add_session(CLI::App& command, SessionOptions& session) {
  command.add_option("-m,--model", session.model, "As vlm-run's -m")->capture_default_str();
  command.add_option("--device", session.device, "auto, cpu or cuda[:N]");
  command.add_option("--dtype", session.dtype, "auto, f32, f16 or bf16");
  add_weight_options(command, session);
  command.add_option("-t,--threads", session.threads, "CPU threads; 0: one per core");
}

void add_latency(CLI::App& app, Options& options) {
  LatencyOptions& latency = options.latency;
  CLI::App& command =
      *app.add_subcommand("latency", "Time one sequence: vision, prefill and decode");
  command.footer(kLatencyExamples);
  command.callback([&] { options.run = [](const Options& o) { return run_latency(o.latency); }; });
  add_session(command, latency.session);
  command.add_option("--kv", latency.specs, "Cache policy; repeatable")->capture_default_str();
  command
      .add_option("--prompt-tokens", latency.prompt_tokens,
                  "Tokens of the prefill: visual, but for the last 32")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--tokens", latency.tokens, "Decode steps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--repeats", latency.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command.add_flag("--json", latency.json, "Print one JSON object per spec");
  command.add_flag("--csv", latency.csv, "Print comma-separated values")->excludes("--json");
}

void add_throughput(CLI::App& app, Options& options) {
  ThroughputOptions& throughput = options.throughput;
  CLI::App& command = *app.add_subcommand("throughput", kThroughputHelp);
  command.footer(kThroughputExamples);
  command.callback(
      [&] { options.run = [](const Options& o) { return run_throughput(o.throughput); }; });
  add_session(command, throughput.session);
  // Specs have commas of their own.
  command.add_option("--kv", throughput.specs, "Cache policy; repeatable")->capture_default_str();
  command
      .add_option("--kv-memory", throughput.kv_memory,
                  "Budget for the cache alone; several, joined by commas")
      ->type_name("SIZE")
      ->delimiter(',');
  command
      .add_option("--memory", throughput.memory,
                  "Budget for weights, workspaces (as the GPU reports them) and cache; several, "
                  "joined by commas")
      ->type_name("SIZE")
      ->delimiter(',');
  command
      .add_option("--batch", throughput.batches,
                  "Number of sequences, instead of a budget; several, joined by commas; 8 if no "
                  "budget is given")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  command
      .add_option("--prompt-tokens", throughput.prompt_tokens,
                  "Visual tokens of a prompt; default: 3328 or what the model's context leaves "
                  "(with --dry-run 3328)")
      ->check(CLI::Range(1, 1 << 20));
  command
      .add_option("--text-tokens", throughput.text_tokens,
                  "Text tokens of a prompt, after the visual ones")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command.add_option("--tokens", throughput.tokens, "Timed decode steps of a repetition")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command
      .add_option("--answer-tokens", throughput.answer_tokens,
                  "Also time prompts through the decoder, and report the rate of whole requests "
                  "with this many tokens in their answers")
      ->check(CLI::Range(1, 1 << 20));
  command.add_option("--repeats", throughput.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      .add_flag("--dry-run", throughput.dry_run,
                "Print only batches and bytes, from the model's configuration; nothing is loaded")
      ->excludes("--answer-tokens");
  command.add_flag("--json", throughput.json, "Print one JSON object per row");
  command.add_flag("--csv", throughput.csv, "Print comma-separated values")->excludes("--json");
}

void add_kernels(CLI::App& app, Options& options) {
  KernelsOptions& kernels = options.kernels;
  CLI::App& command =
      *app.add_subcommand("kernels", "Time decode attention over packed tokens against f16 tokens");
  command.footer(kKernelsExamples);
  command.callback([&] { options.run = [](const Options& o) { return run_kernels(o.kernels); }; });
  command.add_option("-t,--threads", kernels.threads, "CPU threads; 0: one per core");
  command.add_option("--device", kernels.device, "auto, cpu or cuda[:N]")->capture_default_str();
  command.add_option("--batch", kernels.batch, "Sequences")
      ->check(CLI::Range(1, 1 << 12))
      ->capture_default_str();
  command.add_option("--rows", kernels.rows, "Cached tokens of a sequence, a multiple of 32")
      ->check(CLI::Range(32, 1 << 20))
      ->check([](const std::string& text) {
        const int rows = std::stoi(text);  // in range, as checked before
        return rows % 32 == 0 ? std::string()
                              : fmt::format("{} is not a multiple of 32; use {} or {}", rows,
                                            rows / 32 * 32, rows / 32 * 32 + 32);
      })
      ->capture_default_str();
  command.add_option("--head-dim", kernels.head_dim, "Channels of a KV head")
      ->check(CLI::Range(16, 256))
      ->capture_default_str();
  command.add_option("--repeats", kernels.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command.add_option("--only", kernels.only, "Only formats whose name contains this text");
  command.add_flag("--json", kernels.json, "Print one JSON object per format");
}

void add_vision(CLI::App& app, Options& options) {
  VisionOptions& vision = options.vision;
  CLI::App& command = *app.add_subcommand(
      "vision", "Time the preparation of images, and the vision tower with its projector");
  command.footer(kVisionExamples);
  command.callback([&] { options.run = [](const Options& o) { return run_vision(o.vision); }; });
  add_session(command, vision.session);
  CLI::Option* sizes = command
                           .add_option("--size", vision.sizes,
                                       "Size of random images in pixels; several, joined by commas")
                           ->type_name("HEIGHTxWIDTH")
                           ->delimiter(',')
                           ->capture_default_str();
  command
      .add_option("--image", vision.image,
                  "Use the image of a file instead; also times reading it, on all threads")
      ->type_name("FILE")
      ->excludes(sizes);
  command.add_option("--batch", vision.batch, "Images that are encoded together")
      ->check(CLI::Range(1, 1 << 10))
      ->capture_default_str();
  command.add_option("--repeats", vision.repeats, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command.add_flag("--json", vision.json, "Print one JSON object per size");
}

std::optional<int> parse(int argc, char** argv, Options& options) {
  CLI::App app{"vlm-bench: compares the speed of the runtime with the limits of the machine",
               "vlm-bench"};
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(std::string("vlm-bench SUBCOMMAND --help shows options and examples.\n\n") +
             kStatusHelp);
  app.set_version_flag("--version", version_line());
  add_latency(app, options);
  add_throughput(app, options);
  add_kernels(app, options);
  add_vision(app, options);
  return parse_subcommand(app, argc, argv);
}

int run(int argc, char** argv) {
  Options options;
  if (const auto status = parse(argc, argv, options)) return *status;
  catch_interrupts();
  return options.run(options);
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  return kvlm::run_program("vlm-bench", [&] { return kvlm::run(argc, argv); });
}
