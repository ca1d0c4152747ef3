#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/registry.h"
#include "runtime/forced_run.h"
#include "runtime/policy_profile.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/kv/commands.h"
#include "tools/kv/fidelity_meter.h"
#include "vision/image.h"

namespace kvlm {

namespace {

struct ProfileOptions {
  SessionOptions session;
  std::vector<std::string> policies;
  std::string data;
  std::string out;
  double keep = 0.5;
  int records = 10;
  bool json = false;
  int max_tokens = 64;
};

/// One value of an option and the spec that tries it.
struct Candidate {
  std::string spec;
  std::string label;
};

class Profiler {
 public:
  Profiler(const ProfileOptions& options, Session& session, std::vector<ForcedRecord> records)
      : options_(options), session_(session), records_(std::move(records)) {}

  /// The forget ratio of every layer that PrefixKV fits to a prompt, averaged over the records
  /// (specs 8.4).
  std::vector<double> forget_ratios() {
    Model& model = session_.model();
    const CacheShape shape = model.decoder().cache_shape();
    const CacheSpec spec = parse_spec(fmt::format("prefixkv,mode=online,keep={}", options_.keep));
    std::vector<double> mean(static_cast<size_t>(shape.layers));
    Progress progress("prefixkv", records_.size(), false);
    for (size_t i = 0; i < records_.size(); ++i) {
      std::vector<Image> images;
      for (const std::string& path : records_[i].images) images.push_back(load_image(path));
      std::string prompt = records_[i].prompt;
      if (prompt.empty()) prompt = model.caption_prompt();
      const EncodedPrompt encoded = encode_prompt(
          model, {user_message(prompt, static_cast<int>(images.size()), model.image_token())},
          images, session_.stream());
      const auto rows = static_cast<int>(encoded.prompt.ids.size()) + 1;
      CacheParts parts = parts_of(spec, shape, nullptr);
      const size_t bytes = PolicyCache::session_bytes(parts, shape, rows);
      PolicyCache cache(std::move(parts), shape, bytes, session_.device());
      const ForcedRun run(model, cache, encoded, 1, session_.stream());
      for (int layer = 0; layer < shape.layers; ++layer) {
        const double kept = cache.layer(run.id(), layer).kept;
        mean[static_cast<size_t>(layer)] +=
            (1 - kept / static_cast<double>(encoded.prompt.ids.size())) /
            static_cast<double>(records_.size());
      }
      progress.update({i + 1, 0, 0}, "");
    }
    progress.finish();
    return mean;
  }

  /// The candidate whose mean KL over the records is smallest; prints all.
  size_t best_of(const std::string& what, const std::vector<Candidate>& candidates) {
    std::vector<FidelityMeter::Policy> policies;
    for (const Candidate& candidate : candidates) {
      policies.push_back({parse_spec(candidate.spec), {}});
    }
    Progress progress(what, records_.size(), false);
    const std::vector<Fidelity> results = FidelityMeter(session_, options_.max_tokens)
                                              .run(records_, policies, false, [&](size_t done) {
                                                progress.update({done, 0, 0}, "");
                                                return !interrupted();
                                              });
    progress.finish();
    size_t best = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!options_.json)
        fmt::print("{:<14} {:<12} KL {:.5f}  top-1 {:.2f} %\n", what, candidates[i].label,
                   results[i].mean_kl(), 100 * results[i].top1());
      if (results[i].mean_kl() < results[best].mean_kl()) best = i;
    }
    if (!options_.json) fmt::print("{:<14} {:<12} chosen\n", what, candidates[best].label);
    return best;
  }

 private:
  const ProfileOptions& options_;
  Session& session_;
  std::vector<ForcedRecord> records_;
};

constexpr double kAlphas[] = {0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25};  // specs 4.5
constexpr double kEta1[] = {0, 1.0 / 6, 0.25, 2.0 / 6};              // specs 6.6
constexpr double kEta2[] = {0, 0.045, 0.09};

[[noreturn]] void refuse_out(const std::string& path) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--out {} cannot be written; give a file in a folder that can", path));
}

int run_profile(const ProfileOptions& options) {
  std::vector<ForcedRecord> records = read_forced_records(options.data);
  if (records.size() > static_cast<size_t>(options.records)) {
    records.resize(static_cast<size_t>(options.records));
  }
  std::ofstream file(options.out, std::ios::app);  // refused before anything is measured
  if (!file) refuse_out(options.out);
  file.close();
  TerminalWatch watch(/*quiet=*/false);
  Session session(options.session, &watch);
  Profiler profiler(options, session, std::move(records));
  PolicyProfile profile;
  const auto wanted = [&](const char* policy) {
    return !interrupted() &&
           (options.policies.empty() || std::find(options.policies.begin(), options.policies.end(),
                                                  policy) != options.policies.end());
  };
  if (wanted("prefixkv")) {
    profile.forget = profiler.forget_ratios();
    profile.forget_keep = options.keep;
    for (size_t layer = 0; layer < profile.forget.size() && !options.json; ++layer) {
      fmt::print("prefixkv       layer {:<6} keeps {:.3f}\n", layer, 1 - profile.forget[layer]);
    }
  }
  if (wanted("calibquant")) {
    std::vector<Candidate> candidates;
    std::vector<std::pair<double, double>> taus;
    for (int low = 0; low <= 3; ++low) {
      for (int high = 0; high <= 3; ++high) {
        taus.emplace_back(low, high);
        candidates.push_back(
            {fmt::format("calibquant,tau={}:{}", low, high), fmt::format("tau {}:{}", low, high)});
      }
    }
    profile.tau = taus[profiler.best_of("calibquant", candidates)];
  }
  if (wanted("head_quantile")) {
    std::vector<Candidate> candidates;
    for (const double alpha : kAlphas) {
      candidates.push_back(
          {fmt::format("head_quantile,alpha={}", alpha), fmt::format("alpha {}", alpha)});
    }
    profile.alpha = kAlphas[profiler.best_of("head_quantile", candidates)];
  }
  if (wanted("xquant")) {
    std::vector<Candidate> candidates;
    std::vector<std::pair<double, double>> etas;
    for (const double one : kEta1) {
      for (const double two : kEta2) {
        etas.emplace_back(one, two);
        candidates.push_back({fmt::format("xquant,eta1={},eta2={}", one, two),
                              fmt::format("eta {:.3f}:{:.3f}", one, two)});
      }
    }
    profile.eta = etas[profiler.best_of("xquant", candidates)];
  }
  if (interrupted()) return kExitInterrupted;
  const std::string text = profile_text(profile, std::string(session.model().name()));
  file.open(options.out, std::ios::trunc);
  file << text;
  file.close();
  if (!file) refuse_out(options.out);
  if (options.json) {
    fmt::print("{}\n", text);
  } else {
    fmt::print("wrote {}; give it to vlm-run --kv-profile\n", options.out);
  }
  return 0;
}

}  // namespace

std::function<int()> add_profile(CLI::App& app) {
  const auto options = std::make_shared<ProfileOptions>();
  options->session.device = "cpu";  // what caches hold is looked at on the host
  app.add_option("-m,--model", options->session.model, "As vlm-run's -m")->capture_default_str();
  app.add_option("--data", options->data, "JSON lines: id, image or images, prompt, text")
      ->required();
  app.add_option("--out", options->out, "File for what was measured")->required();
  app.add_flag("--json", options->json, "The file's text on stdout too, instead of lines");
  app.add_option("--policy", options->policies, "Only these; repeatable")
      ->check(CLI::IsMember({"prefixkv", "calibquant", "head_quantile", "xquant"}));
  app.add_option("--keep", options->keep, "Share of tokens that PrefixKV keeps")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  app.add_option("--records", options->records, "First records of the data")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("-n,--max-tokens", options->max_tokens, "Forced tokens of a record at most")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("-t,--threads", options->session.threads, "CPU threads; 0 is one per core");
  return [options] {
    catch_interrupts();
    return run_profile(*options);
  };
}

}  // namespace kvlm
