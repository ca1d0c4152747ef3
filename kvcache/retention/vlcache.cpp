#include <algorithm>
#include <array>
#include <cmath>

#include "kvcache/policies.h"
#include "kvcache/retention/common.h"
#include "kvcache/retention/prefix_fit.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "recent",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 1,
               .standard = "0.1",
               .help = "share of a layer's budget that its newest rows take"},
    kOurSinks,
    kLast,
    kEvict,
    kDistance,
};

/// VL-Cache-style: the text after a picture chooses, and layers whose attention is dense keep more.
///
/// Scores are attention of the rows after the last visual one (the last 32 if there are none),
/// shared by all heads. Layer sparsity g_l is the share of entries below a hundredth of their row's
/// largest; a layer keeps (1 - g_l) / sum_k (1 - g_k) r L of its rows, 1 % to 100 %, then rows are
/// added or taken one at a time, as in PrefixKV's fit, until the total is round(r L N). The newest
/// ceil(recent m) rows stay, but for the sinks' places, the others by score. Decode evicts by place
/// (docs/arithmetic.md, "Eviction"). At least sinks + 1 rows of a layer stay [S].
///
/// The papers at hand confirm only the score, the budgets by sparsity and matched memory; the rest
/// is [G], and the repair is [S].
///
/// Source: Tu et al. 2024, "VL-Cache" [G]; docs/arithmetic.md, "VL-Cache".
class VlCache final : public PlacedRule {
 public:
  VlCache(double keep, double recent, const PlaceEviction& eviction)
      : PlacedRule(keep, eviction), recent_(recent) {}

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    return {.rows = ImportanceNeeds::Rows::kPostVision, .sparsity = true};
  }
  bool joint() const noexcept override { return !identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const int n = prompt.rows;
    const std::vector<Unit> units = units_of(prompt, pairs);
    std::vector<std::vector<double>> scores;
    std::vector<LayerDemand> demands;
    for (const Unit& unit : units) {
      scores.push_back(unit_scores(prompt, unit));
      demands.push_back({lorenz_curve(scores.back()), unit.size()});
    }
    std::vector<int> kept = rows_by_density(prompt, units);
    const FitRules rules{.total = total_rows(keep(), prompt.shape->layers, n),
                         .least = eviction().ends.alone()};
    repair(demands, rules, kept);
    std::vector<LayerSelection> selections;
    for (size_t u = 0; u < units.size(); ++u) {
      const int newest = std::max(1, static_cast<int>(std::ceil(recent_ * kept[u] - 1e-9)));
      selections.push_back({{}, 1 - static_cast<double>(kept[u]) / n});
      add_best(selections.back(), scores[u], kept[u], newest);
    }
    return by_layer(prompt, units, std::move(selections));
  }

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    const int64_t all = int64_t{layers} * std::max(prompt_rows, max_rows);
    if (identity()) return all;
    const int least = std::min(eviction().ends.alone(), prompt_rows);
    const int64_t total =
        std::max(total_rows(keep(), layers, prompt_rows), int64_t{layers} * least);
    return std::min(all, eviction().peak_rows_total(total, layers, prompt_rows, max_rows));
  }

 private:
  std::vector<int> rows_by_density(const PromptView& prompt, std::span<const Unit> units) const {
    const int layers = prompt.shape->layers;
    std::vector<double> density;  // of a unit, the mean over its layers
    double sum = 0;
    for (const Unit& unit : units) {
      double dense = 0;
      for (const int row : unit.rows) {
        dense += std::clamp(1 - prompt.sparsity[static_cast<size_t>(row)], 0.0, 1.0);
      }
      sum += dense;
      density.push_back(dense / unit.size());
    }
    std::vector<int> rows;
    for (const double dense : density) {
      const double share = sum > 0 ? dense / sum * layers : 1;
      rows.push_back(rounded_rows(std::clamp(share * keep(), 0.01, 1.0), prompt.rows));
    }
    return rows;
  }

  double recent_;
};

std::unique_ptr<Retention> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<VlCache>(options.real("keep"), options.real("recent"),
                                   PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry vlcache{
    {.name = "vlcache",
     .kind = PartKind::kRetention,
     .source = "VL-Cache (in its style)",
     .stores = "rows that the text after the pictures looks at, more of them in dense layers",
     .composes = "any quantizer; pairs of layers that share codes keep the same rows",
     .options = kOptions},
    make};

}  // namespace kvlm::retention
