#include "tools/bench/throughput_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/spec_file.h"
#include "tools/common/csv.h"
#include "tools/common/model_shape.h"
#include "tools/common/program.h"

// `vlm-bench throughput --dry-run`: how many sequences of each spec fit into a budget, from the
// closed formulas alone; nothing runs.
namespace kvlm {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

int64_t steps_of(const ThroughputOptions& options) {
  return kWarmUpSteps + int64_t{options.tokens} * options.repeats;
}

/// What a device holds apart from the cache.
struct NotCache {
  size_t weights = 0;
  Workspaces workspaces;
};

/// What a run takes at most, where it would measure its workspaces.
NotCache bound(const SessionOptions& options, const SequenceSize& size) {
  // What a process has on a GPU before it asks for anything, kernels that are loaded when they are
  // first launched, and libraries' own buffers.
  constexpr size_t kOfTheDriver = size_t{7} << 28;
  SessionOptions dry = options;
  dry.dry = true;
  Session session(dry);
  Decoder& decoder = session.model().decoder();
  const CacheShape shape = decoder.cache_shape();
  // Of a prompt's random keys, values, queries and embeddings.
  const int row = (2 * shape.kv_heads + shape.q_heads) * shape.head_dim + decoder.hidden();
  const size_t random =
      sizeof(float) * static_cast<size_t>(size.prompt_rows) * static_cast<size_t>(row);
  // What kernels look slots up in: up to two numbers for each token of each KV head and layer.
  const size_t tables = 2 * sizeof(int32_t) * static_cast<size_t>(size.max_rows) *
                        static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.layers);
  return {session.weight_bytes(),
          {kOfTheDriver + random + decoder.workspace_bytes(size.prompt_rows),
           decoder.workspace_bytes(1) + tables}};
}

/// One line of --dry-run.
struct PlannedRow {
  std::string spec;
  std::string budget;
  std::string error;  ///< why there is no batch, or empty
  Reservation each;
  int batch = 0;

  size_t reserved() const { return static_cast<size_t>(batch) * each.kept + each.staging; }
};

/// The rows of one spec, in the order of the budgets.
std::vector<PlannedRow> planned(const std::string& text, const std::vector<Budget>& budgets,
                                const CacheShape& shape, const SequenceSize& size,
                                const NotCache& other) {
  const CacheSpec spec = read_spec(text);
  Reservation each;
  std::string refusal;
  try {
    each = reservation(*plan_cache(spec, shape), size);
  } catch (const Error& error) {
    refusal = error.what();
  }
  std::vector<PlannedRow> rows;
  for (const Budget& budget : budgets) {
    PlannedRow& row = rows.emplace_back();
    row = {canonical(spec), budget.text, refusal, each, 0};
    if (!refusal.empty()) continue;
    try {
      row.batch = batch_of(budget, size.max_rows, each, other.weights, other.workspaces);
    } catch (const Error& error) {
      row.error = error.what();
    }
  }
  return rows;
}  // namespace

void print_table(const std::vector<PlannedRow>& rows, const ThroughputOptions& options,
                 const SequenceSize& size, const NotCache& other) {
  fmt::print(
      "{}: cache of prompts of {} visual and {} text tokens, {} tokens after the last "
      "step\nreserved: batch x sequence, plus staging once, during a prefill\n",
      options.session.model, options.prompt_tokens, options.text_tokens, size.max_rows);
  if (other.weights > 0) {
    fmt::print(
        "apart from the cache: {} of weights, and at most {} of workspaces and {} a sequence\n",
        human_bytes(other.weights), human_bytes(other.workspaces.fixed),
        human_bytes(other.workspaces.per_sequence));
  }
  size_t width = 4;
  for (const PlannedRow& row : rows) width = std::max(width, row.spec.size());
  fmt::print("{:<{}} {:>8} {:>7} {:>12} {:>12} {:>12}\n", "spec", width, "budget", "batch",
             "sequence", "staging", "reserved");
  for (const PlannedRow& row : rows) {
    if (!row.error.empty()) {
      fmt::print("{:<{}} {:>8} error: {}\n", row.spec, width, row.budget, row.error);
      continue;
    }
    fmt::print("{:<{}} {:>8} {:>7} {:>12} {:>12} {:>12}\n", row.spec, width, row.budget, row.batch,
               human_bytes(row.each.kept), human_bytes(row.each.staging),
               human_bytes(row.reserved()));
  }
}

void print_json(const PlannedRow& row, const ThroughputOptions& options, const SequenceSize& size,
                const NotCache& other) {
  nlohmann::ordered_json json{{"model", options.session.model},
                              {"prompt_tokens", options.prompt_tokens},
                              {"text_tokens", options.text_tokens},
                              {"rows", size.max_rows},
                              {"spec", row.spec},
                              {"budget", row.budget}};
  if (other.weights > 0) {
    json.update({{"weights_bytes", other.weights},
                 {"workspace_bytes", other.workspaces.fixed},
                 {"workspace_bytes_per_sequence", other.workspaces.per_sequence}});
  }
  if (!row.error.empty()) {
    json["error"] = row.error;
  } else {
    json.update({{"batch", row.batch},
                 {"sequence_bytes", row.each.kept},
                 {"staging_bytes", row.each.staging},
                 {"reserved_bytes", row.reserved()}});
  }
  json["version"] = version_line();
  fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void print_csv(const std::vector<PlannedRow>& rows) {
  fmt::print("spec,budget,batch,sequence_bytes,staging_bytes,reserved_bytes,error\n");
  for (const PlannedRow& row : rows) {
    if (!row.error.empty()) {
      fmt::print("{},{},,,,,{}\n", csv_field(row.spec), row.budget, csv_field(row.error));
    } else {
      fmt::print("{},{},{},{},{},{},\n", csv_field(row.spec), row.budget, row.batch, row.each.kept,
                 row.each.staging, row.reserved());
    }
  }
}

}  // namespace

std::vector<Budget> parse_budgets(const ThroughputOptions& options) {
  const int kinds = (options.kv_memory.empty() ? 0 : 1) + (options.memory.empty() ? 0 : 1) +
                    (options.batches.empty() ? 0 : 1);
  if (kinds > 1) {
    refuse(
        "vlm-bench throughput got several of --kv-memory, --memory and --batch; give one of them");
  }
  if (kinds == 0) return {{Budget::Kind::kBatch, "8", 8}};
  std::vector<Budget> budgets;
  for (const std::string& text : options.kv_memory) {
    budgets.push_back({Budget::Kind::kCache, text, parse_bytes("--kv-memory", text)});
  }
  for (const std::string& text : options.memory) {
    budgets.push_back({Budget::Kind::kDevice, text, parse_bytes("--memory", text)});
  }
  for (const int batch : options.batches) {
    budgets.push_back({Budget::Kind::kBatch, fmt::format("{}", batch), static_cast<size_t>(batch)});
  }
  return budgets;
}

int prompt_tokens_of(const ThroughputOptions& options, int context) {
  constexpr int64_t kPromptTokens = 3328;
  if (options.prompt_tokens > 0) return options.prompt_tokens;
  const int64_t left = context - options.text_tokens - steps_of(options);
  return static_cast<int>(std::clamp<int64_t>(left, 1, kPromptTokens));
}

SequenceSize sequence_size(const ThroughputOptions& options) {
  const int64_t rows = int64_t{options.prompt_tokens} + options.text_tokens + steps_of(options);
  SequenceSize size;
  size.visual_rows = options.prompt_tokens;
  size.prompt_rows = options.prompt_tokens + options.text_tokens;
  size.max_rows = static_cast<int>(std::min<int64_t>(rows, INT32_MAX));
  return size;
}

void check_context(const ThroughputOptions& options, int context) {
  const int rows = sequence_size(options).max_rows;
  if (rows <= context) return;
  refuse(
      fmt::format("--prompt-tokens {}, --text-tokens {} and {} + {} x {} steps make {} tokens, "
                  "more than the context of {}; use fewer",
                  options.prompt_tokens, options.text_tokens, kWarmUpSteps, options.tokens,
                  options.repeats, rows, context));
}

int batch_of(const Budget& budget, int rows, const Reservation& each, size_t weight_bytes,
             const Workspaces& workspaces) {
  if (budget.kind == Budget::Kind::kBatch) return static_cast<int>(budget.size);
  size_t taken = each.staging;
  size_t per_sequence = each.kept;
  std::string other;
  if (budget.kind == Budget::Kind::kDevice) {
    taken += weight_bytes + workspaces.fixed;
    per_sequence += workspaces.per_sequence;
    other = fmt::format(" with {} of weights and {} of workspaces", human_bytes(weight_bytes),
                        human_bytes(workspaces.fixed));
  }
  if (budget.size < taken + per_sequence) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("{} does not hold one sequence of {} tokens{}: it takes {}, and {} "
                            "more during its prefill; give more memory or a shorter prompt",
                            budget.text, rows, other, human_bytes(per_sequence),
                            human_bytes(each.staging)));
  }
  return static_cast<int>(std::min<size_t>((budget.size - taken) / per_sequence, INT32_MAX));
}

int plan_throughput(const ThroughputOptions& asked) {
  ThroughputOptions options = asked;
  // Of a model that is not loaded no context is known.
  options.prompt_tokens = prompt_tokens_of(asked, INT32_MAX);
  const std::vector<Budget> budgets = parse_budgets(options);
  const CacheShape shape = model_shape(options.session.model);
  const SequenceSize size = sequence_size(options);
  const NotCache other = options.memory.empty() ? NotCache{} : bound(options.session, size);
  std::vector<PlannedRow> rows;
  for (const std::string& spec : options.specs) {
    std::ranges::move(planned(spec, budgets, shape, size, other), std::back_inserter(rows));
  }
  if (options.json) {
    for (const PlannedRow& row : rows) print_json(row, options, size, other);
  } else if (options.csv) {
    print_csv(rows);
  } else {
    print_table(rows, options, size, other);
  }
  const bool all =
      std::all_of(rows.begin(), rows.end(), [](const auto& row) { return row.error.empty(); });
  return all ? 0 : kExitFailed;
}

}  // namespace kvlm
