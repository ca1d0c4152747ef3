#include "tools/run/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <memory>
#include <span>
#include <string_view>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/base/queue.h"
#include "runtime/loading/plain_text.h"
#include "tools/common/device_list.h"
#include "tools/common/help.h"
#include "tools/common/input_text.h"
#include "tools/common/program.h"
#include "tools/common/visual_options.h"
#include "tools/common/weight_options.h"
#include "tools/run/list_form.h"
#include "tools/run/operands.h"
#include "tools/run/other_tools.h"

// The command line of vlm-run: CLI11's definitions, checks that need more than one option, and the
// request that the options alone make. A mistake is one sentence with a way out.
namespace kvlm {

namespace {

constexpr size_t kMaxPromptBytes = size_t{1} << 24;
constexpr const char* kExamples = R"(Examples:
  vlm-run a.png                        caption an image with the bundled model
  vlm-run -m llava-hf/llava-1.5-7b-hf --image a.png "What is this?"
  vlm-run --image a.png --chat         ask follow-up questions
  vlm-run -m MODEL --video a.mp4 --frames 8 -p "What happens?"
  vlm-run --image - -p @question.txt   image and question from other files
  vlm-run --image a.png --json         one JSON object with every figure
  vlm-run --batch FOLDER --out answers.jsonl -p "What is this?"
  vlm-run --batch in.jsonl --out out.jsonl --batch-size 8
  vlm-run --batch in.jsonl --out out.jsonl --shard 2/4   into out.2-of-4.jsonl
  vlm-run -m synthetic:llava-1.5-7b,layers=4 --image a.png

A line of in.jsonl; instead of image: images (a list), video or
videos; prompt may be left out:
  {"id": 1, "image": "a.png", "prompt": "What is this?"}
A line of out.jsonl, in the order in which answers finish:
  {"id": 1, "text": "a cat", "tokens": [...], ...} or {"id": 1, "error": "..."}
Run the same command again to resume a batch: finished records are skipped,
failed ones are tried again. Under srun, mpirun and in a Slurm array each
process takes one shard; --shard 1/1 turns sharding off. To merge shards, run
`cat out.*-of-4.jsonl >out.jsonl`; the same command without --shard then
processes what is missing.

)";

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

/// A flag or a subcommand of another tool that CLI11 would take apart or for a question.
void refuse_foreign_words(std::span<char* const> arguments) {
  if (arguments.empty()) return;
  const std::string_view command = advice_on_command(arguments.front());
  std::error_code unknown;
  if (!command.empty() && !std::filesystem::exists(arguments.front(), unknown)) {
    refuse(fmt::format("{} is not an argument of vlm-run: {}", arguments.front(), command));
  }
  for (const std::string_view word : arguments) {
    if (word == "--") return;
    const std::string_view name = word.substr(0, word.find('='));
    if (hides_a_short_option(name)) {
      refuse(
          fmt::format("{} is not an option of vlm-run: {}", name, advice_on_foreign_option(name)));
    }
  }
}

/// A text of the command line, as plain_text() reads a file.
std::string typed_text(const std::string& text, const std::string& name) {
  try {
    return plain_text(text, name);
  } catch (const Error& error) {
    refuse(error.what());
  }
}

/// The value of --batch-size; nothing for "auto".
std::optional<int> parse_batch_size(const std::string& text) {
  if (text == "auto") return std::nullopt;
  int size = 0;
  const char* end = text.data() + text.size();
  const auto [rest, code] = std::from_chars(text.data(), end, size);
  if (code != std::errc() || rest != end || size < 1 || size > 4096) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--batch-size is {}; expected 1 to 4096, or auto", printable(text)));
  }
  return size;
}

/// Takes what no option took: files and a question.
void take_operands(const CLI::App& app, RunOptions& options) {
  std::vector<std::string> rest = app.remaining();
  const auto mark = std::ranges::find(rest, "--");  // behind it nothing is an option
  const std::vector<std::string> before(rest.begin(), mark);
  const auto is_flag = [](const std::string& word) { return word.size() > 1 && word[0] == '-'; };
  const auto flag = std::ranges::find_if(before, is_flag);
  if (flag != before.end()) {
    const std::string name = flag->substr(0, flag->find('='));
    const std::string_view advice = advice_on_foreign_option(name);
    refuse(advice.empty() ? unexpected_arguments(app, before)
                          : fmt::format("{} is not an option of vlm-run: {}", name, advice));
  }
  if (mark != rest.end()) rest.erase(mark);
  if (rest.empty()) return;
  std::error_code unknown;
  if (!options.batch_in.empty() && std::filesystem::exists(rest.front(), unknown)) {
    refuse(fmt::format(
        "--batch takes one value, and {} is another one; quote a pattern, for example --batch "
        "'*.png', so that the shell does not expand it",
        printable(rest.front())));
  }
  Operands operands = read_operands(rest);
  std::ranges::move(operands.images, std::back_inserter(options.images));
  std::ranges::move(operands.videos, std::back_inserter(options.videos));
  if (operands.question.empty()) return;
  if (!options.prompt.empty()) {
    refuse(fmt::format("there are two questions, -p \"{}\" and \"{}\"; give one",
                       printable(options.prompt), printable(operands.question)));
  }
  options.prompt = std::move(operands.question);
}

/// The part of the batch that --shard names, or what started this process.
void take_shard(const std::string& given, RunOptions& options) {
  if (!given.empty()) {
    options.shard = parse_shard(given);
    if (options.batch_in.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "--shard needs a batch; give --batch in.jsonl --out out.jsonl");
    }
    return;
  }
  if (options.batch_in.empty()) return;
  options.shard = shard_of(&environment);
  options.shard_told = options.shard.count > 1;
  if (options.shard_told && options.batch_in == kStandardInput) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--batch - reads standard input, which not every process of {} may "
                            "get; give a file, or --shard I/N",
                            options.shard.count));
  }
}

/// The devices of --gpus, or of a list as --device.
void take_devices(const std::string& gpus, RunOptions& options) {
  options.devices = device_list(options.session.device, gpus);
  options.session.device = options.devices.front();
  if (options.devices.size() > 1 && (options.batch_in.empty() || options.dry)) {
    refuse("several devices answer a batch; give --batch in.jsonl --out out.jsonl, or one device");
  }
}

void check(const RunOptions& options) {
  const auto refuse_value = [&](const char* flag, auto value, const char* expected) {
    refuse(fmt::format("{} is {}; expected {}", flag, value, expected));
  };
  if (options.max_tokens && *options.max_tokens < 1) {
    refuse_value("--max-tokens", *options.max_tokens, "1 or more");
  }
  if (options.temperature && !(*options.temperature >= 0 && *options.temperature <= 1e3)) {
    refuse_value("--temp", *options.temperature, "0 (greedy) to 1000");
  }
  if (options.top_k && *options.top_k < 0) {
    refuse_value("--top-k", *options.top_k, "0 (all) or more");
  }
  if (options.top_p && !(*options.top_p > 0 && *options.top_p <= 1)) {
    refuse_value("--top-p", *options.top_p, "above 0 and at most 1");
  }
  if (options.repeat_penalty && !(*options.repeat_penalty > 0 && *options.repeat_penalty <= 1e3)) {
    refuse_value("--repeat-penalty", *options.repeat_penalty, "above 0 and at most 1000");
  }
  const bool greedy = options.temperature.value_or(0) == 0;
  if (greedy && (options.top_p || options.top_k.value_or(1) != 1 || options.seed != 0)) {
    refuse("--top-k, --top-p and --seed need a temperature above 0; add for example --temp 0.7");
  }
  if (!options.batch_in.empty() && options.json && !options.dry) {
    refuse("--batch writes JSON Lines to --out anyway; drop --json");
  }
  if (options.batch_in.empty() && (options.batch_size || options.lean)) {
    refuse(fmt::format("{} needs records; give --batch in.jsonl --out out.jsonl",
                       options.batch_size ? "--batch-size" : "--lean"));
  }
  const std::string& device =
      options.devices.empty() ? options.session.device : options.devices.front();
  if (options.session.memory && !options.dry && parse_device(device).kind == DeviceKind::kCpu) {
    refuse("--memory bounds what is used of a GPU; on the CPU add --dry-run, or give --kv-memory");
  }
  if (!options.save_weights.empty() &&
      (options.dry || options.chat || !options.batch_in.empty() || !options.prompt.empty() ||
       !options.images.empty() || !options.videos.empty())) {
    refuse("--save-weights writes a checkpoint and answers nothing; drop what is to be answered");
  }
  if (options.dry && options.chat) refuse("--chat has no --dry-run; drop one of them");
  if (options.batch_in.empty() != options.batch_out.empty() &&
      !(options.dry && options.batch_out.empty())) {
    refuse(
        "--batch and --out belong together; give both, for example --batch in.jsonl --out "
        "out.jsonl");
  }
  if (options.batch_out == kStandardOutput && options.shard.count > 1) {
    refuse("--out - is one stream, and --shard writes a file for each shard; give --out FILE");
  }
  if (options.batch_out == kStandardOutput && options.lean) {
    refuse("--lean writes what all answers share into OUT.run.json; give --out FILE");
  }
  std::error_code unknown;
  if (!options.batch_in.empty() && options.batch_in != kStandardInput &&
      (std::filesystem::equivalent(options.batch_in, options.batch_out, unknown) ||
       std::filesystem::equivalent(options.batch_in, shard_path(options.batch_out, options.shard),
                                   unknown))) {
    refuse(
        fmt::format("--batch and --out are the same file, {}; give the answers a file of their own",
                    options.batch_in));
  }
  if (!options.batch_in.empty() &&
      (options.chat || !options.images.empty() || !options.videos.empty())) {
    refuse(
        "--batch takes its images and videos from the records; drop --image, --video and --chat");
  }
  for (const std::string& text : options.stop) {
    typed_text(text, "--stop " + printable(text));
  }
  check_sampling(options.sampling);
  if ((options.sampling.fps || options.sampling.frames) && options.videos.empty() &&
      options.batch_in.empty() && !options.chat) {
    refuse(fmt::format("{} applies to videos, and there is none; add --video FILE or drop it",
                       options.sampling.fps ? "--fps" : "--frames"));
  }
  std::vector<const char*> readers;
  for (const std::string& image : options.images) {
    if (image == kStandardInput) readers.push_back("--image -");
  }
  if (options.prompt == kStandardInput) readers.push_back("-p -");
  if (options.system == kStandardInput) readers.push_back("--system -");
  if (!readers.empty() && options.devices.size() > 1) {
    refuse(fmt::format("{} reads standard input, which not every process of {} gets; give a file",
                       readers[0], options.devices.size()));
  }
  if (options.batch_in == kStandardInput) readers.push_back("--batch -");
  if (options.chat) readers.push_back("--chat");
  if (readers.size() > 1) {
    refuse(fmt::format(
        "standard input can be read once, but {} and {} both ask for it; give one of them a file",
        readers[0], readers[1]));
  }
  if (options.chat && options.json) refuse("--chat prints answers in a terminal; drop --json");
  if (!options.chat && options.batch_in.empty() && options.images.empty() &&
      options.videos.empty() && options.prompt.empty() && options.save_weights.empty()) {
    refuse(
        "nothing to do: give --image FILE, --video FILE, a question, or --batch IN.jsonl (see "
        "vlm-run --help)");
  }
}

}  // namespace

std::optional<int> parse_options(int argc, char** argv, RunOptions& options) {
  CLI::App app{
      "vlm-run: captions, answers and chat about images and videos with a vision-language model"};
  app.footer(std::string(kExamples) + kStatusHelp);
  app.name("vlm-run");
  app.allow_extras();
  app.formatter(std::make_shared<HelpFormatter>("[FILE...] [QUESTION]"));
  app.set_version_flag("--version", version_line());
  app.add_option(
         "-m,--model", options.session.model,
         "Checkpoint folder, org/name in the Hugging Face cache, pocket (pocket-llava), "
         "pocket-internvl or pocket-qwen (bundled), or synthetic:NAME[,layers=N] (random weights)")
      ->capture_default_str();
  app.add_option("--image", options.images, "Image file, or - for standard input; repeatable")
      ->allow_extra_args(false);
  app.add_option("--video", options.videos,
                 "Video file, animated GIF or WebP, or folder of frames; repeatable")
      ->allow_extra_args(false);
  add_sampling_options(app, options.sampling);
  app.add_option("-p,--prompt,--question", options.prompt,
                 "Question, also as the last argument; @FILE reads it from a file, - from standard "
                 "input, @@TEXT is the text "
                 "@TEXT; default: the model's captioning prompt");
  app.add_option("--system,--system-prompt,--system_prompt", options.system,
                 "System message, as a text, @FILE or - like the question");
  app.add_flag("--chat", options.chat, "Chat in the terminal; /help lists its commands");
  app.add_option(
      "-n,--max-tokens,--max-new-tokens,--max_new_tokens,--max_tokens,--n-predict,--predict",
      options.max_tokens, "Most tokens to generate; default: the checkpoint's choice, else 128");
  app.add_option("--temp,--temperature", options.temperature, "Sampling temperature; 0: greedy");
  app.add_option("--top-k,--top_k", options.top_k, "Sample among the k most likely tokens; 0: all");
  app.add_option("--top-p,--top_p", options.top_p,
                 "Sample among the most likely tokens whose probabilities sum to this");
  app.add_option("--repeat-penalty,--repetition-penalty,--repetition_penalty",
                 options.repeat_penalty, "Penalty on tokens that occurred before; 1: none");
  app.add_option("--seed", options.seed, "Seed of the sampler")
      ->capture_default_str()
      ->check([](const std::string& text) {
        uint64_t seed = 0;
        const char* end = text.data() + text.size();
        const auto [rest, code] = std::from_chars(text.data(), end, seed);
        return code == std::errc() && rest == end
                   ? std::string()
                   : fmt::format("{} is not an integer from 0 to 2^64 - 1", text);
      });
  app.add_option("--stop", options.stop, "Text that ends the answer; repeatable")
      ->allow_extra_args(false);
  app.add_option("--kv-profile", options.session.kv_profile,
                 "File that vlm-kv profile measured on this model");
  app.add_option("--kv", options.session.kv,
                 "Cache policy, for example kivi,bits=2 (see vlm-kv list), or @FILE.json")
      ->capture_default_str();
  app.add_option("--kv-memory", "Memory of the cache, for example 500MB; default: as needed")
      ->type_name("SIZE")
      ->each([&](const std::string& text) {
        options.kv_memory = options.session.cache_bytes = parse_bytes("--kv-memory", text);
      });
  app.add_option("--device", options.session.device,
                 "auto, cpu or cuda[:N]; of a batch several with commas, a process each")
      ->capture_default_str();
  std::string gpus;
  app.add_option("--gpus", gpus, "A batch on so many GPUs of this machine: a number, or all")
      ->type_name("N|all");
  app.add_option("-t,--threads", options.session.threads, "CPU threads; 0: one per core")
      ->capture_default_str();
  app.add_option("--dtype", options.session.dtype,
                 "Type of the weights: auto (as in the files), f32, f16 or bf16")
      ->capture_default_str();
  add_weight_options(app, options.session);
  add_lora_option(app, options.session);
  app.add_option("--save-weights", options.save_weights,
                 "Write the checkpoint as --weights and --lora make it, in compressed-tensors' "
                 "format, into a new folder, and answer nothing")
      ->type_name("FOLDER");
  app.add_option("--image-backend", options.session.image_backend,
                 "Library whose resize is reproduced bit for bit: auto (as the family's "
                 "reference), torchvision or pil")
      ->capture_default_str();
  app.add_option("--image-aspect", options.session.image_aspect,
                 "auto (the checkpoint's choice), crop, pad (to a square), or anyres (tiles, also "
                 "for each of several images; LLaVA-OneVision)")
      ->capture_default_str();
  add_size_options(app, options.session);
  app.add_flag("--json", options.json, "Print one JSON object on stdout");
  app.add_flag("-q,--quiet", options.quiet, "No summary and no progress on stderr");
  app.add_option(
      "--batch", options.batch_in,
      "Records: a JSON Lines file, - for standard input, a folder of images, or 'PATTERN'");
  app.add_option("--out", options.batch_out,
                 "JSON Lines file to which --batch appends answers, of one model, policy and set "
                 "of flags; or - for standard output, which cannot be resumed");
  app.add_option("--batch-size",
                 "Records at once: a number, or auto (as many as memory holds and gain speed)")
      ->type_name("N")
      ->default_str("auto")
      ->each([&](const std::string& text) { options.batch_size = parse_batch_size(text); });
  app.add_flag(
      "--dry-run", options.dry,
      "Only print what these images or records need in memory, and how many sequences fit");
  app.add_option(
         "--memory",
         "Memory of a GPU to use at most, or that --dry-run plans for; default: what is free")
      ->type_name("BYTES")
      ->each(
          [&](const std::string& text) { options.session.memory = parse_bytes("--memory", text); });
  app.add_flag("--lean", options.lean,
               "Write only id, text and finish_reason of an answer, and what all answers share "
               "once, into OUT.run.json");
  std::string shard;
  app.add_option("--shard", shard,
                 "Process shard I of N and write OUT.I-of-N.jsonl; default: from Slurm or Open "
                 "MPI; 1/1 turns sharding off")
      ->type_name("I/N");
  const std::span<char* const> arguments(argv, static_cast<size_t>(argc));
  const auto words = arguments.subspan(std::min<size_t>(1, arguments.size()));
  refuse_foreign_words(words);
  refuse_single_hyphens(app, words);
  refuse_values_of_flags(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    refuse(parse_failure(app, error));
  }
  options.arguments.assign(argv, argv + argc);
  refuse_empty_values(app);
  take_operands(app, options);
  take_devices(gpus, options);
  take_shard(shard, options);
  check(options);
  return std::nullopt;
}

std::string read_prompt(const std::string& given, const std::string& flag) {
  if (given.starts_with("@@")) return typed_text(given.substr(1), flag);
  if (given != kStandardInput && !given.starts_with('@')) return typed_text(given, flag);
  const std::string path = given == kStandardInput ? given : given.substr(1);
  const std::string name = flag + " " + printable(given);
  constexpr const char* kExpected = "a file with the text, or @@TEXT for a text that starts with @";
  const std::string bytes = read_input(path, kMaxPromptBytes, flag + " " + given, kExpected);
  std::string text;
  try {
    text = plain_text(bytes, name);
  } catch (const Error&) {
    const std::optional<BinaryFile> file = binary_file(bytes, path);
    if (!file) throw;
    using Kind = BinaryFile::Kind;
    const std::string cure = file->kind == Kind::kImage   ? "give --image " + printable(path)
                             : file->kind == Kind::kVideo ? "give --video " + printable(path)
                             : file->kind == Kind::kCompressed
                                 ? fmt::format("give {} - what {} prints of it", flag, file->reader)
                                 : std::string("give ") + kExpected;
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} is {}, not a text; {}", name, file->what, cure));
  }
  if (text.ends_with('\n')) text.pop_back();
  if (text.empty() && !interrupted()) {
    throw Error(ErrorCode::kCorruptFile, fmt::format("{} is empty; give {}", name, kExpected));
  }
  return text;
}

GenerationRequest base_request(const RunOptions& options, const Model& model) {
  GenerationRequest request;
  request.sampling = model.defaults().sampling;
  request.sampling.temperature = options.temperature.value_or(0);
  if (options.top_k) request.sampling.top_k = *options.top_k;
  if (options.top_p) request.sampling.top_p = *options.top_p;
  if (options.repeat_penalty) request.sampling.repetition_penalty = *options.repeat_penalty;
  request.sampling.seed = options.seed;
  request.max_tokens = options.max_tokens.value_or(model.defaults().max_tokens);
  request.stop = options.stop;
  return request;
}

std::vector<ChatMessage> opening(const RunOptions& options) {
  if (options.system.empty()) return {};
  return {{"system", {{ContentItem::Kind::kText, options.system}}}};
}

}  // namespace kvlm
