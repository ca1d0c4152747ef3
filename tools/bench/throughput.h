#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/common/session.h"

namespace kvlm {

/// The command line of `vlm-bench throughput`. At most one of kv_memory, memory and batches is
/// given.
struct ThroughputOptions {
  SessionOptions session;
  std::vector<std::string> specs = {"f16"};
  std::vector<std::string> kv_memory;  ///< sizes, of the cache alone
  std::vector<std::string> memory;     ///< sizes, of weights, workspaces and cache
  std::vector<int> batches;            ///< sequences
  int prompt_tokens = 0;               ///< visual rows, of one picture; 0: see prompt_tokens_of()
  int text_tokens = 32;                ///< text rows after them
  int tokens = 16;                     ///< timed steps of a repetition
  int repeats = 3;
  int answer_tokens = 0;  ///< of whole requests, whose prompts are timed too; 0: none are
  bool json = false;
  bool csv = false;
  bool dry_run = false;  ///< batches and bytes only; no weights are made
};

/// Decode at the largest batch that fits, for every spec and budget: tokens per second beside the
/// device's measured copy bandwidth. Prompts are random keys and values, given to the cache without
/// running the decoder; the timed steps run all of it. Prints a table, JSON or CSV on stdout; what
/// does not fit is a row with its reason. Returns the exit status, 1 if any row failed.
int run_throughput(const ThroughputOptions& options);

}  // namespace kvlm
