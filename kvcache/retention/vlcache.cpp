#include <algorithm>
#include <array>
#include <cmath>

#include "kvcache/retention/common.h"
#include "kvcache/retention/prefix_fit.h"
#include "kvcache/spec/policies.h"

// VL-Cache: attention of the text after the images ranks the tokens, and its sparsity divides the
// budget among the layers (docs/formulas.md, "VL-Cache").
namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "recent",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 1,
               .standard = "0.1",
               .help = "share of a layer's budget for its newest tokens"},
    OptionInfo{.key = "head_shared",
               .choices = "off|on",
               .standard = "on",
               .official = "off",
               .paper = "off",
               .help = kHeadShared.help},
    kOurSinks,
    kLast,
    OptionInfo{.key = kEvict.key,
               .choices = kEvict.choices,
               .standard = kEvict.standard,
               .official = "none",
               .paper = "none",
               .help = kEvict.help},
    kDistance,
};

/// The text after an image chooses, and layers with dense attention keep more.
///
/// Scores are the attention of the tokens after the last visual one (the last 32 if there are none)
/// to all tokens, visual or not; one set of tokens for all heads, or one per kv_head by its own
/// scores (head_shared=off). Layer sparsity g_l is the share of entries below a hundredth of their
/// row's largest, over what those tokens see and all heads. A layer keeps (1 - g_l) / sum_k (1 -
/// g_k) r L of its tokens, 1 % to 100 %. Then tokens are added or removed one at a time, as in
/// PrefixKV's fit, until the total is round(r L N). The newest ceil(recent m) tokens stay, except
/// in place of sinks, the others by score. Decode evicts (docs/formulas.md, "Eviction"). At least
/// sinks + 1 tokens of a layer stay [S].
///
/// Source: Tu et al. 2024, "VL-Cache", 3.2, eq. 1 and 2, algorithm 1, 5 (arXiv 2410.23317), through
/// descriptions that quote it; docs/formulas.md, "VL-Cache". No code was published:
/// profile=official is the paper's. From the paper are scores, threshold, sparsity by head and its
/// mean, budgets, both clips, the recent tenth, scores by head. Departures:
///   - heads share their tokens and decode evicts, unless profile=paper: the paper selects once,
///     and generated tokens stay.
///   - sinks and the prompt's last tokens stay (profile=paper: the last token).
///   - clipped budgets are brought back to the total [S], so that rules are compared at equal
///     bytes; the paper's total then differs. If none is clipped, that only moves rounded tokens.
/// Our choices, as the paper does not state them: rounding (to the nearest; recent tokens up), what
/// chooses if no text follows an image (the last 32 tokens), heads that share a kv_head (their
/// mean), ties (the earlier token), whether the recent tenth is VL-Cache's or only that of what it
/// is compared with (its own).
class VlCache final : public PlacedRule {
 public:
  VlCache(double keep, double recent, bool head_shared, const PlaceEviction& eviction)
      : PlacedRule(keep, eviction), recent_(recent), head_shared_(head_shared) {}

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    return {.rows = ImportanceNeeds::Rows::kPostVision, .sparsity = true};
  }
  bool per_head() const noexcept override { return !head_shared_ && !identity(); }
  bool joint() const noexcept override { return !identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const int n = prompt.rows;
    const std::vector<Unit> units = units_of(prompt, pairs);
    std::vector<LayerDemand> demands;
    for (const Unit& unit : units) {
      demands.push_back({lorenz_curve(unit_scores(prompt, unit)), unit.size()});
    }
    std::vector<int> kept = rows_by_density(prompt, units);
    const FitRules rules{.total = total_rows(keep(), prompt.shape->layers, n),
                         .least = eviction().ends.alone()};
    repair(demands, rules, kept);
    std::vector<LayerSelection> selections;
    for (size_t u = 0; u < units.size(); ++u) {
      const int newest = std::max(1, static_cast<int>(std::ceil(recent_ * kept[u] - 1e-9)));
      selections.push_back({{}, 1 - static_cast<double>(kept[u]) / n});
      if (head_shared_) add_best(selections.back(), unit_scores(prompt, units[u]), kept[u], newest);
      for (int h = 0; h < prompt.shape->kv_heads && !head_shared_; ++h) {
        add_best(selections.back(), unit_scores(prompt, units[u], h), kept[u], newest);
      }
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
    std::vector<double> density;  // per unit, the mean over its layers
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
  bool head_shared_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<VlCache>(options.real("keep"), options.real("recent"),
                                   options.text("head_shared") == "on",
                                   PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry vlcache{
    {.name = "vlcache",
     .kind = PartKind::kRetention,
     .source = "VL-Cache, algorithm 1",
     .stores = "the tokens that the text after the images attends to; layers with denser attention "
               "keep more",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "vlcache,keep=0.3",
     .arxiv = "2410.23317"},
    make_rule};

}  // namespace kvlm::retention
