#include "tools/bench/throughput.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "kernels/base/queue.h"
#include "kernels/fill.h"
#include "kernels/roofline.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/spec_file.h"
#include "tools/bench/statistics.h"
#include "tools/bench/throughput_plan.h"
#include "tools/common/csv.h"
#include "tools/common/memory.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"

// `vlm-bench throughput`: how many tokens a second a cache policy gives when it fills a memory
// budget with sequences. For each spec and budget it finds how many sequences fit beside weights
// and workspaces, gives their caches random keys and values for prompts, times decode steps of the
// whole decoder, and prints the rate beside the measured bandwidth of a copy. throughput_plan.cpp
// says the same without running anything (--dry-run).
namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr size_t kReadBytes = size_t{512} << 20;  // past every cache that a CPU has
constexpr size_t kGpuReadBytes = size_t{4} << 30;
constexpr int kReadPasses = 4;
constexpr size_t kTrialSequences = 32;  // by which a second trial is larger than the first

/// One line of the report.
struct Row {
  std::string spec;
  std::string budget;
  std::string error;  ///< why there is nothing else, or empty
  Reservation reservation;
  int batch = 0;
  double fill_s = 0;  ///< of the batch's prompts
  double stored_bits = 0;
  size_t kv_bytes = 0;      ///< of the batch, after the last step
  size_t weight_bytes = 0;  ///< that a step reads
  size_t used_bytes = 0;    ///< of the device, by its own report; 0 on the CPU
  nlohmann::ordered_json memory;
  double read_rate = 0;             ///< bytes per second
  Spread step_ms, host_ms;          ///< until the step was done; until the host had queued it
  std::optional<Spread> prompt_ms;  ///< of one prompt through the whole decoder
  int answer_tokens = 0;

  /// Whole requests: all prompts, one after the other, then the steps of all answers (CalibQuant,
  /// tables 5 to 8, "overall").
  double requests_per_s() const {
    return 1000 * batch / (batch * prompt_ms->median + answer_tokens * step_ms.median);
  }
  double tokens_per_s() const { return 1000 * batch / step_ms.median; }
  double bytes_per_s() const {
    return 1000 * static_cast<double>(kv_bytes + weight_bytes) / step_ms.median;
  }
  double kv_percent() const {
    return 100 * static_cast<double>(kv_bytes) / static_cast<double>(kv_bytes + weight_bytes);
  }
  double roof_percent() const { return 100 * bytes_per_s() / read_rate; }
};

/// A cache with its sequences.
struct Filled {
  std::unique_ptr<KvCache> cache;
  std::vector<SequenceId> ids;
  size_t arena_bytes = 0;
};

using SharedPlan = std::shared_ptr<const CachePlan>;

class ThroughputBench {
 public:
  ThroughputBench(const ThroughputOptions& options, std::vector<Budget> budgets, Session& session,
                  TerminalWatch& watch)
      : options_(options),
        budgets_(std::move(budgets)),
        session_(session),
        watch_(watch),
        decoder_(session.model().decoder()),
        shape_(decoder_.cache_shape()),
        size_(sequence_size(options)) {
    modality_.assign(static_cast<size_t>(size_.prompt_rows), kTextRow);
    std::fill_n(modality_.begin(), options.prompt_tokens, int16_t{0});
    const Device device = session.device();
    const Shape kv{size_.prompt_rows, shape_.kv_heads, shape_.head_dim};
    keys_ = Tensor(DType::kF32, kv, device);
    values_ = Tensor(DType::kF32, kv, device);
  }

  /// The rows of one spec, in the order of the budgets; fewer when interrupted.
  std::vector<Row> run(const std::string& text);

 private:
  bool on_gpu() const { return session_.device().kind == DeviceKind::kCuda; }
  size_t used_bytes() const;
  double read_rate();
  int batch_for(const Budget& budget, const SharedPlan& plan, const Reservation& each);
  Workspaces workspaces(const SharedPlan& plan, const Reservation& each);
  size_t trial(const SharedPlan& plan, const Reservation& each, int batch);
  Filled fill(const SharedPlan& plan, const Reservation& each, int batch);
  void fill_one(KvCache& cache, SequenceId id);
  double step(Filled& filled, int batch);
  double prompt(Filled& filled);
  std::optional<Spread> prompts(Filled& filled);
  void measure(const SharedPlan& plan, Row& row);

  const ThroughputOptions& options_;
  std::vector<Budget> budgets_;
  Session& session_;
  TerminalWatch& watch_;
  Decoder& decoder_;
  CacheShape shape_;
  SequenceSize size_;
  std::vector<int16_t> modality_;
  Tensor keys_, values_;                  // (prompt_rows, kv_heads, head_dim)
  Tensor queries_;                        // (prompt_rows, q_heads, head_dim), if a cache wants them
  Tensor prompt_embeddings_;              // (prompt_rows, hidden), likewise
  Tensor embeddings_;                     // (largest batch, hidden)
  std::optional<Workspaces> workspaces_;  // of the spec that runs
  std::optional<Workspaces> first_workspaces_;  // of the first spec
  std::optional<double> read_rate_;
  uint64_t seed_ = 0;
};

size_t ThroughputBench::used_bytes() const {
  if (!on_gpu()) return 0;
  const cuda::DeviceFacts facts = cuda::device_facts(session_.device().index);
  return facts.total_bytes - facts.free_bytes;
}

/// Measured before the first cache is made; its memory is given back.
double ThroughputBench::read_rate() {
  if (read_rate_) return *read_rate_;
  Buffer probe(session_.device(), on_gpu() ? kGpuReadBytes : kReadBytes);
  if (!on_gpu()) std::fill_n(probe.data(), probe.bytes(), std::byte{1});
  std::vector<double> rates;
  for (int i = 0; i < 2 * kReadPasses; ++i) {  // the first half wakes the device
    const double rate = measure_memory_rate({probe.data(), probe.bytes()}, session_.stream());
    if (i >= kReadPasses) rates.push_back(rate);
  }
  read_rate_ = spread_of(rates).median;
  return *read_rate_;
}

int ThroughputBench::batch_for(const Budget& budget, const SharedPlan& plan,
                               const Reservation& each) {
  if (budget.kind != Budget::Kind::kDevice) return batch_of(budget, size_.max_rows, each);
  if (!workspaces_) workspaces_ = workspaces(plan, each);
  return batch_of(budget, size_.max_rows, each, session_.model().weight_bytes(), *workspaces_);
}

/// Two trials tell what grows with the batch. The decoder's part grows in the first spec's only,
/// and is counted for every other too.
Workspaces ThroughputBench::workspaces(const SharedPlan& plan, const Reservation& each) {
  const size_t free = cuda::device_facts(session_.device().index).free_bytes;
  const size_t added = std::clamp<size_t>(free / 2 / each.kept, 1, kTrialSequences);
  const size_t one = trial(plan, each, 1);
  const size_t more = std::max(one, trial(plan, each, 1 + static_cast<int>(added)));
  Workspaces spaces;
  spaces.per_sequence = (more - one) / added;
  spaces.fixed = one - std::min(one, spaces.per_sequence);
  if (first_workspaces_) spaces.per_sequence += first_workspaces_->per_sequence;
  if (!first_workspaces_) first_workspaces_ = spaces;
  return spaces;
}

/// Bytes that the device has in use beside weights and cache, after a step of `batch` sequences.
size_t ThroughputBench::trial(const SharedPlan& plan, const Reservation& each, int batch) {
  Filled filled = fill(plan, each, batch);
  if (filled.ids.empty()) return 0;  // interrupted
  // Steps that are alike are recorded, which takes memory too.
  for (int i = 0; i < kWarmUpSteps; ++i) {
    step(filled, static_cast<int>(filled.ids.size()));
  }
  const size_t known = session_.model().weight_bytes() + filled.arena_bytes;
  return used_bytes() - std::min(used_bytes(), known);
}

Filled ThroughputBench::fill(const SharedPlan& plan, const Reservation& each, int batch) {
  Filled filled;
  filled.arena_bytes = static_cast<size_t>(batch) * each.kept + each.staging;
  filled.cache = make_cache(plan, filled.arena_bytes, session_.device());
  for (int i = 0; i < batch && !interrupted(); ++i) {
    watch_.progress("prompts", static_cast<size_t>(i), static_cast<size_t>(batch));
    filled.ids.push_back(filled.cache->open(size_, fmt::format("sequence {} of {}", i + 1, batch)));
    fill_one(*filled.cache, filled.ids.back());
  }
  session_.stream().synchronize();
  watch_.clear();
  return filled;
}

/// One prompt of random numbers, layer by layer.
void ThroughputBench::fill_one(KvCache& cache, SequenceId id) {
  Stream& stream = session_.stream();
  const auto random = [&](Tensor& tensor, const Shape& shape) {
    if (tensor.empty()) tensor = Tensor(DType::kF32, shape, session_.device());
    fill_random(tensor, ++seed_, 1, stream);
    return tensor.view();
  };
  const StepRows rows{id, size_.prompt_rows, true, true, modality_};
  const CacheNeeds needs = cache.needs();
  cache.begin({&rows, 1}, stream);
  if (needs.prompt_embeddings) {
    cache.give_embeddings(random(prompt_embeddings_, {size_.prompt_rows, decoder_.hidden()}),
                          stream);
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    TensorView q;
    if (needs.prompt_queries) {
      q = random(queries_, {size_.prompt_rows, shape_.q_heads, shape_.head_dim});
    }
    const TensorView k = random(keys_, keys_.shape());
    const TensorView v = random(values_, values_.shape());
    cache.attend(layer, q, k, v, q, 0.125f, stream);
  }
  cache.end(stream);
}

/// One token more for each of the first `batch` sequences. Returns the seconds that the host needed
/// to queue it; the device may still be at work.
double ThroughputBench::step(Filled& filled, int batch) {
  const auto count = static_cast<size_t>(batch);
  if (embeddings_.empty() || embeddings_.shape()[0] < batch) {
    embeddings_ = Tensor(DType::kF32, {batch, decoder_.hidden()}, session_.device());
  }
  std::vector<Position> positions(count);
  std::vector<StepRows> rows;
  for (size_t i = 0; i < count; ++i) {
    positions[i] = Position::on_every_axis(filled.cache->next_position(filled.ids[i]));
    rows.push_back({filled.ids[i], 1, false, false, {}});
  }
  const TensorView x = embeddings_.view().slice(0, batch);
  fill_random(x, ++seed_, 1, session_.stream());
  session_.stream().synchronize();
  const Clock::time_point start = Clock::now();
  decoder_.forward({rows, positions, x}, *filled.cache, session_.stream(), {});
  return seconds_since(start);
}

/// The seconds that a prompt takes through the whole decoder, in the place of the last sequence.
double ThroughputBench::prompt(Filled& filled) {
  Stream& stream = session_.stream();
  filled.cache->close(filled.ids.back());
  filled.ids.back() = filled.cache->open(size_, "a timed prompt");
  if (prompt_embeddings_.empty()) {
    prompt_embeddings_ =
        Tensor(DType::kF32, {size_.prompt_rows, decoder_.hidden()}, session_.device());
  }
  fill_random(prompt_embeddings_, ++seed_, 1, stream);
  std::vector<Position> positions;
  for (int i = 0; i < size_.prompt_rows; ++i) positions.push_back(Position::on_every_axis(i));
  const StepRows rows{filled.ids.back(), size_.prompt_rows, true, true, modality_};
  stream.synchronize();
  const Clock::time_point start = Clock::now();
  decoder_.forward({{&rows, 1}, positions, prompt_embeddings_}, *filled.cache, stream, {});
  stream.synchronize();
  return seconds_since(start);
}

/// Times prompts, the first of which warms up.
std::optional<Spread> ThroughputBench::prompts(Filled& filled) {
  if (options_.answer_tokens == 0) return std::nullopt;
  std::vector<double> milliseconds;
  for (int i = 0; i <= options_.repeats && !interrupted(); ++i) {
    watch_.progress("timed prompts", static_cast<size_t>(i),
                    static_cast<size_t>(options_.repeats) + 1);
    const double seconds = prompt(filled);
    if (i > 0) milliseconds.push_back(1000 * seconds);
  }
  watch_.clear();
  if (milliseconds.empty()) return std::nullopt;
  return spread_of(milliseconds);
}

/// Fills a cache with the batch of `row` and decodes; leaves `row` without bytes when interrupted.
void ThroughputBench::measure(const SharedPlan& plan, Row& row) {
  Stream& stream = session_.stream();
  const Clock::time_point fill_start = Clock::now();
  Filled filled = fill(plan, row.reservation, row.batch);
  row.fill_s = seconds_since(fill_start);
  if (interrupted()) return;
  for (int i = 0; i < kWarmUpSteps; ++i) {
    step(filled, row.batch);
    stream.synchronize();
  }
  std::vector<double> step_ms;
  std::vector<double> host_ms;
  const int steps = options_.tokens * options_.repeats;
  for (int i = 0; i < steps && !interrupted(); ++i) {
    watch_.progress("steps", static_cast<size_t>(i), static_cast<size_t>(steps));
    const double host_s = step(filled, row.batch);
    const Clock::time_point start = Clock::now();
    stream.synchronize();
    step_ms.push_back(1000 * (host_s + seconds_since(start)));
    host_ms.push_back(1000 * host_s);
  }
  watch_.clear();
  if (step_ms.empty()) return;
  row.step_ms = spread_of(step_ms);
  row.host_ms = spread_of(host_ms);
  row.weight_bytes = decoder_.step_weight_bytes();
  for (int i = 0; i < row.batch; ++i) {
    row.kv_bytes += filled.cache->report(filled.ids[static_cast<size_t>(i)]).bytes;
  }
  row.stored_bits = filled.cache->report(filled.ids.front()).stored_bits;
  row.used_bytes = used_bytes();
  row.memory = memory_json(session_.device(), session_.model());
  row.answer_tokens = options_.answer_tokens;
  row.prompt_ms = prompts(filled);
}

std::vector<Row> ThroughputBench::run(const std::string& text) {
  const CacheSpec spec = read_spec(text);
  SharedPlan plan;
  workspaces_.reset();
  std::vector<Row> rows;
  int largest = 0;  // batch so far: what it took of the device beside the cache stays taken
  for (const Budget& budget : budgets_) {
    if (interrupted()) break;
    Row row;
    row.spec = text;
    row.budget = budget.text;
    try {
      if (plan == nullptr) plan = plan_cache(spec, shape_);
      row.reservation = reservation(*plan, size_);
      row.read_rate = read_rate();
      row.batch = batch_for(budget, plan, row.reservation);
      largest = std::max(largest, row.batch);
      measure(plan, row);
      if (budget.kind == Budget::Kind::kDevice && row.batch == largest &&
          row.used_bytes > budget.size) {
        row.error = fmt::format(
            "{}: a batch of {} used {} bytes of the device, more than planned for; give {} by "
            "--batch instead",
            row.budget, row.batch, row.used_bytes, row.batch - 1);
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) throw;
      if (error.code() == ErrorCode::kCancelled) break;
      row.error = error.what();
    }
    if (!row.error.empty() || row.kv_bytes > 0) rows.push_back(std::move(row));
  }
  return rows;
}

void print_table_head(const ThroughputOptions& options, Session& session) {
  fmt::print(
      "{} on {}, {} threads: {} of weights; prompts of {} visual and {} text tokens (random keys "
      "and values)\n{} warm-up and {} timed steps a row; median (min to max); copy: measured "
      "memory bandwidth\n",
      printable(session.model().name()), device_name(session.device()), session.threads(),
      human_bytes(session.model().weight_bytes()), options.prompt_tokens, options.text_tokens,
      kWarmUpSteps, options.tokens * options.repeats);
  fmt::print(
      "{:<34} {:>8} {:>6} {:>12} {:>6} {:>10} {:>8} {:>9} {:<19} {:>8} {:>9} {:>6} {:>8} {:>6}\n",
      "spec", "budget", "bits", "B/sequence", "batch", "KV", "fill s", "step ms", "", "host ms",
      "tokens/s", "KV %", "GB/s", "copy %");
}

void print_row(const Row& row) {
  if (!row.error.empty()) {
    fmt::print("{:<34} {:>8} error: {}\n", row.spec, row.budget, row.error);
    return;
  }
  const std::string range = fmt::format("({:.2f} to {:.2f})", row.step_ms.min, row.step_ms.max);
  fmt::print(
      "{:<34} {:>8} {:>6.2f} {:>12} {:>6} {:>10} {:>8.2f} {:>9.2f} {:<19} {:>8.2f} {:>9.1f} "
      "{:>6.1f} "
      "{:>8.1f} {:>6.1f}\n",
      row.spec, row.budget, row.stored_bits, row.reservation.kept, row.batch,
      human_bytes(row.kv_bytes), row.fill_s, row.step_ms.median, range, row.host_ms.median,
      row.tokens_per_s(), row.kv_percent(), row.bytes_per_s() / 1e9, row.roof_percent());
  if (!row.prompt_ms) return;
  fmt::print("{:<34} {:>8} prompt {:.2f} ms ({:.2f} to {:.2f}), {:.3f} requests/s of {} tokens\n",
             "", "", row.prompt_ms->median, row.prompt_ms->min, row.prompt_ms->max,
             row.requests_per_s(), row.answer_tokens);
}

nlohmann::ordered_json to_json(const Spread& spread) {
  return {{"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
}

nlohmann::ordered_json to_json(const Row& row, const ThroughputOptions& options, Session& session) {
  nlohmann::ordered_json json{{"model", session.model().name()},
                              {"device", device_name(session.device())},
                              {"threads", session.threads()},
                              {"prompt_tokens", options.prompt_tokens},
                              {"text_tokens", options.text_tokens},
                              {"spec", row.spec},
                              {"budget", row.budget},
                              {"sequence_bytes", row.reservation.kept},
                              {"staging_bytes", row.reservation.staging}};
  if (!row.error.empty()) {
    json["error"] = row.error;
  } else {
    json.update({{"batch", row.batch},
                 {"stored_bits", row.stored_bits},
                 {"kv_bytes", row.kv_bytes},
                 {"step_weight_bytes", row.weight_bytes},
                 {"device_used_bytes", row.used_bytes},
                 {"fill_s", row.fill_s},
                 {"step_ms", to_json(row.step_ms)},
                 {"host_ms", to_json(row.host_ms)},
                 {"tokens_per_s", row.tokens_per_s()},
                 {"kv_percent", row.kv_percent()},
                 {"bytes_per_s", row.bytes_per_s()},
                 {"copy_bytes_per_s", row.read_rate},
                 {"copy_percent", row.roof_percent()},
                 {"memory", row.memory}});
    if (row.prompt_ms) {
      json.update({{"prompt_ms", to_json(*row.prompt_ms)},
                   {"answer_tokens", row.answer_tokens},
                   {"requests_per_s", row.requests_per_s()}});
    }
  }
  json["version"] = version_line();
  return json;
}

constexpr const char* kCsvHead =
    "spec,budget,stored_bits,sequence_bytes,staging_bytes,batch,kv_bytes,fill_s,step_ms,"
    "step_ms_min,step_ms_max,host_ms,tokens_per_s,kv_percent,bytes_per_s,copy_percent,prompt_ms,"
    "requests_per_s,error";

void print_csv(const Row& row) {
  if (!row.error.empty()) {
    fmt::print("\"{}\",{},,{},{},,,,,,,,,,,,,,{}\n", row.spec, row.budget, row.reservation.kept,
               row.reservation.staging, csv_field(row.error));
    return;
  }
  const std::string requests =
      row.prompt_ms ? fmt::format("{},{}", row.prompt_ms->median, row.requests_per_s()) : ",";
  fmt::print("\"{}\",{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},\n", row.spec, row.budget,
             row.stored_bits, row.reservation.kept, row.reservation.staging, row.batch,
             row.kv_bytes, row.fill_s, row.step_ms.median, row.step_ms.min, row.step_ms.max,
             row.host_ms.median, row.tokens_per_s(), row.kv_percent(), row.bytes_per_s(),
             row.roof_percent(), requests);
}

}  // namespace

int run_throughput(const ThroughputOptions& asked) {
  if (asked.dry_run) return plan_throughput(asked);
  ThroughputOptions options = asked;
  std::vector<Budget> budgets = parse_budgets(options);
  std::vector<std::string> specs;
  for (const std::string& text : options.specs) specs.push_back(canonical(read_spec(text)));
  if (!options.memory.empty() && parse_device(options.session.device).kind == DeviceKind::kCpu) {
    throw Error(ErrorCode::kInvalidArgument,
                "--memory counts the memory that a GPU reports as used; on the CPU give "
                "--kv-memory or --batch");
  }
  SessionOptions session_options = options.session;
  for (const Budget& budget : budgets) {
    if (budget.kind != Budget::Kind::kCache) continue;
    session_options.cache_bytes = std::max(session_options.cache_bytes, budget.size);
  }
  TerminalWatch watch(/*quiet=*/false);
  Session session(session_options, &watch);
  const int context = session.model().decoder().max_positions();
  options.prompt_tokens = prompt_tokens_of(asked, context);
  check_context(options, context);
  TerminalWatch timed(/*quiet=*/true);  // drawing is no part of what is measured
  const WatchScope scope(session.stream(), &timed);
  ThroughputBench bench(options, std::move(budgets), session, watch);
  if (options.csv) fmt::print("{}\n", kCsvHead);
  if (!options.csv && !options.json) print_table_head(options, session);
  bool failed = false;
  for (const std::string& spec : specs) {
    if (interrupted()) break;
    const std::vector<Row> rows = bench.run(spec);
    watch.clear();
    for (const Row& row : rows) {
      failed |= !row.error.empty();
      if (options.json) {
        fmt::print("{}\n", to_json(row, options, session).dump());
      } else if (options.csv) {
        print_csv(row);
      } else {
        print_row(row);
      }
    }
    std::fflush(stdout);
  }
  if (interrupted()) return kExitInterrupted;
  return failed ? kExitFailed : 0;
}

}  // namespace kvlm
