#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/generator.h"
#include "tools/common/session.h"
#include "tools/run/shard.h"

namespace kvlm {

/// Name of standard output as --out.
inline constexpr const char* kStandardOutput = "-";

/// The command line of vlm-run.
struct RunOptions {
  SessionOptions session;
  std::vector<std::string> images;
  std::vector<std::string> videos;
  SamplingRequest sampling;  ///< of every video
  std::string prompt;        ///< as given, see read_prompt(); empty: the model's captioning prompt
  std::string system;        ///< likewise; empty: none
  bool chat = false;
  std::optional<int> max_tokens;
  std::optional<double> temperature;
  std::optional<int> top_k;
  std::optional<double> top_p;
  std::optional<double> repeat_penalty;
  uint64_t seed = 0;
  std::vector<std::string> stop;
  bool json = false;
  bool quiet = false;
  std::string batch_in;
  std::string batch_out;
  std::optional<int> batch_size;  ///< nothing: auto, see BatchRoom
  bool lean = false;
  std::vector<std::string> devices;    ///< of --gpus, or of a --device that names several
  std::vector<std::string> arguments;  ///< as typed, the program's name first
  bool dry = false;                    ///< plan only
  std::string save_weights;            ///< folder to write a rounded checkpoint to, or empty
  Shard shard;                         ///< of the batch
  bool shard_told = false;             ///< by the environment, not by --shard
  std::optional<size_t> kv_memory;
  std::vector<std::string> policy_files;  ///< made the policies in Python that --kv may name
};

/// Parses the command line. Returns the exit status if the program is done (--help, --version,
/// usage errors, reported here).
std::optional<int> parse_options(int argc, char** argv, RunOptions& options);

/// The text of -p or another `flag`: "-" is standard input, "@FILE" a file, both without the
/// newline at their end, and "@@TEXT" is "@TEXT". Throws Error{kCorruptFile} if it cannot be read,
/// is empty, or is no text.
std::string read_prompt(const std::string& given, const std::string& flag = "-p");

/// A request with everything but the conversation: sampling flags over the model's own defaults.
GenerationRequest base_request(const RunOptions& options, const Model& model);

/// The system message, if one was given.
std::vector<ChatMessage> opening(const RunOptions& options);

}  // namespace kvlm
