#pragma once

#include <string>
#include <vector>

#include "kvcache/plan/sequence_bounds.h"
#include "tools/bench/throughput.h"

namespace kvlm {

/// Steps before the timed ones: until steps that are alike have been recorded.
inline constexpr int kWarmUpSteps = 12;

/// How a batch is chosen.
struct Budget {
  enum class Kind { kBatch, kCache, kDevice };
  Kind kind;
  std::string text;  ///< as on the command line
  size_t size;       ///< sequences, or bytes
};

/// Device memory beside weights and cache.
struct Workspaces {
  size_t fixed = 0;
  size_t per_sequence = 0;
};

/// Without any, a batch of 8. Throws Error{kInvalidArgument} if several kinds are given.
std::vector<Budget> parse_budgets(const ThroughputOptions& options);

/// The visual rows of a prompt: those asked for, else 3328 (13 tiles of InternVL), or as many as a
/// context of so many positions leaves beside text and steps, at least one.
int prompt_tokens_of(const ThroughputOptions& options, int context);

/// Rows of a sequence: of its prompt, and after the last step.
SequenceSize sequence_size(const ThroughputOptions& options);

/// Throws Error{kInvalidArgument} if a sequence has more rows than the model has positions.
void check_context(const ThroughputOptions& options, int context);

/// Sequences of `rows` rows that fit, at least one, beside weights and workspaces (of a kDevice
/// budget). Prompts are read one after the other, so that what one needs more meanwhile is counted
/// once. Throws Error{kOutOfMemory} if there is no room for one.
int batch_of(const Budget& budget, int rows, const Reservation& each, size_t weight_bytes = 0,
             const Workspaces& workspaces = {});

/// --dry-run: the batch and the bytes of every spec and budget, from the model's configuration
/// alone; --memory holds its weights and a bound of its workspaces too. Returns the exit status, 1
/// if anything does not fit.
int plan_throughput(const ThroughputOptions& options);

}  // namespace kvlm
