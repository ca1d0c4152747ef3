#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/plan/planner.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/retention/common.h"
#include "kvcache/retention/prefix_fit.h"
#include "kvcache/spec/spec.h"
#include "runtime/forced_run.h"
#include "runtime/policy_profile.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/common/weight_options.h"
#include "tools/kv/commands.h"
#include "tools/kv/fidelity_meter.h"
#include "vision/image.h"

// `vlm-kv profile`: fits to one model what papers leave to a search (docs/formulas.md, "Profile")
// and writes the file for --kv-profile. Budgets come from the scores of prompts that keep every
// row; the other values are tried one after the other, and the one whose forced text stays closest
// to plain rows wins.
namespace kvlm {

namespace {

struct ProfileOptions {
  SessionOptions session;
  SamplingRequest sampling;
  std::vector<std::string> policies;
  std::string data;
  std::string out;
  double keep = 0.5;
  std::vector<int> bits = {1, 2};
  int records = 10;
  int batch_size = 16;
  bool json = false;
  int max_tokens = 64;
};

/// One value of an option and the spec that tries it.
struct Candidate {
  std::string spec;
  std::string label;
};

/// PrefixKV's scores of every layer of a prompt, (layers, n).
using LayerScores = std::vector<std::vector<double>>;

constexpr std::pair<const char*, retention::Score> kScores[] = {{"means", retention::Score::kMeans},
                                                                {"sums", retention::Score::kSums}};

/// Keeps every row and notes how the prompt attends, as PrefixKV's rule sees it.
class ScoreProbe final : public Retention {
 public:
  explicit ScoreProbe(std::map<std::string, LayerScores>& scores) : scores_(&scores) {}

  ImportanceNeeds needs() const noexcept override { return {.rows = ImportanceNeeds::Rows::kAll}; }
  bool joint() const noexcept override { return true; }
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    scores_->clear();
    for (const auto& [name, score] : kScores) {
      for (const retention::Unit& unit : retention::units_of(prompt, pairs)) {
        (*scores_)[name].push_back(retention::unit_scores(prompt, unit, score));
      }
    }
    return retention::keep_everything(prompt);
  }
  int peak_rows(int kept, double, int prompt_rows, int max_rows) const noexcept override {
    return retention::growing_peak(kept, prompt_rows, max_rows);
  }
  int64_t peak_rows_total(int layers, int, int max_rows) const noexcept override {
    return int64_t{layers} * max_rows;
  }

 private:
  std::map<std::string, LayerScores>* scores_;
};

class Profiler {
 public:
  Profiler(const ProfileOptions& options, Session& session, std::vector<ForcedRecord> records)
      : options_(options), session_(session), records_(std::move(records)) {}

  /// PrefixKV's forget ratios (docs/formulas.md, "Profile") and the Gini coefficients of its
  /// scores, of every layer, averaged over the records.
  void fit_budgets(PolicyProfile& profile) {
    Model& model = session_.model();
    const auto plan = plan_cache(parse_spec("prefixkv,mode=online"), model.decoder().cache_shape());
    std::map<std::string, LayerScores> scores;
    plan->retention = std::make_unique<ScoreProbe>(scores);
    std::map<std::string, LayerScores> forget;  // (records, layers)
    std::map<std::string, LayerScores> gini;
    Progress progress("prefixkv", records_.size(), false);
    for (size_t i = 0; i < records_.size() && !interrupted(); ++i) {
      const EncodedPrompt encoded = encode_record(session_, records_[i], options_.sampling);
      const auto rows = static_cast<int>(encoded.prompt.ids.size()) + 1;
      PolicyCache cache(plan, SequenceBounds(*plan).session_bytes(rows), session_.device());
      ForcedRun(model, cache, session_.stream()).join(encoded, 1);
      for (const auto& [name, layers] : scores) {
        forget[name].push_back(forget_ratios(layers, options_.keep, retention::Ends{1, 1}.least()));
        gini[name].emplace_back();
        for (const std::vector<double>& layer : layers) {
          gini[name].back().push_back(kvlm::gini(lorenz_curve(layer)));
        }
      }
      progress.update({i + 1, 0, 0}, "");
    }
    progress.finish();
    profile.forget_keep = options_.keep;
    for (const auto& [name, score] : kScores) {
      profile.forget[name] = mean_ratios(forget[name]);
      profile.gini[name] = mean_ratios(gini[name]);
      RatioSpread spread = spread_of_ratios(forget[name], profile.forget[name]);
      profile.forget_std[name] = std::move(spread.deviation);
      profile.forget_mad[name] = std::move(spread.difference);
    }
    if (options_.json || interrupted()) return;
    for (size_t layer = 0; layer < profile.forget["means"].size(); ++layer) {
      fmt::print(
          "prefixkv       layer {:<6} keeps {:.3f} by means, {:.3f} by sums; gini {:.3f}, "
          "{:.3f}\n",
          layer, 1 - profile.forget["means"][layer], 1 - profile.forget["sums"][layer],
          profile.gini["means"][layer], profile.gini["sums"][layer]);
    }
    const auto over_layers = [](const std::vector<double>& of_layers) {
      return std::accumulate(of_layers.begin(), of_layers.end(), 0.0) /
             static_cast<double>(of_layers.size());
    };
    fmt::print(
        "prefixkv       over {} prompts, mean of the layers: std {:.4f} by means, {:.4f} by sums; "
        "mad "
        "{:.4f}, {:.4f}\n",
        forget["means"].size(), over_layers(profile.forget_std["means"]),
        over_layers(profile.forget_std["sums"]), over_layers(profile.forget_mad["means"]),
        over_layers(profile.forget_mad["sums"]));
  }

  /// The candidate whose mean KL over the records is smallest; prints all.
  size_t best_of(const std::string& what, const std::vector<Candidate>& candidates) {
    const CacheShape shape = session_.model().decoder().cache_shape();
    std::vector<FidelityMeter::Plan> plans;
    for (const Candidate& candidate : candidates) {
      plans.push_back(plan_cache(parse_spec(candidate.spec), shape));
    }
    Progress progress(what, records_.size(), false);
    const std::vector<Fidelity> results =
        FidelityMeter(session_, {.max_tokens = options_.max_tokens,
                                 .sampling = options_.sampling,
                                 .batch_size = options_.batch_size})
            .run(records_, plans, [&](size_t done) {
              progress.update({done, 0, 0}, "");
              return !interrupted();
            });
    progress.finish();
    size_t best = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!options_.json)
        fmt::print("{:<14} {:<24} KL {}  top-1 {:.2f} %\n", what, candidates[i].label,
                   shown_kl(results[i].mean_kl()), 100 * results[i].top1());
      if (results[i].mean_kl() < results[best].mean_kl()) best = i;
    }
    if (!options_.json) fmt::print("{:<14} {:<24} chosen\n", what, candidates[best].label);
    return best;
  }

 private:
  const ProfileOptions& options_;
  Session& session_;
  std::vector<ForcedRecord> records_;
};

// docs/formulas.md, "Profile", lists the candidates.
constexpr double kAlphas[] = {0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25};  // at 1 bit
constexpr double kAlphaFactors[] = {0, 0.25, 0.5, 1, 2, 4};          // of the default, at more
constexpr double kEta1[] = {0, 1.0 / 6, 0.25, 2.0 / 6};
constexpr double kEta2[] = {0, 0.045, 0.09};

/// Widths at which a policy has a value to fit: CalibQuant remaps scores, and XQuant moves levels,
/// at 1 and 2 bits.
int widest(std::string_view policy) { return policy == "head_quantile" ? 8 : 2; }

void fit_tau(Profiler& profiler, int bits, bool shrunk, PolicyProfile& profile) {
  std::vector<Candidate> candidates;
  std::vector<std::pair<double, double>> taus;
  for (int low = 0; low <= 3; ++low) {
    for (int high = 0; high <= 3; ++high) {
      taus.emplace_back(low, high);
      candidates.push_back(
          {fmt::format("calibquant,bits={}{},tau={}:{}", bits, shrunk ? "" : ",profile=paper", low,
                       high),
           fmt::format("{} bits{}, tau {}:{}", bits, shrunk ? "" : " (paper)", low, high)});
    }
  }
  (shrunk ? profile.tau : profile.tau_unshrunk)[bits] =
      taus[profiler.best_of("calibquant", candidates)];
}

void fit_alpha(Profiler& profiler, const CacheShape& shape, int bits, PolicyProfile& profile) {
  std::vector<double> alphas(std::begin(kAlphas), std::end(kAlphas));
  if (bits > 1) {
    const std::string spec = fmt::format("head_quantile,bits={}", bits);
    const auto plan = plan_cache(parse_spec(spec), shape);
    const Quantizer& quantizer = *plan->packers.front().quantizer;
    const auto standard = static_cast<double>(quantizer.packing(KvSide::kKeys, 0).rules[0].alpha);
    alphas.clear();
    for (const double factor : kAlphaFactors) alphas.push_back(factor * standard);
  }
  std::vector<Candidate> candidates;
  for (const double alpha : alphas) {
    candidates.push_back({fmt::format("head_quantile,bits={},alpha={:.6f}", bits, alpha),
                          fmt::format("{} bits, alpha {:.6f}", bits, alpha)});
  }
  profile.alpha[bits] = alphas[profiler.best_of("head_quantile", candidates)];
}

/// Both widths at once: a layer's keys and values may have one each.
void fit_eta(Profiler& profiler, bool one, bool two, PolicyProfile& profile) {
  const std::vector<double> defaults = {-1};
  const std::vector<double> ones =
      one ? std::vector<double>(std::begin(kEta1), std::end(kEta1)) : defaults;
  const std::vector<double> twos =
      two ? std::vector<double>(std::begin(kEta2), std::end(kEta2)) : defaults;
  std::vector<Candidate> candidates;
  std::vector<std::pair<double, double>> etas;
  for (const double eta1 : ones) {
    for (const double eta2 : twos) {
      Candidate candidate{"xquant", "eta"};
      if (one) {
        candidate.spec += fmt::format(",eta1={}", eta1);
        candidate.label += fmt::format(" {:.3f} at 1 bit", eta1);
      }
      if (two) {
        candidate.spec += fmt::format(",eta2={}", eta2);
        candidate.label += fmt::format(" {:.3f} at 2", eta2);
      }
      candidates.push_back(candidate);
      etas.emplace_back(eta1, eta2);
    }
  }
  const auto [eta1, eta2] = etas[profiler.best_of("xquant", candidates)];
  if (one) profile.eta[1] = eta1;
  if (two) profile.eta[2] = eta2;
}

void check_options(const ProfileOptions& options) {
  if (options.out == "-") {
    throw Error(ErrorCode::kInvalidArgument,
                "--out is \"-\"; a profile is a file that later runs extend: give its name");
  }
  check_sampling(options.sampling);
  std::error_code error;
  if (std::filesystem::equivalent(options.data, options.out, error)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--out {} is the file of --data; give another name", printable(options.out)));
  }
  const int least = *std::min_element(options.bits.begin(), options.bits.end());
  for (const std::string& policy : options.policies) {
    if (policy != "prefixkv" && least > widest(policy)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--policy {} has nothing to calibrate at {} bits; add --bits 1 or 2",
                              policy, least));
    }
  }
}

int run_profile(const ProfileOptions& options) {
  check_options(options);
  std::vector<ForcedRecord> records = read_forced_records(options.data, options.records);
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  print_prompt_warnings(session, records);
  // Refused before anything is measured.
  PolicyProfile profile = profile_to_extend(options.out, std::string(session.model().name()));
  Profiler profiler(options, session, std::move(records));
  const auto wanted = [&](const char* policy) {
    return !interrupted() &&
           (options.policies.empty() || std::find(options.policies.begin(), options.policies.end(),
                                                  policy) != options.policies.end());
  };
  const auto width = [&](int bits) {
    return !interrupted() &&
           std::find(options.bits.begin(), options.bits.end(), bits) != options.bits.end();
  };
  if (wanted("prefixkv")) profiler.fit_budgets(profile);
  for (int bits = 1; bits <= 8; ++bits) {
    if (!width(bits)) continue;
    if (wanted("calibquant") && bits <= widest("calibquant")) {
      fit_tau(profiler, bits, /*shrunk=*/true, profile);
      fit_tau(profiler, bits, /*shrunk=*/false, profile);
    }
    if (wanted("head_quantile")) {
      fit_alpha(profiler, session.model().decoder().cache_shape(), bits, profile);
    }
  }
  if (wanted("xquant") && (width(1) || width(2))) fit_eta(profiler, width(1), width(2), profile);
  if (interrupted()) return kExitInterrupted;
  write_profile(profile, options.out);
  if (options.json) {
    fmt::print("{}\n", profile_text(profile));
  } else {
    fmt::print("wrote {}; pass it to vlm-run --kv-profile\n", printable(options.out));
  }
  return 0;
}

}  // namespace

std::function<int()> add_profile(CLI::App& app) {
  const auto options = std::make_shared<ProfileOptions>();
  app.add_option("-m,--model", options->session.model, "As vlm-run's -m")->capture_default_str();
  app.add_option("--data", options->data,
                 "JSON Lines file with id, image or images, video or videos, prompt, text")
      ->required();
  app.add_option(
         "--out", options->out,
         "File for the measured values; in an existing profile of this model other values are kept")
      ->required();
  app.add_flag("--json", options->json, "Print the file on stdout too, instead of progress lines");
  app.add_option("--policy", options->policies, "Calibrate only these policies; repeatable")
      ->check(CLI::IsMember({"prefixkv", "calibquant", "head_quantile", "xquant"}));
  app.add_option("--keep", options->keep, "Fraction of tokens that PrefixKV keeps")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--bits", options->bits,
                 "Bit widths at which calibquant, head_quantile and xquant are calibrated; "
                 "repeatable. A policy uses the values of its own bit width only")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--records", options->records, "Use only the first records of the data")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--batch-size", options->batch_size,
                 "Records that are teacher-forced together; each needs cache memory")
      ->check(CLI::Range(1, FidelityMeter::kMostTogether))
      ->capture_default_str();
  add_sampling_options(app, options->sampling);
  add_size_options(app, options->session);
  app.add_option("-n,--max-tokens", options->max_tokens, "Most teacher-forced tokens of a record")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  add_weight_options(app, options->session);
  app.add_option("--device", options->session.device, "auto, cpu or cuda[:N]")
      ->capture_default_str();
  app.add_option("-t,--threads", options->session.threads, "CPU threads; 0: one per core");
  return [options] {
    catch_interrupts();
    return run_profile(*options);
  };
}

}  // namespace kvlm
