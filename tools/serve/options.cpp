#include "tools/serve/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/spec.h"
#include "runtime/spec_file.h"
#include "tools/common/device_list.h"
#include "tools/common/help.h"
#include "tools/common/program.h"
#include "tools/common/visual_options.h"
#include "tools/common/weight_options.h"

// The command line of vlm-serve: what is said of models, limits and keys is checked before anything
// is loaded.
namespace kvlm {

namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  vlm-serve -m pocket\n"
    "  vlm-serve -m Qwen/Qwen2.5-VL-3B-Instruct --kv kivi,residual=32 --kv-memory 8GB\n"
    "  vlm-serve -m pocket --alias plain=f16 --alias small=kivi\n"
    "  vlm-serve -m pocket --host 0.0.0.0 --api-key-file keys.txt\n\n";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

bool is_name(const std::string& text) {
  static const std::regex name("[A-Za-z0-9._-]{1,64}");
  return std::regex_match(text, name);
}

std::map<std::string, std::string> parse_aliases(const std::vector<std::string>& texts) {
  std::map<std::string, std::string> aliases;
  for (const std::string& text : texts) {
    const auto equals = text.find('=');
    const std::string name = text.substr(0, equals);
    if (equals == std::string::npos || !is_name(name)) {
      refuse(
          fmt::format("--alias is \"{}\"; expected NAME=SPEC, with 1 to 64 letters, digits and "
                      "._- in the name",
                      printable(text)));
    }
    if (!aliases.emplace(name, canonical(read_spec(text.substr(equals + 1)))).second) {
      refuse(fmt::format("--alias {} is given twice; give one of them", name));
    }
  }
  return aliases;
}

/// Lines "NAME KEY", or a key alone for everybody who has it.
std::map<std::string, std::string> read_keys(const std::string& path) {
  std::map<std::string, std::string> keys;
  if (path.empty()) {
    if (const auto key = environment("KVLM_API_KEY")) keys.emplace(*key, "key");
    return keys;
  }
  std::ifstream file(path);
  if (!file) {
    refuse(fmt::format("--api-key-file {} cannot be read; give a file of lines NAME KEY",
                       printable(path)));
  }
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream words(line);
    std::string name, key, rest;
    words >> name >> key >> rest;
    if (name.empty() || name.starts_with('#')) continue;
    if (key.empty() || !rest.empty() || !keys.emplace(key, name).second) {
      refuse(fmt::format("--api-key-file {} line {}: expected NAME KEY, each key once",
                         printable(path), number));
    }
  }
  if (keys.empty()) {
    refuse(fmt::format("--api-key-file {} has no key; write lines NAME KEY", printable(path)));
  }
  return keys;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

}  // namespace

std::optional<int> parse_serve_options(int argc, char** argv, ServeOptions& options) {
  CLI::App app{"vlm-serve: answers OpenAI chat completions about images and videos", "vlm-serve"};
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", version_line());
  app.footer(std::string(kExamples) + kStatusHelp);
  std::vector<std::string> aliases;
  std::string kv_memory, max_body = "64MiB", key_file, request_kv = "any", gpus;
  bool no_key = false;
  SessionOptions& session = options.session;
  app.add_option("-m,--model", session.model, "As vlm-run's -m")->capture_default_str();
  app.add_option("--kv", session.kv, "Cache policy of requests that name none, or @FILE.json")
      ->capture_default_str();
  app.add_option("--alias", aliases,
                 "NAME=SPEC: a further model name, with this cache policy; "
                 "repeatable");
  app.add_option("--kv-profile", session.kv_profile, "File that vlm-kv profile measured");
  app.add_option("--request-kv", request_kv,
                 "Cache policies that a request may name: any, or those of aliases")
      ->check(CLI::IsMember({"any", "aliases"}))
      ->capture_default_str();
  app.add_option("--name", options.name, "Name of the model for clients");
  app.add_option("--host", options.host, "Address to listen on")->capture_default_str();
  app.add_option("--port", options.port, "0: any that is free")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  app.add_option(
      "--kv-memory", kv_memory,
      "Bytes of cache on each device, such as 8GB; default: what is free on a GPU; on the "
      "CPU 8 full contexts, at most a quarter of the memory");
  app.add_option("--max-batch", options.most_running, "Sequences at once on each device")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--max-queue", options.most_waiting, "Requests that wait at most")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--max-prompt", options.max_prompt, "Tokens of a prompt at most")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--max-answer", options.max_answer, "Tokens of an answer at most")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--decode-share", options.decode_share,
                 "Share of the time that running answers get while prompts are read")
      ->check(CLI::Range(0.0, 0.95))
      ->capture_default_str();
  app.add_option("--media-root", options.media_root, "Folder that file: URLs may name files of");
  app.add_option("--api-key-file", key_file, "File of lines NAME KEY; or KVLM_API_KEY");
  app.add_flag("--no-key", no_key, "Serve other machines without keys");
  app.add_option("--max-body", max_body, "Bytes of a request at most")->capture_default_str();
  app.add_option("--max-images", options.max_images, "Images of a request at most")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--connections", options.connections, "Clients at once")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--drain", options.drain_s,
                 "Seconds that running answers have to finish after SIGTERM")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  app.add_flag("--log-json", options.log_json, "Log a JSON object for each request");
  app.add_flag("-q,--quiet", options.quiet, "Log no requests");
  add_sampling_options(app, options.frames);
  add_size_options(app, session);
  add_weight_options(app, session);
  add_lora_option(app, session);
  app.add_option("--image-backend", session.image_backend, "auto, torchvision or pil")
      ->capture_default_str();
  app.add_option("--image-aspect", session.image_aspect, "auto, crop, pad or anyres")
      ->capture_default_str();
  app.add_option("--dtype", session.dtype, "Type of weights and activations: auto, f32, f16, bf16")
      ->capture_default_str();
  app.add_option("--device", session.device, "auto, cpu, cuda[:N], or several: cuda:0,cuda:1")
      ->capture_default_str();
  app.add_option("--gpus", gpus, "Serve on the first N GPUs, or on all");
  app.add_option("-t,--threads", session.threads, "CPU threads; 0: one per core");
  refuse_single_hyphens(app, {argv, static_cast<size_t>(argc)});
  refuse_values_of_flags(app);
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    refuse(parse_failure(app, error));
  }
  if (const auto extras = app.remaining(); !extras.empty()) {
    refuse(unexpected_arguments(app, extras));
  }
  refuse_empty_values(app);
  check_sampling(options.frames);
  options.devices = device_list(session.device, gpus);
  if (!kv_memory.empty()) options.kv_memory = parse_bytes("--kv-memory", kv_memory);
  options.max_body = parse_bytes("--max-body", max_body);
  options.aliases = parse_aliases(aliases);
  options.any_kv = request_kv == "any";
  options.keys = read_keys(key_file);
  if (!options.name.empty() && !is_name(options.name)) {
    refuse(fmt::format("--name is \"{}\"; expected 1 to 64 letters, digits and ._-",
                       printable(options.name)));
  }
  if (options.name.empty()) {
    options.name = std::filesystem::path(session.model).lexically_normal().filename().string();
    for (char& letter : options.name) {
      if (!is_name(std::string(1, letter))) letter = '-';
    }
    options.name = options.name.empty() ? "model" : options.name.substr(0, 64);
  }
  if (options.aliases.contains(options.name)) {
    refuse(
        fmt::format("--alias {} is the name of the model; give it another --name", options.name));
  }
  if (!is_loopback(options.host) && options.keys.empty() && !no_key) {
    refuse(fmt::format("--host {} is open to others; give --api-key-file, or --no-key",
                       printable(options.host)));
  }
  return std::nullopt;
}

}  // namespace kvlm
