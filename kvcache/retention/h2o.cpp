#include <algorithm>
#include <array>

#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    kHeadShared,
    OptionInfo{.key = "prefill_only",
               .choices = "off|on",
               .standard = "off",
               .help = "on: tokens are evicted at the end of the prompt only; off: in decode too"},
    OptionInfo{
        .key = "colmean",
        .choices = "off|on",
        .standard = "off",
        .help =
            "on: scores are divided by the number of queries that can see the token, without a "
            "recent half and in prefill only (observed attention of kvpress); off: as published"},
};

/// Keeps the newest tokens and, in equal number, the heavy hitters: those with most attention over
/// the prompt and all steps since. Each kv_head has its own set, equally many.
///
/// Keeps floor(r N) tokens, the recent half of them rounded up. Each decode step evicts the token
/// with the least attention that is not recent; on ties the newest. Equal halves, and scores that
/// continue in decode, follow [G].
///
/// colmean=on is NVIDIA/kvpress's "observed attention" [K]: the mean over the queries that see a
/// slot instead of the sum, no recent half, no eviction in decode. Departure: the prompt's last
/// token stays here too, as with every rule.
///
/// Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle" [G]; docs/formulas.md, "H2O".
class H2o final : public Retention {
 public:
  struct Settings {
    double keep = 1;
    bool head_shared = false;
    bool prefill_only = false;
    bool colmean = false;
  };
  explicit H2o(const Settings& settings) : settings_(settings) {}

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    using Weights = ImportanceNeeds::DecodeWeights;
    return {.rows = ImportanceNeeds::Rows::kAll,
            .decode_weights = evicts() ? Weights::kSummed : Weights::kNone};
  }
  bool per_head() const noexcept override { return !settings_.head_shared && !identity(); }
  bool same_in_all_layers() const noexcept override { return identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    return for_units(prompt, pairs, [&](const Unit& unit) {
      LayerSelection selection{{}, 1 - settings_.keep};
      if (settings_.head_shared) {
        selection.slots.push_back(chosen(unit_scores(prompt, unit)));
      } else {
        for (int h = 0; h < prompt.shape->kv_heads; ++h) {
          selection.slots.push_back(chosen(unit_scores(prompt, unit, h)));
        }
      }
      return selection;
    });
  }

  bool evicts() const noexcept override {
    return !identity() && !settings_.prefill_only && !settings_.colmean;
  }
  int evict(const DecodeView& view) const noexcept override {
    if (!evicts() || view.rows <= view.kept) return -1;
    return least_weighed(*least_weight(view), view.weights);
  }
  std::optional<LeastWeight> least_weight(const DecodeView& view) const noexcept override {
    if (!evicts()) return std::nullopt;
    return LeastWeight{.recent = recent(view.kept)};
  }

  int peak_rows(int kept, double /*forget*/, int prompt_rows,
                int max_rows) const noexcept override {
    const int growing = growing_peak(kept, prompt_rows, max_rows);
    return evicts() ? std::min(growing, kept + 1) : growing;
  }
  int peak_rows_of_layer(int /*layers*/, int prompt_rows, int max_rows) const noexcept override {
    return peak_rows(kept(prompt_rows), 0, prompt_rows, max_rows);
  }

 private:
  bool identity() const noexcept { return keeps_everything(settings_.keep); }
  int kept(int n) const noexcept { return std::max(1, floored_rows(settings_.keep, n)); }
  static int recent(int kept) noexcept { return (kept + 1) / 2; }

  std::vector<int32_t> chosen(std::vector<double> scores) const {
    const auto n = static_cast<int>(scores.size());
    if (settings_.colmean) {
      for (int j = 0; j < n; ++j) scores[static_cast<size_t>(j)] /= n - j;
    }
    return keep_best(scores, kept(n), /*sinks=*/0, settings_.colmean ? 1 : recent(kept(n)));
  }

  Settings settings_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext&) {
  H2o::Settings settings;
  settings.keep = options.real("keep");
  settings.head_shared = options.text("head_shared") == "on";
  settings.prefill_only = options.text("prefill_only") == "on";
  settings.colmean = options.text("colmean") == "on";
  return std::make_unique<H2o>(settings);
}

}  // namespace

const RetentionEntry h2o{
    {.name = "h2o",
     .kind = PartKind::kRetention,
     .source = "H2O",
     .stores = "per KV head, half of the budget for recent tokens and half for those with the most "
               "accumulated attention",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "h2o,keep=0.4",
     .arxiv = "2306.14048"},
    make_rule};

}  // namespace kvlm::retention
