#include "tools/run/other_tools.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

// Words that people bring from other tools, each with what vlm-run has in its place.
namespace kvlm {

namespace {

struct Habit {
  std::string_view word;
  std::string_view advice;
};

constexpr std::string_view kServer =
    "vlm-run opens no port; keep the model loaded with --batch or --chat";
constexpr std::string_view kContext =
    "the cache is as long as the prompt and -n need; limit its memory with --kv-memory SIZE";
constexpr std::string_view kGpu = "write --device cuda or --device cpu; a model runs on one device";
constexpr std::string_view kWeights =
    "weights stay as the checkpoint has them (--dtype); --kv int4 packs the cache";
constexpr std::string_view kCache = "write --kv POLICY, for example --kv int8 or --kv kivi,bits=2";
constexpr std::string_view kSampling =
    "sampling has --temp, --top-k, --top-p, --repeat-penalty and --seed";
constexpr std::string_view kChat = "write --chat for a conversation";
constexpr std::string_view kOutput =
    "the answer is on standard output; a batch writes to --out FILE";
constexpr std::string_view kPromptFile = "write -p @FILE to read the question from a file";
constexpr std::string_view kHub =
    "download with `hf download ORG/NAME`, then give -m ORG/NAME or its folder";

constexpr std::array kOptions = {
    Habit{"--mmproj", "the projector is part of the checkpoint folder that -m names; drop it"},
    Habit{"--port", kServer},
    Habit{"--host", kServer},
    Habit{"--api-key", kServer},
    Habit{"--served-model-name", kServer},
    Habit{"-i", "write --image FILE for an image, or --chat for a conversation"},
    Habit{"--interactive", kChat},
    Habit{"--conversation", kChat},
    Habit{"-cnv", kChat},
    Habit{"-c", kContext},
    Habit{"--ctx-size", kContext},
    Habit{"--context-length", kContext},
    Habit{"--num-ctx", kContext},
    Habit{"--max-model-len", kContext},
    Habit{"--max-kv-size", kContext},
    Habit{"--gpu-memory-utilization", kContext},
    Habit{"-ngl", kGpu},
    Habit{"--n-gpu-layers", kGpu},
    Habit{"--gpu-layers", kGpu},
    Habit{"--main-gpu", kGpu},
    Habit{"-tp", kGpu},
    Habit{"--tensor-parallel-size", kGpu},
    Habit{"--device-map", kGpu},
    Habit{"--quantization", kWeights},
    Habit{"--load-in-4bit", kWeights},
    Habit{"--load-in-8bit", kWeights},
    Habit{"-ctk", kCache},
    Habit{"-ctv", kCache},
    Habit{"--cache-type-k", kCache},
    Habit{"--cache-type-v", kCache},
    Habit{"--kv-cache-dtype", kCache},
    Habit{"--kv-bits", kCache},
    Habit{"--cache-implementation", kCache},
    Habit{"--min-p", kSampling},
    Habit{"--num-beams", kSampling},
    Habit{"--do-sample", kSampling},
    Habit{"--presence-penalty", kSampling},
    Habit{"--frequency-penalty", kSampling},
    Habit{"-f", kPromptFile},
    Habit{"--file", kPromptFile},
    Habit{"--prompt-file", kPromptFile},
    Habit{"-o", kOutput},
    Habit{"--output", kOutput},
    Habit{"-hf", kHub},
    Habit{"-hfr", kHub},
    Habit{"--hf-repo", kHub},
    Habit{"--stream", "answers are printed as they are generated; drop it"},
    Habit{"--verbose", "the figures are on standard error unless -q is given; drop it"},
    Habit{"-v", "the figures are on standard error unless -q is given; drop it"},
    Habit{"--trust-remote-code", "no code of a checkpoint is ever run; drop it"},
};

constexpr std::string_view kNoSubcommands =
    "vlm-run has no subcommands; drop the word, as in vlm-run --image a.png \"What is this?\"";
constexpr std::string_view kOfVlmKv = "it is a subcommand of vlm-kv; see vlm-kv --help";
constexpr std::string_view kOfVlmBench = "it is a subcommand of vlm-bench; see vlm-bench --help";

constexpr std::array kSubcommands = {
    Habit{"serve", kServer},
    Habit{"server", kServer},
    Habit{"chat", kChat},
    Habit{"run", kNoSubcommands},
    Habit{"generate", kNoSubcommands},
    Habit{"caption", kNoSubcommands},
    Habit{"help", "see vlm-run --help"},
    Habit{"pull", kHub},
    Habit{"download", kHub},
    Habit{"list", kOfVlmKv},
    Habit{"explain", kOfVlmKv},
    Habit{"fidelity", kOfVlmKv},
    Habit{"profile", kOfVlmKv},
    Habit{"values", kOfVlmKv},
    Habit{"latency", kOfVlmBench},
    Habit{"throughput", kOfVlmBench},
    Habit{"bench", kOfVlmBench},
};

std::string_view advice(std::span<const Habit> habits, std::string_view word) noexcept {
  const auto habit = std::ranges::find(habits, word, &Habit::word);
  return habit == habits.end() ? std::string_view() : habit->advice;
}

}  // namespace

std::string_view advice_on_foreign_option(std::string_view name) {
  if (const std::string_view found = advice(kOptions, name); !found.empty()) return found;
  std::string hyphens(name);  // vLLM's and transformers' own spelling
  std::ranges::replace(hyphens, '_', '-');
  return advice(kOptions, hyphens);
}

bool hides_a_short_option(std::string_view name) noexcept {
  return name.size() > 2 && name[1] != '-' && !advice(kOptions, name).empty();
}

std::string_view advice_on_command(std::string_view word) noexcept {
  return advice(kSubcommands, word);
}

}  // namespace kvlm
