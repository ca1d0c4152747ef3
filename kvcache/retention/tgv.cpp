#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

// The question after the images decides: its attention to them divides the budget over the layers
// (budgets()), and which visual tokens stay (scores()). Text stays as long as there is room.
namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "budgets",
               .choices = "exact|clipped",
               .standard = "exact",
               .official = "clipped",
               .paper = "clipped",
               .help =
                   "division of the tokens over the layers. exact: what a layer cannot use goes "
                   "to the others; clipped: it is lost, as in the published code"},
    OptionInfo{.key = "sinks",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 1024,
               .standard = "1",
               .official = "4",
               .paper = "4",
               .help = kSinks.help},
    kLast,
    OptionInfo{.key = "evict",
               .choices = "auto|score|window|step|none",
               .standard = "auto",
               .official = "step",
               .paper = "step",
               .help = "which token decode evicts once a layer exceeds its budget. step, as in the "
                       "published code: the one that the new token attends to least, but sinks and "
                       "as many of the newest as were kept after the images; other values as in "
                       "prefixkv: visual tokens of lowest score go first. auto: window with a "
                       "quantizer, else score"},
    kDistance};

/// Whole numbers of tokens for layers that ask for `wanted` of `total`, from `least` to n each: in
/// proportion, rounded down, and the missing ones to the largest fractions, the first of equals
/// first.
///   sizes  layers that share a selection, which count as many times
std::vector<int> divided(std::span<const double> wanted, std::span<const int> sizes, int64_t total,
                         int least, int n) {
  const int64_t layers = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  total = std::clamp(total, layers * least, layers * n);
  const auto held = [&](double scale) {
    std::vector<double> rows;
    for (const double x : wanted) rows.push_back(std::clamp<double>(scale * x, least, n));
    return rows;
  };
  const auto sum_of = [&](const std::vector<double>& rows) {
    return std::inner_product(rows.begin(), rows.end(), sizes.begin(), 0.0);
  };
  double low = 0;
  double high = 0;
  for (const double x : wanted) high = x > 0 ? std::max(high, n / x) : high;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (sum_of(held(middle)) <= static_cast<double>(total) ? low : high) = middle;
  }
  const std::vector<double> exact = held(low);
  std::vector<int> rows;
  for (const double x : exact) rows.push_back(static_cast<int>(std::floor(x + 1e-9)));
  std::vector<size_t> order(exact.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](size_t u) { return std::nearbyint((exact[u] - rows[u]) * 1e9); });
  int64_t left = total - std::inner_product(rows.begin(), rows.end(), sizes.begin(), int64_t{0});
  for (bool added = true; added;) {
    added = false;
    for (const size_t u : order) {
      if (rows[u] == n || sizes[u] > left) continue;
      ++rows[u];
      left -= sizes[u];
      added = true;
    }
  }
  return rows;
}

/// Keeps the text, as far as it fits, and the visual tokens that important words of the question
/// attend to. With A the attention averaged over heads, and i, p over the text after the last
/// image:
///
///   w_i   = mean of A_pi over the p >= i         what the rest of the question sees in a word
///   TWR_j = sum of w_i A_ij                      score of visual token j
///   X_l   = sum of A_ij over i and visual j      demand of layer l
///
/// Layer l keeps tokens in proportion to X_l, sum r L N: the first `sinks`, the last `last`, then
/// text, by its attention, then visual tokens by TWR. One set for all heads. Without text after the
/// images, or without images, budgets are equal and tokens rank by the attention of the last
/// min(N, 32) tokens.
///
/// Departures: budgets have the exact total (budgets=clipped: as published). Text is ranked by the
/// attention of the question, not of the whole prompt. Tokens of several images are those with
/// their tags; the published code takes as many as there are from the first on. Decode evicts as
/// PrefixKV does (evict=step: as published, but never below the tokens kept at the prompt's end).
///
/// Source: "TGV-KV", arXiv 2606.03075 (abstract) [P], and its code [C]; docs/formulas.md, "TGV-KV".
class Tgv final : public PlacedRule {
 public:
  Tgv(const OptionValues& options, const PolicyContext& context)
      : PlacedRule(options.real("keep"), eviction_of(options, context)),
        clipped_(options.text("budgets") == "clipped") {}

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    using Weights = ImportanceNeeds::DecodeWeights;
    const bool by_step = eviction().rule == PlaceEviction::Rule::kStepToBudget;
    return {.rows = ImportanceNeeds::Rows::kPostVision,
            .weighted_sums = true,
            .decode_weights = by_step ? Weights::kOfStep : Weights::kNone};
  }
  bool joint() const noexcept override { return !identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const std::vector<Unit> units = units_of(prompt, pairs);
    const bool guided = prompt.modality.back() == kTextRow && first_of_question(prompt) > 0;
    const std::vector<int> kept = budgets(prompt, units, guided);
    std::vector<LayerSelection> selections;
    for (size_t u = 0; u < units.size(); ++u) {
      selections.push_back({{}, 1 - static_cast<double>(kept[u]) / prompt.rows});
      LayerSelection& made = selections.back();
      add_best(made, scores(prompt, units[u], guided), kept[u]);
      if (!guided) continue;
      const auto question = std::ranges::lower_bound(made.slots[0], first_of_question(prompt));
      made.tail = std::max(1, static_cast<int>(made.slots[0].end() - question));
    }
    return by_layer(prompt, units, std::move(selections));
  }

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    if (identity()) return int64_t{layers} * max_rows;
    // Clipped ones round up to a token a layer, and raise layers to the least.
    const int64_t more = clipped_ ? int64_t{layers} * (least() + 1) : 0;
    const int64_t total =
        std::clamp(total_rows(keep(), layers, prompt_rows) + more,
                   int64_t{layers} * std::min(least(), prompt_rows), int64_t{layers} * prompt_rows);
    return eviction().peak_rows_total(total, layers, prompt_rows, max_rows);
  }

 private:
  static PlaceEviction eviction_of(const OptionValues& options, const PolicyContext& context) {
    PlaceEviction eviction = PlaceEviction::from(options, context);
    const bool by_step = options.text("evict") == "step";
    refuse_idle(options, "distance", by_step, "evict=step goes by attention");
    if (by_step) eviction.rule = PlaceEviction::Rule::kStepToBudget;
    return eviction;
  }

  int least() const noexcept {
    return clipped_ ? eviction().ends.alone() : eviction().ends.least();
  }

  /// The first text token after the last image; 0 without images.
  static int first_of_question(const PromptView& prompt) {
    const auto last = std::find_if(prompt.modality.rbegin(), prompt.modality.rend(),
                                   [](int16_t tag) { return tag != kTextRow; });
    return static_cast<int>(prompt.modality.rend() - last);
  }

  /// (n,) a list of sums of a unit's layers, mean over heads, summed over its layers.
  static std::vector<double> sums_of(const PromptView& prompt, std::span<const double> lists,
                                     const Unit& unit) {
    const auto n = static_cast<size_t>(prompt.rows);
    const auto heads = static_cast<size_t>(prompt.importance_heads());
    std::vector<double> sum(n, 0.0);
    for (const int row : unit.rows) {
      const std::vector<double> layer = head_mean(
          lists.subspan(static_cast<size_t>(row) * heads * n, heads * n), static_cast<int>(heads));
      for (size_t j = 0; j < n; ++j) sum[j] += std::isfinite(layer[j]) ? layer[j] : 0;
    }
    return sum;
  }

  /// Tokens of each unit.
  std::vector<int> budgets(const PromptView& prompt, std::span<const Unit> units,
                           bool guided) const {
    const int n = prompt.rows;
    const int least = std::min(this->least(), n);
    const int layers = prompt.shape->layers;
    std::vector<double> demand;  // of a layer
    std::vector<int> sizes;
    double all = 0;
    for (const Unit& unit : units) {
      const std::vector<double> sums = sums_of(prompt, prompt.importance, unit);
      double visual = 0;
      for (size_t j = 0; j < sums.size(); ++j) {
        if (prompt.modality[j] != kTextRow) visual += std::max(0.0, sums[j]);
      }
      demand.push_back(guided ? visual / unit.size() : 0);
      sizes.push_back(unit.size());
      all += demand.back() * unit.size();
    }
    for (double& x : demand) x = all > 0 ? x / all : 1.0 / layers;
    if (!clipped_) return divided(demand, sizes, total_rows(keep(), layers, n), least, n);
    std::vector<int> kept;
    for (const double share : demand) {
      const auto forget = static_cast<float>(1 - layers * keep() * share);
      const int dropped = static_cast<int>(std::nearbyint(static_cast<double>(forget) * n));
      kept.push_back(std::max(least, n - std::max(0, dropped)));
    }
    return kept;
  }

  /// (n,) text above every visual token, each in proportion to its kind.
  static std::vector<double> scores(const PromptView& prompt, const Unit& unit, bool guided) {
    const std::vector<double> plain = normalised(sums_of(prompt, prompt.importance, unit));
    if (!guided) return plain;
    const std::vector<double> weighted = normalised(sums_of(prompt, prompt.weighted, unit));
    std::vector<double> made;
    for (size_t j = 0; j < plain.size(); ++j) {
      made.push_back(prompt.modality[j] == kTextRow ? 1 + plain[j] : weighted[j]);
    }
    return made;
  }

  bool clipped_;
};

}  // namespace

const RetentionEntry tgv{
    {.name = "tgv",
     .kind = PartKind::kRetention,
     .source = "TGV-KV",
     .stores = "the text, as far as it fits, and the visual tokens that important words after the "
               "images attend to",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "tgv,keep=0.2",
     .arxiv = "2606.03075"},
    make<Tgv>};

}  // namespace kvlm::retention
