#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/plan/planner.h"
#include "runtime/policy_profile.h"
#include "runtime/spec_file.h"
#include "tools/common/csv.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/common/weight_options.h"
#include "tools/kv/commands.h"
#include "tools/kv/equal_bits.h"
#include "tools/kv/fidelity_meter.h"
#include "tools/kv/plots.h"

// `vlm-kv fidelity`: the command line, and the figures of fidelity_meter.h as a table, JSON or CSV;
// a plot on request.
namespace kvlm {

namespace {

struct FidelityOptions {
  SessionOptions session;
  SamplingRequest sampling;
  std::vector<std::string> specs;
  std::string data;
  std::string profile;
  std::string reference;
  PlotOptions plot;
  int max_tokens = 128;
  int records = 0;
  int batch_size = 1;
  std::optional<double> bits;
  std::optional<int> layer_records;  // none: all, or 0 with a reference
  bool per_record = false;
  bool json = false;
  bool csv = false;
};

/// Where the figures are from.
struct Origin {
  std::string model;
  std::string weights;
  std::string reference;  // and its weights: of the same model unless --reference names another
  std::string reference_weights;
  std::string data;
  std::string device;

  bool differs() const { return reference != model || reference_weights != weights; }
};

/// Mean squared error of the softmax's weights; null where the policy drops slots.
nlohmann::ordered_json softmax_mse(const AttentionError& error) {
  if (error.weights == 0) return nullptr;
  return error.weight_difference / error.weights;
}

double relative(double squared_error, double squared_reference) {
  return squared_reference > 0 ? std::sqrt(squared_error / squared_reference) : 0;
}

/// Of the tokens fed, how many a layer holds.
double share_held(const AttentionError& error) {
  return error.tokens > 0 ? error.slots / error.tokens : 0;
}

/// Of every record, on the tokens that are compared; nll in nats, summed over them.
nlohmann::ordered_json records_json(const Fidelity& result) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RecordFidelity& record : result.each) {
    const size_t tokens = record.kl.size();
    const auto count = static_cast<double>(std::max<size_t>(tokens, 1));
    const double sum = std::accumulate(record.kl.begin(), record.kl.end(), 0.0);
    list.push_back({{"id", record.id},
                    {"tokens", tokens},
                    {"nll", -record.log_probability},
                    {"nll_f16", -record.reference_log_probability},
                    {"kl_mean", sum / count},
                    {"kl_p99", quantile(record.kl, 0.99)},
                    {"top1", tokens == 0 ? 1 : static_cast<double>(record.agreements) / count}});
  }
  return list;
}

nlohmann::ordered_json json_of(const Fidelity& result, const Origin& origin) {
  const double records = std::max(result.records, 1);
  nlohmann::ordered_json json{{"spec", result.spec},
                              {"model", origin.model},
                              {"weights_format", origin.weights},
                              {"reference", origin.reference},
                              {"reference_weights_format", origin.reference_weights},
                              {"data", origin.data},
                              {"device", origin.device},
                              {"records", result.records},
                              {"tokens", result.kl.size()},
                              {"kl_mean", result.mean_kl()},
                              {"kl_std_error", result.kl_standard_error()},
                              {"kl_p99", result.kl_quantile(0.99)},
                              {"top1", result.top1()},
                              {"perplexity", result.perplexity()},
                              {"f16_perplexity", result.reference_perplexity()},
                              {"stored_bits", result.stored_bits / records},
                              {"nominal_bits", result.nominal_bits / records},
                              {"bytes", static_cast<double>(result.bytes) / records}};
  json["layer_records"] = result.layer_records;
  json["layers"] = nlohmann::ordered_json::array();
  for (size_t layer = 0; layer < result.layers.size(); ++layer) {
    const AttentionError& error = result.layers[layer];
    json["layers"].push_back({{"layer", layer},
                              {"error", relative(error.difference, error.reference)},
                              {"visual_error", relative(error.visual_difference, error.reference)},
                              {"text_error", relative(error.text_difference, error.reference)},
                              {"softmax_mse", softmax_mse(error)},
                              {"slots", error.steps > 0 ? error.slots / error.steps : 0},
                              {"share", share_held(error)}});
  }
  if (result.layer_records > 0) {
    json["visual_scores"] = {{"low", ScoreHistogram::kLow},
                             {"width", ScoreHistogram::kWidth},
                             {"exact", result.scores.exact},
                             {"quantized", result.scores.quantized},
                             {"calibrated", result.scores.calibrated}};
  }
  json["version"] = version_line();
  return json;
}

/// One line. A folder's name need not be UTF-8.
std::string text_of(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void print_table(const std::vector<Fidelity>& results, const Origin& origin) {
  fmt::print(
      "Against an f16 cache{}, on the same teacher-forced tokens.\n"
      "KL mean, KL p99: divergence of the next token's distribution, in nats; mean and 99th\n"
      "  percentile. top-1: steps with the same most likely token. ppl: perplexity.\n"
      "stored, nominal: bits per element of keys and values; all bytes, codes only.\n"
      "attention: relative error of the attention output; visual, text: the parts of this error\n"
      "  from visual and text tokens.\n\n",
      origin.differs()
          ? fmt::format(" of {} with {} weights", origin.reference, origin.reference_weights)
          : "");
  size_t width = 4;
  for (const Fidelity& result : results) width = std::max(width, result.spec.size());
  fmt::print("{:<{}} {:>9} {:>9} {:>7} {:>8} {:>8} {:>7} {:>7} {:>9} {:>8} {:>8}\n", "spec", width,
             "KL mean", "KL p99", "top-1", "ppl", "f16 ppl", "stored", "nominal", "attention",
             "visual", "text");
  for (const Fidelity& result : results) {
    const double records = std::max(result.records, 1);
    const AttentionError sum = result.attention();
    const auto shown = [&](double difference) {
      return result.layer_records == 0 ? std::string("-")
                                       : fmt::format("{:.4f}", relative(difference, sum.reference));
    };
    fmt::print(
        "{:<{}} {:>9} {:>9} {:>6.2f}% {:>8.4f} {:>8.4f} {:>7.3f} {:>7.3f} {:>9} {:>8} "
        "{:>8}\n",
        result.spec, width, shown_kl(result.mean_kl()), shown_kl(result.kl_quantile(0.99)),
        100 * result.top1(), result.perplexity(), result.reference_perplexity(),
        result.stored_bits / records, result.nominal_bits / records, shown(sum.difference),
        shown(sum.visual_difference), shown(sum.text_difference));
  }
}

void print_csv(const std::vector<Fidelity>& results, const Origin& origin) {
  fmt::print(
      "spec,model,weights_format,reference,reference_weights_format,data,device,records,tokens,kl_"
      "mean,kl_std_error,kl_p99,top1,perplexity,"
      "f16_perplexity,stored_bits,nominal_bits,bytes,error,visual_error,text_error,share,layer_"
      "records\n");
  for (const Fidelity& result : results) {
    const double records = std::max(result.records, 1);
    const AttentionError sum = result.attention();
    const auto of_layers = [&](double figure) {
      return result.layer_records == 0 ? std::string() : fmt::format("{}", figure);
    };
    fmt::print("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
               csv_field(result.spec), csv_field(origin.model), csv_field(origin.weights),
               csv_field(origin.reference), csv_field(origin.reference_weights),
               csv_field(origin.data), origin.device, result.records, result.kl.size(),
               result.mean_kl(), result.kl_standard_error(), result.kl_quantile(0.99),
               result.top1(), result.perplexity(), result.reference_perplexity(),
               result.stored_bits / records, result.nominal_bits / records,
               static_cast<double>(result.bytes) / records,
               of_layers(relative(sum.difference, sum.reference)),
               of_layers(relative(sum.visual_difference, sum.reference)),
               of_layers(relative(sum.text_difference, sum.reference)), of_layers(share_held(sum)),
               result.layer_records);
  }
}

std::string lines_of(const std::vector<Fidelity>& results, const Origin& origin) {
  std::string lines;
  for (const Fidelity& result : results) lines += text_of(json_of(result, origin)) + '\n';
  return lines;
}

int run_fidelity(const FidelityOptions& options) {
  check_sampling(options.sampling);
  if (!options.reference.empty() && options.layer_records.value_or(0) > 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--layer-records is {} with --reference; attention is compared within "
                            "one model alone: leave out one of the two",
                            *options.layer_records));
  }
  const Plots plots(options.plot, "kv/plot.py");
  std::vector<CacheSpec> specs;
  for (const std::string& text : options.specs) specs.push_back(read_spec(text));
  PolicyProfile profile;
  if (!options.profile.empty()) {
    profile = read_profile(options.profile);
    require_profile_of(profile, options.session.model);
  }
  const std::vector<ForcedRecord> records = read_forced_records(options.data, options.records);
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  std::unique_ptr<Session> reference;
  if (!options.reference.empty()) {
    SessionOptions unrounded = options.session;
    unrounded.model = options.reference;
    unrounded.weights = "16";
    reference = std::make_unique<Session>(unrounded, &watch);
  }
  print_prompt_warnings(session, records);
  const CacheShape shape = session.model().decoder().cache_shape();
  if (options.bits) {
    const EncodedPrompt first = encode_record(session, records.front(), options.sampling);
    const PromptSize prompt{static_cast<int>(first.prompt.ids.size()),
                            static_cast<int>(first.prompt.visual_rows())};
    for (CacheSpec& spec : specs) {
      const CacheSpec solved = at_equal_bits(spec, *options.bits, shape, prompt, &profile);
      if (!(solved == spec)) {
        watch.clear();
        print_message("vlm-kv: note: --bits {}: {} is measured as {}\n", *options.bits,
                      canonical(spec), canonical(solved));
      }
      spec = solved;
    }
  }
  std::vector<FidelityMeter::Plan> plans;
  for (const CacheSpec& spec : specs) plans.push_back(plan_cache(spec, shape, &profile));
  Progress progress("fidelity", records.size(), false);
  const int layer_records = options.layer_records.value_or(reference ? 0 : kMostForcedRecords);
  FidelityMeter meter(session, {options.max_tokens, options.sampling, options.batch_size,
                                layer_records, reference.get()});
  const std::vector<Fidelity> results = meter.run(records, plans, [&](size_t done) {
    progress.update({done, 0, 0}, "");
    return !interrupted();
  });
  progress.finish();
  const Model& model = session.model();
  const Model& compared_with = reference ? reference->model() : model;
  const Origin origin{
      std::string(model.name()),     model.weight_format(), std::string(compared_with.name()),
      compared_with.weight_format(), options.data,          device_name(session.device())};
  if (options.json) {
    for (const Fidelity& result : results) {
      nlohmann::ordered_json json = json_of(result, origin);
      if (options.per_record) json["per_record"] = records_json(result);
      fmt::print("{}\n", text_of(json));
    }
  } else if (options.csv) {
    print_csv(results, origin);
  } else {
    print_table(results, origin);
  }
  if (plots.wanted()) plots.draw("fidelity.jsonl", lines_of(results, origin));
  return interrupted() ? kExitInterrupted : 0;
}

}  // namespace

std::function<int()> add_fidelity(CLI::App& app) {
  const auto options = std::make_shared<FidelityOptions>();
  app.add_option("-m,--model", options->session.model, "As vlm-run's -m")->capture_default_str();
  app.add_option("--kv", options->specs, "Cache policy, or @FILE.json; repeatable")->required();
  app.add_option("--data", options->data,
                 "JSON Lines file with id, image or images, video or videos, prompt, text")
      ->required();
  app.add_option("--bits", options->bits,
                 "Solve keep= of every retention rule, and set evict=, so that the first record's "
                 "prompt takes this many stored bits per element")
      ->check(CLI::Range(0.01, 32.0));
  app.add_option("--kv-profile", options->profile,
                 "File that vlm-kv profile measured on this model");
  app.add_option("-n,--max-tokens", options->max_tokens, "Most teacher-forced tokens of a record")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--records", options->records, "Use only the first records of the data; 0: all")
      ->check(CLI::Range(0, kMostForcedRecords));
  app.add_option("--reference", options->reference,
                 "Compare with this model's f16 cache and unrounded weights, as a checkpoint with "
                 "its 16-bit original; default: with the measured model and weights");
  add_sampling_options(app, options->sampling);
  add_size_options(app, options->session);
  add_plot_options(app, options->plot);
  add_weight_options(app, options->session);
  app.add_option("--device", options->session.device, "auto, cpu or cuda[:N]")
      ->capture_default_str();
  app.add_option("-t,--threads", options->session.threads, "CPU threads; 0: one per core");
  app.add_option("--batch-size", options->batch_size,
                 "Records that are teacher-forced together; each needs cache memory for every --kv")
      ->check(CLI::Range(1, FidelityMeter::kMostTogether))
      ->capture_default_str();
  app.add_option("--layer-records", options->layer_records,
                 "Measure the attention error of each layer, the slowest part, on the first "
                 "records only; 0: none")
      ->check(CLI::Range(0, kMostForcedRecords))
      ->default_str("all; with --reference none");
  CLI::Option* json = app.add_flag("--json", options->json, "Print one JSON object per spec");
  app.add_flag("--per-record", options->per_record,
               "With --json: per record the tokens, NLL and f16 NLL (nats), KL and top-1 agreement")
      ->needs(json);
  app.add_flag("--csv", options->csv, "Print comma-separated values, one line per spec")
      ->excludes("--json");
  return [options] {
    catch_interrupts();
    return run_fidelity(*options);
  };
}

}  // namespace kvlm
