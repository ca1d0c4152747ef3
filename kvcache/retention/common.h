#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvcache/retention.h"
#include "kvcache/spec/policy.h"

// Shared by retention rules: ranking, tied layers, eviction in decode, option tables.
namespace kvlm::retention {

// ----------------------------------------------------------------------------------------- scores

/// Scores that sum to 1. Negative and non-finite scores count as 0; if no score is left, all are
/// equal.
std::vector<double> normalised(std::span<const double> scores);

/// Mean over kv_heads: (kv_heads, n) to (n,).
std::vector<double> head_mean(std::span<const double> scores, int kv_heads);

/// The `kept` tokens that stay, ascending: the first `sinks`, the last `last` and the best others,
/// ties to the smaller index (docs/formulas.md, "Ranking"). Scores must be finite. If sinks and
/// last alone exceed `kept`, the newest have priority.
std::vector<int32_t> keep_best(std::span<const double> scores, int kept, int sinks, int last);

/// Sinks and last tokens of a prompt, which stay whatever their scores. They count in the budget.
struct Ends {
  int sinks = 0;  ///< first tokens
  int last = 1;   ///< last tokens: see tail()

  /// From the options sinks and last.
  static Ends from(const OptionValues& options);

  /// Last tokens that stay if `kept` tokens stay: at most half, so that others get a share, and not
  /// in place of sinks.
  int tail(int kept) const noexcept {
    return std::clamp(std::min(kept / 2, kept - sinks), 1, last);
  }
  /// Minimum per layer, if it has as many: the sinks, the last token and one by score.
  int least() const noexcept { return sinks + 2; }
  /// Sinks and the last token: the minimum of rules that were published without sinks.
  int alone() const noexcept { return sinks + 1; }
};

/// 0..n-1.
std::vector<int32_t> all_rows(int n);

/// Moving average over `kernel` neighbours, an odd number, with zeros beyond the ends; the divisor
/// is always `kernel` (SnapKV).
std::vector<double> pooled(std::span<const double> scores, int kernel);

// ---------------------------------------------------------------------------------------- budgets

/// keep * n to the nearest integer, ties to even.
int rounded_rows(double keep, int n) noexcept;
/// keep * n rounded down, tolerating rounding errors: 0.29 * 100 is 29.
int floored_rows(double keep, int n) noexcept;
/// The budget of all layers: keep * layers * n to the nearest integer.
int64_t total_rows(double keep, int layers, int n) noexcept;

// ------------------------------------------------------------------------------------------ units

/// Layers that share one selection, with their entries in prompt.importance. select() for
/// prompt.layer has one unit; otherwise there is one per layer or pair, in order of first layers.
struct Unit {
  std::vector<int> layers;  ///< layer numbers of the decoder
  std::vector<int> rows;    ///< indices in prompt.importance and prompt.sparsity
  int size() const noexcept { return static_cast<int>(layers.size()); }
};
std::vector<Unit> units_of(const PromptView& prompt, std::span<const int> pairs);

/// How attention summed over all queries of a prompt becomes a score.
enum class Score : uint8_t {
  kSums,   ///< unchanged, which favours early tokens: more queries see them
  kMeans,  ///< divided by the number of queries that see the token
};

/// (n,) scores of a unit: each layer's mean over kv_heads, normalised to sum 1, summed over the
/// unit's layers and normalised again (docs/formulas.md, "Scores").
std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit,
                                Score score = Score::kSums);
/// The same for one kv_head.
std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit, int kv_head);

/// (n,) scores of a unit from PromptView.row_scores, for one kv_head or, with -1, the mean over
/// all. Each list is divided by its mean magnitude, so that heads and layers have equal weight,
/// then averaged. A non-finite entry counts as the least of its list.
std::vector<double> unit_row_scores(const PromptView& prompt, const Unit& unit, int kv_head);

/// Expands one selection per unit to one per requested layer.
std::vector<LayerSelection> by_layer(const PromptView& prompt, std::span<const Unit> units,
                                     std::vector<LayerSelection> selections);

/// The same, with selections from choose(unit).
template <class Choose>
std::vector<LayerSelection> for_units(const PromptView& prompt, std::span<const int> pairs,
                                      const Choose& choose) {
  const std::vector<Unit> units = units_of(prompt, pairs);
  std::vector<LayerSelection> selections;
  for (const Unit& unit : units) selections.push_back(choose(unit));
  return by_layer(prompt, units, std::move(selections));
}

/// Keeps all tokens in every requested layer.
std::vector<LayerSelection> keep_everything(const PromptView& prompt, bool per_head = false);

// ----------------------------------------------------------------------------------------- decode

/// Most tokens of a layer that evicts nothing in decode.
int growing_peak(int kept, int prompt_rows, int max_rows) noexcept;

/// Eviction to a budget (docs/formulas.md, "Eviction"). After step t a layer of n tokens has n -
/// max(kept, (N + t)(1 - forget)) tokens too many; if that is at least 1, exactly one is evicted.
/// Departure: a layer never shrinks below the tokens kept at the prompt's end (clamped budgets
/// would shrink again). Sinks are never evicted; the fallback of a layer with few tokens could do
/// so [S].
///
/// The rule chooses the token. Published rules use its index alone, and so evict the end of the
/// prompt, the question, among the first. Ours spare both ends of the prompt (docs/formulas.md,
/// "Eviction").
struct PlaceEviction {
  enum class Rule : uint8_t {
    kNone,
    kScore,         ///< the prompt token of least score; if none is left, as kWindow
    kWindow,        ///< the oldest of the newest `distance` tokens
    kFixedIndex,    ///< index kept - distance: the published code
    kSliding,       ///< index n - distance: the paper; constant distance to the newest token
    kStep,          ///< least attention in this step; at most `kept` tokens after it
    kStepToBudget,  ///< the same to the budget, sparing sinks and the newest `tail` tokens
  };
  Rule rule = Rule::kFixedIndex;
  int distance = 25;
  Ends ends;

  /// From the options evict and distance, and sinks and last if the rule has them.
  static PlaceEviction from(const OptionValues& options, const PolicyContext& context);

  /// The rule uses the prompt's scores, so selections must have them.
  bool scored() const noexcept {
    return rule == Rule::kScore || rule == Rule::kWindow || rule == Rule::kStep;
  }
  /// Retention::evict().
  int evict(const DecodeView& view) const noexcept;
  /// Retention::least_weight().
  std::optional<LeastWeight> least_weight(const DecodeView& view) const noexcept;
  int peak_rows(int kept, double forget, int prompt_rows, int max_rows) const noexcept;
  /// Upper bound for any division of `total` kept tokens over layers that forget 1 - kept / N each.
  int64_t peak_rows_total(int64_t total, int layers, int prompt_rows, int max_rows) const noexcept;

 private:
  int spared(const DecodeView& view) const noexcept;
  LeastWeight least_of(const DecodeView& view) const noexcept;
};

// ---------------------------------------------------------------------------------------- options

inline constexpr OptionInfo kKeep{.key = "keep",
                                  .type = OptionInfo::Type::kReal,
                                  .low = 0.001,
                                  .high = 1,
                                  .standard = "0.5",
                                  .help =
                                      "fraction of the prompt's tokens that is kept (compression "
                                      "ratio 1 - keep); 1 keeps everything"};
inline constexpr OptionInfo kSinks{.key = "sinks",
                                   .type = OptionInfo::Type::kInteger,
                                   .low = 0,
                                   .high = 1024,
                                   .standard = "1",
                                   .help =
                                       "first tokens of the prompt (attention sinks), which are "
                                       "always kept, also where keep is less"};
/// sinks= of a rule that was published without sinks.
inline constexpr OptionInfo kOurSinks{.key = "sinks",
                                      .type = OptionInfo::Type::kInteger,
                                      .low = 0,
                                      .high = 1024,
                                      .standard = "1",
                                      .official = "0",
                                      .paper = "0",
                                      .help = kSinks.help};
inline constexpr OptionInfo kLast{
    .key = "last",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 1024,
    .standard = "16",
    .official = "1",
    .paper = "1",
    .help = "last tokens of the prompt that are always kept, up to half of the budget"};
inline constexpr OptionInfo kScore{
    .key = "score",
    .choices = "means|sums",
    .standard = "means",
    .official = "sums",
    .paper = "sums",
    .help =
        "how attention over the prompt becomes a score. means: divided by the number of queries "
        "that can see the token; sums: not divided, which favours early tokens"};
inline constexpr OptionInfo kEvict{
    .key = "evict",
    .choices = "auto|score|window|fixed_index|sliding|none",
    .standard = "auto",
    .official = "fixed_index",
    .paper = "sliding",
    .help =
        "which token decode evicts once a layer exceeds its budget. score: the prompt token of "
        "lowest score. window: the oldest of the newest distance= tokens. Neither touches sinks or "
        "last. fixed_index: always the same index, as in the published code. sliding: always "
        "distance= from the end, as in the paper. none: no token. auto: window with a quantizer, "
        "else score"};
inline constexpr OptionInfo kEvictIfAsked{
    .key = "evict",
    .choices = "none|score|window|fixed_index|sliding",
    .standard = "none",
    .help =
        "which token decode evicts, with the values of prefixkv, to compare at equal sizes; none, "
        "as published: no token"};
inline constexpr OptionInfo kDistance{
    .key = "distance",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 4096,
    .standard = "25",
    .help = "tokens between the evicted one and the end of the sequence"};

inline constexpr OptionInfo kWindow{
    .key = "window",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 4096,
    .standard = "64",
    .help = "last tokens of the prompt: their queries score the others, and they are kept"};
inline constexpr OptionInfo kKernel{
    .key = "kernel",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 63,
    .standard = "5",
    .help = "neighbouring tokens over which scores are averaged; an odd number"};
inline constexpr OptionInfo kHeadShared{
    .key = "head_shared",
    .choices = "off|on",
    .standard = "off",
    .help = "on: one set of tokens for all heads of a layer; off: one per KV head"};

/// The value of kScore.
Score score_from(const OptionValues& options);
/// The value of kKernel; throws Error{kInvalidArgument} if it is even.
int kernel_from(const OptionValues& options);

/// Factory of a rule of type R, for the registry.
template <class R>
std::unique_ptr<Retention> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<R>(options, context);
}

/// With keep=1 a rule does nothing.
inline bool keeps_everything(double keep) noexcept { return keep >= 1; }

/// A rule with PlaceEviction in decode, and one set of tokens for all kv_heads.
class PlacedRule : public Retention {
 public:
  PlacedRule(double keep, const PlaceEviction& eviction) : keep_(keep), eviction_(eviction) {}

  bool same_in_all_layers() const noexcept override { return identity(); }
  bool evicts() const noexcept override {
    return eviction_.rule != PlaceEviction::Rule::kNone && !identity();
  }
  int evict(const DecodeView& view) const noexcept override { return eviction_.evict(view); }
  bool evicts_by_score() const noexcept override {
    return eviction_.rule == PlaceEviction::Rule::kScore && !identity();
  }
  std::optional<LeastWeight> least_weight(const DecodeView& view) const noexcept override {
    return eviction_.least_weight(view);
  }
  int peak_rows(int kept, double forget, int prompt_rows, int max_rows) const noexcept override {
    return eviction_.peak_rows(kept, forget, prompt_rows, max_rows);
  }

 protected:
  bool identity() const noexcept { return keeps_everything(keep_); }
  /// Adds the tokens that one kv_head, or all of them, keep: both ends of the prompt (at least
  /// `tail` last tokens), and those of the best scores.
  void add_best(LayerSelection& selection, std::span<const double> scores, int kept,
                int tail = 1) const;
  double keep() const noexcept { return keep_; }
  const PlaceEviction& eviction() const noexcept { return eviction_; }

 private:
  double keep_;
  PlaceEviction eviction_;
};

}  // namespace kvlm::retention
