#include "tools/bench/latency.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "kernels/elementwise.h"
#include "kernels/roofline.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/spec_file.h"
#include "tools/bench/statistics.h"
#include "tools/common/memory.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"

// `vlm-bench latency`: one sequence through vision, prefill and decode, repeated, and between
// repetitions what the machine can do at best: the rate of reading memory and of one large
// product. Reports median and spread.
namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr size_t kReadBytes = size_t{512} << 20;  // past every cache that a CPU has
constexpr int kReadPasses = 4;
constexpr int kMatrixSize = 1024;
constexpr size_t kGpuReadBytes = size_t{4} << 30;
constexpr int kGpuMatrixSize = 8192;

/// What one repetition measured.
struct Samples {
  std::vector<double> vision_ms, prefill_tps, prefill_flops, prefill_share;
  std::vector<double> decode_tps, decode_rate, decode_share;
  std::vector<double> read_rate, matrix_rate;
  double kv_share = 0;
  CacheReport cache;
  nlohmann::ordered_json memory;
};

/// Values of a plausible size, the same in every run.
void fill(TensorView rows) {
  uint32_t state = 12345;
  float* out = rows.as<float>();
  for (int64_t i = 0; i < rows.elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    out[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
}

class LatencyBench {
 public:
  LatencyBench(const LatencyOptions& options, Session& session, TerminalWatch& watch)
      : options_(options),
        session_(session),
        watch_(watch),
        probe_(session.device(), probe_bytes(session)) {
    if (!on_gpu()) std::memset(probe_.data(), 1, probe_.bytes());
    Decoder& decoder = session.model().decoder();
    numbers_ = Tensor(DType::kF32, {options.prompt_tokens, decoder.hidden()});
    fill(numbers_);
    embeddings_ = Tensor(DType::kF32, numbers_.shape(), session.device());
    positions_ = following_positions(
        0, static_cast<size_t>(options.prompt_tokens) + static_cast<size_t>(options.tokens));
    modality_.assign(static_cast<size_t>(options.prompt_tokens), kTextRow);
    std::fill_n(modality_.begin(), options.prompt_tokens - text_rows(), int16_t{0});
  }

  Samples run(const std::string& text) {
    const auto plan = plan_cache(read_spec(text), session_.model().decoder().cache_shape());
    const auto cache = make_cache(plan, reservation(*plan, size()).bytes(), session_.device());
    Samples samples;
    const std::string phase = fmt::format("latency {}", text);
    const auto repeats = static_cast<size_t>(options_.repeats);
    try {
      for (size_t i = 0; i <= repeats && !interrupted(); ++i) {
        watch_.progress(phase, i, repeats + 1);
        repeat(*cache, i == 0 ? nullptr : &samples);  // the first warms caches and workspaces
      }
    } catch (const Error& error) {  // what was measured until then is shown
      if (error.code() != ErrorCode::kCancelled) throw;
    }
    watch_.clear();
    return samples;
  }

 private:
  void repeat(KvCache& cache, Samples* samples) {
    Model& model = session_.model();
    Stream& stream = session_.stream();
    const double matrix_rate =
        measure_matrix_rate(on_gpu() ? kGpuMatrixSize : kMatrixSize, model.dtype(), stream);

    Image image{480, 640, std::vector<uint8_t>(size_t{480} * 640 * 3, 128)};
    Clock::time_point start = Clock::now();
    const VisualInput input = model.prepare(image, 1);
    const VisualInput* pictures[] = {&input};
    model.encode(pictures, stream, {});
    stream.synchronize();
    const double vision_s = seconds_since(start);

    const SequenceId id = cache.open(size(), "the benchmark");
    start = Clock::now();
    prefill(cache, id);
    const double prefill_s = seconds_since(start);

    // The roof is measured on both sides of what is held against it: other work on the machine
    // shows in both.
    std::vector<double> read_rates;
    const auto read = [&] {
      for (int i = 0; i < kReadPasses; ++i) {
        read_rates.push_back(measure_memory_rate({probe_.data(), probe_.bytes()}, stream));
      }
    };
    read();
    std::vector<double> steps;
    for (int i = 0; i < options_.tokens && !interrupted(); ++i) {
      start = Clock::now();
      step(cache, id, options_.prompt_tokens + i);
      steps.push_back(seconds_since(start));
    }
    read();
    if (samples != nullptr) {
      const double read_rate = spread_of(read_rates).median;
      const double step_s = spread_of(steps).median;
      const auto weights = static_cast<double>(model.decoder().step_weight_bytes());
      const auto kv = static_cast<double>(cache.report(id).bytes);
      // The head is multiplied with the last row of a prompt only. Attention is not counted.
      const double head = static_cast<double>(model.decoder().vocab_size()) *
                          static_cast<double>(model.decoder().hidden());
      const double layers = weights / static_cast<double>(dtype_bytes(model.dtype())) - head;
      const double flops = 2 * (layers * options_.prompt_tokens + head);
      samples->vision_ms.push_back(1000 * vision_s);
      samples->prefill_tps.push_back(options_.prompt_tokens / prefill_s);
      samples->prefill_flops.push_back(flops / prefill_s);
      samples->prefill_share.push_back(100 * flops / prefill_s / matrix_rate);
      samples->decode_tps.push_back(1 / step_s);
      samples->decode_rate.push_back((weights + kv) / step_s);
      samples->decode_share.push_back(100 * (weights + kv) / step_s / read_rate);
      samples->read_rate.push_back(read_rate);
      samples->matrix_rate.push_back(matrix_rate);
      samples->kv_share = 100 * kv / (weights + kv);
      samples->cache = cache.report(id);
      samples->memory = memory_json(session_.device(), model);
    }
    cache.close(id);
  }

  void prefill(KvCache& cache, SequenceId id) {
    copy(embeddings_, numbers_, session_.stream());
    const auto rows = static_cast<size_t>(options_.prompt_tokens);
    const StepRows step{id, options_.prompt_tokens, true, true, modality_};
    session_.model().decoder().forward(
        {std::span(&step, 1), std::span(positions_).first(rows), embeddings_}, cache,
        session_.stream(), {});
    session_.stream().synchronize();
  }

  void step(KvCache& cache, SequenceId id, int position) {
    const TensorView row = embeddings_.view().slice(0, 1);
    copy(row, numbers_.view().slice(0, 1), session_.stream());
    const StepRows rows{id, 1, false, false, {}};
    session_.model().decoder().forward(
        {std::span(&rows, 1), std::span(positions_).subspan(static_cast<size_t>(position), 1), row},
        cache, session_.stream(), {});
    session_.stream().synchronize();
  }

  SequenceSize size() const {
    return {options_.prompt_tokens, options_.prompt_tokens - text_rows(),
            options_.prompt_tokens + options_.tokens};
  }
  /// Of a prompt, behind the rows of a picture.
  int text_rows() const { return std::min(options_.prompt_tokens, kLatencyTextRows); }
  bool on_gpu() const { return session_.device().kind == DeviceKind::kCuda; }
  static size_t probe_bytes(const Session& session) {
    return session.device().kind == DeviceKind::kCuda ? kGpuReadBytes : kReadBytes;
  }

  const LatencyOptions& options_;
  Session& session_;
  TerminalWatch& watch_;
  Buffer probe_;
  Tensor numbers_;     // (prompt_tokens, hidden), on the host
  Tensor embeddings_;  // the same on the model's device; a pass uses them up
  std::vector<Position> positions_;
  std::vector<int16_t> modality_;  // of a prompt
};

/// One figure of the report: name, unit, what it is divided by for display.
struct Figure {
  const char* name;
  const char* unit;
  double scale;
  std::vector<double> Samples::*values;
};

constexpr Figure kFigures[] = {
    {"vision", "ms", 1, &Samples::vision_ms},
    {"prefill", "tokens/s", 1, &Samples::prefill_tps},
    {"prefill_rate", "GFLOP/s", 1e9, &Samples::prefill_flops},
    {"prefill_of_library", "%", 1, &Samples::prefill_share},
    {"decode", "tokens/s", 1, &Samples::decode_tps},
    {"decode_rate", "GB/s", 1e9, &Samples::decode_rate},
    {"decode_of_roof", "%", 1, &Samples::decode_share},
    {"memory_roof", "GB/s", 1e9, &Samples::read_rate},
    {"library_product", "GFLOP/s", 1e9, &Samples::matrix_rate},
};

Spread scaled(const Samples& samples, const Figure& figure) {
  Spread spread = spread_of(samples.*figure.values);
  return {spread.median / figure.scale, spread.min / figure.scale, spread.max / figure.scale};
}

void print_table(const std::string& spec, const Samples& samples, Session& session,
                 const LatencyOptions& options) {
  fmt::print(
      "{} on {}, {} threads, --kv {}: {:.2f} stored bits, cache of {}, KV {:.1f} % of the bytes of "
      "a step\n{} prompt tokens, {} decode steps, {} repeats; median (min to max)\n",
      printable(session.model().name()), device_name(session.device()), session.threads(), spec,
      samples.cache.stored_bits, human_bytes(samples.cache.bytes), samples.kv_share,
      options.prompt_tokens, options.tokens, options.repeats);
  for (const Figure& figure : kFigures) {
    const Spread spread = scaled(samples, figure);
    fmt::print("  {:<20} {:>10.1f} {:<9} ({:.1f} to {:.1f})\n", figure.name, spread.median,
               figure.unit, spread.min, spread.max);
  }
  if (spread_of(samples.decode_share).median > 100) {
    fmt::print(
        "  above the roof: a step reads from the processor's cache, which is faster\n  than the "
        "memory that memory_roof measures\n");
  }
}

nlohmann::ordered_json to_json(const std::string& spec, const Samples& samples, Session& session,
                               const LatencyOptions& options) {
  nlohmann::ordered_json json{{"model", session.model().name()},
                              {"device", device_name(session.device())},
                              {"threads", session.threads()},
                              {"spec", spec},
                              {"stored_bits", samples.cache.stored_bits},
                              {"kv_bytes", samples.cache.bytes},
                              {"kv_share_percent", samples.kv_share},
                              {"prompt_tokens", options.prompt_tokens},
                              {"decode_steps", options.tokens},
                              {"repeats", options.repeats}};
  for (const Figure& figure : kFigures) {
    const Spread spread = scaled(samples, figure);
    json[figure.name] = {
        {"unit", figure.unit}, {"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
  }
  json["memory"] = samples.memory;
  json["version"] = version_line();
  return json;
}

}  // namespace

int run_latency(const LatencyOptions& options) {
  std::vector<std::string> specs;
  for (const std::string& text : options.specs) specs.push_back(canonical(read_spec(text)));
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  const int context = session.model().decoder().max_positions();
  if (options.prompt_tokens + options.tokens > context) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--prompt-tokens {} and --tokens {} exceed the context of {} tokens; use fewer",
                    options.prompt_tokens, options.tokens, context));
  }
  TerminalWatch timed(/*quiet=*/true);  // drawing is no part of what is measured
  const WatchScope scope(session.stream(), &timed);
  LatencyBench bench(options, session, watch);
  if (options.csv) {
    fmt::print("spec,figure,unit,median,min,max,stored_bits,device,threads\n");
  }
  for (const std::string& spec : specs) {
    const Samples samples = bench.run(spec);
    if (samples.decode_tps.empty()) break;  // interrupted before anything was measured
    if (options.json) {
      fmt::print("{}\n", to_json(spec, samples, session, options).dump());
    } else if (options.csv) {
      for (const Figure& figure : kFigures) {
        const Spread spread = scaled(samples, figure);
        fmt::print("\"{}\",{},{},{},{},{},{},{},{}\n", spec, figure.name, figure.unit,
                   spread.median, spread.min, spread.max, samples.cache.stored_bits,
                   device_name(session.device()), session.threads());
      }
    } else {
      print_table(spec, samples, session, options);
    }
  }
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace kvlm
