#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/session.h"
#include "vision/frame_sampling.h"

namespace kvlm {

/// The command line of vlm-serve.
struct ServeOptions {
  SessionOptions session;
  std::vector<std::string> devices;            ///< one or more; an engine each
  std::string name;                            ///< of the model; empty: the last part of its path
  std::map<std::string, std::string> aliases;  ///< name -> canonical spec
  std::string host = "127.0.0.1";
  int port = 8080;
  std::optional<size_t> kv_memory;
  int most_running = 64;
  int most_waiting = 1024;
  int max_prompt = 16384;
  int max_answer = 2048;
  double decode_share = 0.2;
  std::string media_root;
  std::map<std::string, std::string> keys;  ///< key -> name; empty: everybody is served
  size_t max_body = size_t{64} << 20;
  int max_images = 64;
  int connections = 256;
  bool any_kv = true;  ///< a request may name a policy of its own
  int drain_s = 30;
  SamplingRequest frames;
  bool log_json = false;
  bool quiet = false;
};

/// Reads the command line. The exit status if there is nothing more to do. Throws
/// Error{kInvalidArgument}.
std::optional<int> parse_serve_options(int argc, char** argv, ServeOptions& options);

}  // namespace kvlm
