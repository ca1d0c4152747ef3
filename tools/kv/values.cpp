#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/base/printable.h"
#include "kvcache/plan/planner.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "kvcache/spec/spec.h"
#include "runtime/forced_run.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/common/weight_options.h"
#include "tools/kv/commands.h"
#include "tools/kv/fidelity_meter.h"
#include "tools/kv/plots.h"
#include "tools/kv/value_survey.h"

// `vlm-kv values`: what a model's keys and values look like after a prompt. Prompts go through an
// f32 cache that keeps every row; value_survey.cpp counts what it holds.
namespace kvlm {

namespace {

struct ValuesOptions {
  SessionOptions session;
  SamplingRequest sampling;
  std::string data;
  int records = 10;
  bool json = false;
  PlotOptions plot;
};

constexpr std::pair<KvSide, const char*> kSides[] = {{KvSide::kKeys, "keys"},
                                                     {KvSide::kValues, "values"}};
constexpr std::pair<ValueSurvey::Rows, const char*> kRows[] = {{ValueSurvey::kVisualRows, "visual"},
                                                               {ValueSurvey::kTextRows, "text"}};

void add_record(Session& session, const EncodedPrompt& encoded, ValueSurvey& survey) {
  Model& model = session.model();
  const auto plan = plan_cache(parse_spec("f32"), model.decoder().cache_shape());
  const auto rows = static_cast<int>(encoded.prompt.ids.size()) + 1;
  PolicyCache cache(plan, SequenceBounds(*plan).session_bytes(rows), session.device());
  ForcedRun run(model, cache, session.stream());
  const SequenceId id = run.join(encoded, 1);
  for (int layer = 0; layer < survey.layers(); ++layer) {
    survey.add_layer(layer, cache.inspect(id, layer, session.stream()));
  }
}

/// The ends of all heads together.
std::pair<float, float> ends_of(const ValueSurvey& survey, int layer, KvSide side,
                                ValueSurvey::Rows rows) {
  std::pair<float, float> ends = {0, 0};
  for (int head = 0; head < survey.kv_heads(); ++head) {
    const ValueCounts& counts = survey.counts(layer, side, rows, head);
    ends.first = head == 0 ? counts.low : std::min(ends.first, counts.low);
    ends.second = head == 0 ? counts.high : std::max(ends.second, counts.high);
  }
  return ends;
}

/// The share of codes that are equal in this layer and the next; -1 for the last layer.
double equal_codes(const ValueSurvey& survey, int layer, KvSide side, ValueSurvey::Rows rows) {
  const ValueSurvey::Distances& apart = survey.distances(layer, side, rows);
  const int64_t all = std::accumulate(apart.begin(), apart.end(), int64_t{0});
  return all == 0 ? -1 : static_cast<double>(apart[0]) / static_cast<double>(all);
}

/// What that share would be if codes of the two layers were drawn apart, as often as they occur.
double equal_by_chance(const ValueSurvey& survey, int layer, KvSide side, ValueSurvey::Rows rows) {
  const ValueSurvey::Distances& here = survey.codes(layer, side, rows);
  const ValueSurvey::Distances& next = survey.codes(layer + 1, side, rows);
  const auto all = static_cast<double>(std::accumulate(here.begin(), here.end(), int64_t{0}));
  double share = 0;
  for (size_t code = 0; code < here.size(); ++code) {
    share += static_cast<double>(here[code]) / all * static_cast<double>(next[code]) / all;
  }
  return share;
}

nlohmann::ordered_json json_of(const ValueSurvey& survey, int layer, KvSide side,
                               ValueSurvey::Rows rows) {
  const auto [low, high] = ends_of(survey, layer, side, rows);
  nlohmann::ordered_json json{
      {"low", low}, {"high", high}, {"outlier_ratio", survey.outlier_ratio(layer, side, rows)}};
  for (int head = 0; head < survey.kv_heads(); ++head) {
    const ValueCounts& counts = survey.counts(layer, side, rows, head);
    json["heads"].push_back({{"low", counts.low},
                             {"high", counts.high},
                             {"count", counts.count},
                             {"histogram", counts.bins}});
  }
  json["codes"] = survey.codes(layer, side, rows);
  if (layer + 1 < survey.layers()) {
    json["code_distances"] = survey.distances(layer, side, rows);
  }
  return json;
}

std::string json_lines(const ValueSurvey& survey, const std::string& model, int records) {
  std::string lines;
  for (int layer = 0; layer < survey.layers(); ++layer) {
    for (const auto& [side, part_name] : kSides) {
      for (const auto& [rows, rows_name] : kRows) {
        nlohmann::ordered_json json{{"model", model},
                                    {"records", records},
                                    {"layer", layer},
                                    {"part", part_name},
                                    {"rows", rows_name}};
        json["bins"] = {{"low", ValueCounts::kLow}, {"width", ValueCounts::kWidth}};
        json.update(json_of(survey, layer, side, rows));
        lines += json.dump() + '\n';
      }
    }
  }
  return lines;
}

void print_table(const ValueSurvey& survey, const std::string& model, int records) {
  fmt::print(
      "{}, {} prompts: ends of each layer's cache values, the widest and the narrowest range of "
      "its KV heads, the mean\nmagnitude of its largest channel over that of the median one, and "
      "the share of its 2-bit codes (kivi) that equal those\nof the next layer, measured and "
      "expected for random codes\n\n",
      printable(model), records);
  fmt::print("{:<6} {:<7} {:<7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}\n", "layer", "part",
             "tokens", "low", "high", "widest", "narrowest", "outlier", "equal", "random");
  for (int layer = 0; layer < survey.layers(); ++layer) {
    for (const auto& [side, part_name] : kSides) {
      for (const auto& [rows, rows_name] : kRows) {
        std::vector<float> ranges;
        for (int head = 0; head < survey.kv_heads(); ++head) {
          const ValueCounts& counts = survey.counts(layer, side, rows, head);
          ranges.push_back(counts.high - counts.low);
        }
        const auto [low, high] = ends_of(survey, layer, side, rows);
        const double equal = equal_codes(survey, layer, side, rows);
        const double outlier = survey.outlier_ratio(layer, side, rows);
        const auto shown = [&](double share) {
          return equal < 0 ? std::string("-") : fmt::format("{:.1f} %", 100 * share);
        };
        fmt::print("{:<6} {:<7} {:<7} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f} {:>9} {:>8} {:>8}\n",
                   layer, part_name, rows_name, low, high,
                   *std::max_element(ranges.begin(), ranges.end()),
                   *std::min_element(ranges.begin(), ranges.end()),
                   outlier > 0 ? fmt::format("{:.1f}", outlier) : "-", shown(equal),
                   shown(equal < 0 ? 0 : equal_by_chance(survey, layer, side, rows)));
      }
    }
  }
}

int run_values(const ValuesOptions& options) {
  check_sampling(options.sampling);
  const Plots plots(options.plot, "kv/plot_values.py");
  const std::vector<ForcedRecord> records = read_forced_records(options.data, options.records);
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  print_prompt_warnings(session, records);
  const CacheShape shape = session.model().decoder().cache_shape();
  ValueSurvey survey(shape.layers, shape.kv_heads, shape.head_dim);
  Progress progress("values", records.size(), false);
  int done = 0;
  for (const ForcedRecord& record : records) {
    if (interrupted()) break;
    add_record(session, encode_record(session, record, options.sampling), survey);
    progress.update({static_cast<size_t>(++done), 0, 0}, "");
  }
  progress.finish();
  if (done == 0) return kExitInterrupted;
  const std::string model(session.model().name());
  if (options.json) {
    fmt::print("{}", json_lines(survey, model, done));
  } else {
    print_table(survey, model, done);
  }
  if (plots.wanted()) plots.draw("values.jsonl", json_lines(survey, model, done));
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace

std::function<int()> add_values(CLI::App& app) {
  const auto options = std::make_shared<ValuesOptions>();
  app.add_option("-m,--model", options->session.model, "As vlm-run's -m")->capture_default_str();
  app.add_option("--data", options->data,
                 "JSON Lines file with id, image or images, video or videos, prompt")
      ->required();
  app.add_option("--records", options->records, "Use only the first records of the data")
      ->check(CLI::Range(1, kMostForcedRecords))
      ->capture_default_str();
  app.add_flag("--json", options->json,
               "Print one JSON object per layer, keys or values, and kind of tokens, with "
               "histograms of every KV head");
  add_plot_options(app, options->plot);
  add_sampling_options(app, options->sampling);
  add_size_options(app, options->session);
  add_weight_options(app, options->session);
  app.add_option("--device", options->session.device, "auto, cpu or cuda[:N]")
      ->capture_default_str();
  app.add_option("-t,--threads", options->session.threads, "CPU threads; 0: one per core");
  return [options] {
    catch_interrupts();
    return run_values(*options);
  };
}

}  // namespace kvlm
