// PyramidInfer: how many prompt tokens each layer keeps, which of those that the layer before kept,
// and which token decode evicts.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

using Type = OptionInfo::Type;

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "recent",
               .type = Type::kReal,
               .low = 0,
               .high = 1,
               .standard = "0.2",
               .help = "share of the prompt's tokens, the last ones, whose queries score the "
                       "others and which are kept; at most half of keep"},
    OptionInfo{.key = "weight",
               .type = Type::kReal,
               .low = 0,
               .high = 100,
               .standard = "1.2",
               .help = "weight of the newest of these queries; the oldest has weight 1, those "
                       "between are interpolated linearly"},
    OptionInfo{.key = "schedule",
               .choices = "cosine|geometric",
               .standard = "cosine",
               .paper = "geometric",
               .help = "factor by which the context shrinks from one layer to the next. cosine: "
                       "falls from 1 to decay over the layers; geometric: decay in every layer"},
    OptionInfo{.key = "decay",
               .type = Type::kReal,
               .low = 0.01,
               .high = 1,
               .standard = "0.9",
               .help = "factor of the last layer (cosine) or of every layer (geometric); 1 gives "
                       "all layers the same budget"},
    OptionInfo{.key = "least",
               .type = Type::kInteger,
               .low = 0,
               .high = 65536,
               .standard = "0",
               .official = "64",
               .help = "fewest context tokens that a layer keeps, also where keep is less"},
    OptionInfo{.key = "sinks",
               .type = Type::kInteger,
               .low = 0,
               .high = 1024,
               .standard = "4",
               .help = "first tokens of the prompt (attention sinks), which are always kept, also "
                       "where keep is less"},
    OptionInfo{.key = "evict",
               .choices = "step|none",
               .standard = "step",
               .official = "none",
               .help = "which token decode evicts. step: in every step, the context token that the "
                       "new token attends to least; none: no token of the prompt"},
};

/// The last tokens of the prompt choose, and each layer keeps fewer tokens than the one before, a
/// subset of those.
///
/// The recent tokens, 1 + floor(min(recent, r / 2) N) of them, stay. Their attention to the tokens
/// before, the context, is averaged over all heads and over the recent tokens, with weights on a
/// line from 1 to `weight`. Of the tokens that the layer before kept, the best stay, ties to the
/// earlier, and the first `sinks`: one set for all heads. A layer's share of the context is the
/// first one's times the `schedule`'s factors of the layers between, min(1, p s_l), with the p for
/// which round(r L N) tokens stay in all. At least `least` tokens of the context stay in a layer,
/// and sinks + 1 tokens. In decode a layer keeps its size: the token with least attention of the
/// new token is evicted. Sinks and the newest tokens, as many as were recent, are spared.
///
/// Source: Yang et al. 2024, "PyramidInfer", 3 and algorithm 1, from descriptions of it; its
/// published code, mutonix/pyramidinfer [C], for everything in numbers: the README and
/// modeling_llama_legacy.py. docs/formulas.md, "PyramidInfer". Departures:
///   - every token of the prompt passes through every layer, so a prompt is exact here and takes
///     its full memory; there dropped tokens are not computed in later layers, and observers attend
///     only to what is left.
///   - a layer's own attention chooses, as in algorithm 1; in the code that of the layer before.
///   - keep sets how much stays, and p follows; there p is 1, keep follows from the decay, lengths
///     are rounded down layer by layer, and a layer is cut only if `least` tokens remain.
///   - for larger models the code cuts every second layer. Not built.
///   - recent tokens are at most half of the kept ones [S]; there they exceed it at small budgets.
///   - decode: algorithm 1 selects again in every step by the recent tokens' weighted attention,
///     whose weights would have to be stored; here the new token's attention decides, one token per
///     step. The code, in its README and legacy file, keeps the prompt's tokens and thins generated
///     tokens that have left the recent fifth, 16 at a time, more in deeper layers. evict=none
///     equals that for answers shorter than a quarter of the prompt, of which no token leaves it.
///     The current file, modeling_llama_pyramidinfer.py, also thins the prompt's tokens in 14 to 15
///     of 32 layers at the first generated token. Not built.
class PyramidInfer final : public PlacedRule {
 public:
  struct Settings {
    double keep = 1;
    double recent = 0;
    float weight = 1;
    bool cosine = true;
    double decay = 1;
    int least = 0;
  };
  PyramidInfer(const Settings& settings, const PlaceEviction& eviction)
      : PlacedRule(settings.keep, eviction), settings_(settings) {}

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    using Weights = ImportanceNeeds::DecodeWeights;
    return {.rows = ImportanceNeeds::Rows::kLast,
            .last_rows = 1,
            .last_share = std::min(settings_.recent, keep() / 2),
            .newest_weight = settings_.weight,
            .decode_weights = evicts() ? Weights::kOfStep : Weights::kNone};
  }
  bool joint() const noexcept override { return !identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const int n = prompt.rows;
    const std::vector<Unit> units = units_of(prompt, pairs);
    const std::vector<int> context = context_rows(prompt.shape->layers, n);
    std::vector<LayerSelection> selections;
    std::vector<int32_t> alive = all_rows(n);
    for (const Unit& unit : units) {
      int rows = 0;
      for (const int layer : unit.layers) rows += context[static_cast<size_t>(layer)];
      const int kept = std::min(static_cast<int>(alive.size()), recent(n) + rows / unit.size());
      selections.push_back({{}, 1 - static_cast<double>(kept) / n});
      add_best(selections.back(), of_alive(unit_scores(prompt, unit), alive), kept, recent(n));
      alive = selections.back().slots.front();
    }
    return by_layer(prompt, units, std::move(selections));
  }

  int evict(const DecodeView& view) const noexcept override {
    if (!evicts() || view.rows <= view.kept) return -1;
    return least_weighed(*least_weight(view), view.weights);
  }
  std::optional<LeastWeight> least_weight(const DecodeView& view) const noexcept override {
    if (!evicts()) return std::nullopt;
    const int sinks = std::min(eviction().ends.sinks, view.kept - 1);
    return LeastWeight{.first = sinks,
                       .recent = std::min(recent(view.prompt_rows), view.kept - sinks)};
  }

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    if (identity()) return int64_t{layers} * growing_peak(prompt_rows, prompt_rows, max_rows);
    int64_t peak = 0;  // a pair's mean is rounded down
    for (const int context : context_rows(layers, prompt_rows)) {
      peak += peak_rows(recent(prompt_rows) + context, /*forget=*/0, prompt_rows, max_rows);
    }
    return peak;
  }
  int peak_rows_of_layer(int layers, int prompt_rows, int max_rows) const noexcept override {
    const int most =
        identity() ? prompt_rows : recent(prompt_rows) + context_rows(layers, prompt_rows).front();
    return peak_rows(most, /*forget=*/0, prompt_rows, max_rows);
  }

 private:
  int recent(int n) const noexcept { return std::min(n, needs().last_of(n)); }

  /// Scores of the tokens that the layer before kept; the others get the lowest score.
  static std::vector<double> of_alive(std::vector<double> scores, std::span<const int32_t> alive) {
    std::vector<double> left(scores.size(), -1);
    for (const int32_t row : alive) {
      left[static_cast<size_t>(row)] = scores[static_cast<size_t>(row)];
    }
    return left;
  }

  /// s_l: a layer's share of the context, relative to the first layer's.
  std::vector<double> shares(int layers) const {
    std::vector<double> share = {1};
    for (int l = 0; l + 1 < layers; ++l) {
      const double fallen = (1 - std::cos(std::numbers::pi * l / layers)) / 2;
      const double factor = 1 - (1 - settings_.decay) * (settings_.cosine ? fallen : 1);
      share.push_back(share.back() * factor);
    }
    return share;
  }

  /// Minimum of the context if layers keep `mean` of it on average: `least`, the sinks if they fit,
  /// and enough to keep the sinks and a recent token.
  int least_context(int mean, int recent) const noexcept {
    const int sinks = eviction().ends.sinks;
    return std::max({settings_.least, std::min(sinks, mean), sinks + 1 - recent, 0});
  }

  /// min(all, p s_l all) of every layer, at least `least`, with the largest p for a sum of at most
  /// `total`.
  std::vector<double> fitted(int layers, int all, int least, int64_t total) const {
    const std::vector<double> share = shares(layers);
    std::vector<double> rows(share.size());
    const auto fits = [&](double log2_p) {
      for (size_t l = 0; l < rows.size(); ++l) {
        rows[l] = std::clamp<double>(std::exp2(log2_p) * share[l] * all, least, all);
      }
      return std::accumulate(rows.begin(), rows.end(), 0.0) <= static_cast<double>(total);
    };
    double low = -64;
    double high = -std::log2(share.back());
    for (int i = 0; i < 64; ++i) {
      const double middle = (low + high) / 2;
      (fits(middle) ? low : high) = middle;
    }
    fits(low);
    return rows;
  }

  /// Context tokens that each layer keeps, never more than the layer before.
  std::vector<int> context_rows(int layers, int n) const {
    const int all = n - recent(n);
    const int64_t total = total_rows(keep(), layers, n) - int64_t{layers} * recent(n);
    const int least = std::min(all, least_context(static_cast<int>(total / layers), recent(n)));
    std::vector<int> rows;
    for (const double x : fitted(layers, all, least, total)) {
      rows.push_back(static_cast<int>(std::floor(x + 1e-6)));
    }
    int64_t left = total - std::accumulate(rows.begin(), rows.end(), int64_t{0});
    for (int& of_layer : rows) {
      if (left <= 0) break;
      if (of_layer == all) continue;
      ++of_layer;
      --left;
    }
    return rows;
  }

  Settings settings_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext&) {
  PyramidInfer::Settings settings;
  settings.keep = options.real("keep");
  settings.recent = options.real("recent");
  settings.weight = static_cast<float>(options.real("weight"));
  settings.cosine = options.text("schedule") == "cosine";
  settings.decay = options.real("decay");
  settings.least = options.integer("least");
  PlaceEviction eviction;
  // With keep=1 no layer has a size to keep.
  const bool evicts = options.text("evict") == "step" && !keeps_everything(settings.keep);
  eviction.rule = evicts ? PlaceEviction::Rule::kStep : PlaceEviction::Rule::kNone;
  eviction.ends.sinks = options.integer("sinks");
  return std::make_unique<PyramidInfer>(settings, eviction);
}

}  // namespace

const RetentionEntry pyramidinfer{
    {.name = "pyramidinfer",
     .kind = PartKind::kRetention,
     .source = "PyramidInfer, algorithm 1 and its code",
     .stores = "the last tokens of the prompt and those that they attend to most; each layer keeps "
               "fewer than the one before",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "pyramidinfer,keep=0.5",
     .arxiv = "2405.12532"},
    make_rule};

}  // namespace kvlm::retention
