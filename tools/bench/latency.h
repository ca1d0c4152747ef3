#pragma once

#include <string>
#include <vector>

#include "tools/common/session.h"

namespace kvlm {

/// The last rows of a prompt are text; those before them are one picture's.
inline constexpr int kLatencyTextRows = 32;

/// The command line of `vlm-bench latency`.
struct LatencyOptions {
  SessionOptions session;
  std::vector<std::string> specs = {"f16"};
  int prompt_tokens = 640;
  int tokens = 32;
  int repeats = 5;
  bool json = false;
  bool csv = false;
};

/// One sequence: vision, prefill and decode, repeated and interleaved with the machine's measured
/// roof. Prints a table, JSON or CSV on stdout. Returns the exit status.
int run_latency(const LatencyOptions& options);

}  // namespace kvlm
