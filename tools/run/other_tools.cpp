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
constexpr std::string_view kLength = "write -n N for the most tokens of an answer";
constexpr std::string_view kQuestion = "write -p TEXT, or the question as the last argument";
constexpr std::string_view kManyRecords =
    "a prompt needs no batch size; --batch IN --out OUT answers many records, --batch-size N at "
    "once";
constexpr std::string_view kMapping = "weights are read from the mapped files; drop it";
constexpr std::string_view kAttention = "attention is chosen by device and --kv; drop it";
constexpr std::string_view kTemplate = "the chat template is the checkpoint's own; drop it";
constexpr std::string_view kGrammar =
    "answers follow no grammar; --json prints the answer and its figures as one JSON object";
constexpr std::string_view kAdapters = "adapters are not read; merge them into the checkpoint";
constexpr std::string_view kDraft = "there is no speculative decoding; drop it";
constexpr std::string_view kDtype = "write --dtype auto, f32, f16 or bf16";
constexpr std::string_view kResume =
    "the same command resumes a batch; to start anew give another --out";
constexpr std::string_view kFewer =
    "give --batch a file with fewer records, for example of head -n N";
constexpr std::string_view kThreads = "write -t N for all threads";
constexpr std::string_view kFrames = "write --frames N, or --fps N";
constexpr std::string_view kStop = "write --stop TEXT";
constexpr std::string_view kQuiet = "-q leaves out the summary and the progress; drop it";
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
    Habit{"--kv-cache", kCache},
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
    Habit{"-hff", kHub},
    Habit{"-hft", kHub},
    Habit{"-mu", kHub},
    Habit{"--model-url", kHub},
    Habit{"-mm", "the projector is part of the checkpoint folder that -m names; drop it"},
    Habit{"-mg", kGpu},
    Habit{"-sm", kGpu},
    Habit{"--split-mode", kGpu},
    Habit{"-ts", kGpu},
    Habit{"--tensor-split", kGpu},
    Habit{"-dev", kGpu},
    Habit{"-nkvo", kGpu},
    Habit{"--no-kv-offload", kGpu},
    Habit{"-ncmoe", kGpu},
    Habit{"--num-gpu", kGpu},
    Habit{"--pipeline-parallel-size", kGpu},
    Habit{"-tb", kThreads},
    Habit{"--threads-batch", kThreads},
    Habit{"-np", kManyRecords},
    Habit{"--parallel", kManyRecords},
    Habit{"-ns", kManyRecords},
    Habit{"-b", kManyRecords},
    Habit{"-ub", kManyRecords},
    Habit{"--ubatch-size", kManyRecords},
    Habit{"-cb", kManyRecords},
    Habit{"--max-num-seqs", kManyRecords},
    Habit{"--max-num-batched-tokens", kManyRecords},
    Habit{"--workers", kManyRecords},
    Habit{"--num-workers", kManyRecords},
    Habit{"-j", kManyRecords},
    Habit{"-fa", kAttention},
    Habit{"--flash-attn", kAttention},
    Habit{"--attn-implementation", kAttention},
    Habit{"--enforce-eager", kAttention},
    Habit{"--no-mmap", kMapping},
    Habit{"--mlock", kMapping},
    Habit{"--numa", kMapping},
    Habit{"--jinja", kTemplate},
    Habit{"--chat-template", kTemplate},
    Habit{"--conv-mode", kTemplate},
    Habit{"--format", kGrammar},
    Habit{"--grammar", kGrammar},
    Habit{"--grammar-file", kGrammar},
    Habit{"--json-schema", kGrammar},
    Habit{"--response-format", kGrammar},
    Habit{"--lora", kAdapters},
    Habit{"--adapter", kAdapters},
    Habit{"-md", kDraft},
    Habit{"-td", kDraft},
    Habit{"-ngld", kDraft},
    Habit{"--model-draft", kDraft},
    Habit{"--max-length", kLength},
    Habit{"--num-predict", kLength},
    Habit{"--query", kQuestion},
    Habit{"--text", kQuestion},
    Habit{"--message", kQuestion},
    Habit{"--torch-dtype", kDtype},
    Habit{"--load-4bit", kWeights},
    Habit{"--load-8bit", kWeights},
    Habit{"--limit-mm-per-prompt", "a prompt has as many images as the context holds; drop it"},
    Habit{"--num-frames", kFrames},
    Habit{"--max-frames", kFrames},
    Habit{"--nframes", kFrames},
    Habit{"--video-fps", kFrames},
    Habit{"--resume", kResume},
    Habit{"--overwrite", kResume},
    Habit{"--force", kResume},
    Habit{"-y", kResume},
    Habit{"--limit", kFewer},
    Habit{"--num-samples", kFewer},
    Habit{"-s", "write --seed N"},
    Habit{"--samplers", kSampling},
    Habit{"-r", kStop},
    Habit{"--reverse-prompt", kStop},
    Habit{"--eos", kStop},
    Habit{"--stop-token", kStop},
    Habit{"--ignore-eos", "an answer ends where the model, --stop or -n ends it; drop it"},
    Habit{"--keepalive", kServer},
    Habit{"--log-disable", kQuiet},
    Habit{"--no-display-prompt", kQuiet},
    Habit{"--no-warmup", "nothing is computed before the first prompt; drop it"},
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
