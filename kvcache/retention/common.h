#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvcache/retention.h"
#include "kvcache/spec/policy.h"

// What retention rules share: ranking, tied layers, eviction in decode, option rows.
namespace kvlm::retention {

// ----------------------------------------------------------------------------------------- scores

/// Scores that sum to 1. Those that are negative or not finite count as 0; if all do, all are
/// equal.
std::vector<double> normalised(std::span<const double> scores);

/// Mean over kv_heads: (kv_heads, n) to (n,).
std::vector<double> head_mean(std::span<const double> scores, int kv_heads);

/// The `kept` rows that stay, ascending: the first `sinks`, the last `last` and the best others,
/// ties by the smaller index (docs/formulas.md, "Ranking"); scores are finite. Where protected
/// rows alone exceed `kept`, the newest go first to safety.
std::vector<int32_t> keep_best(std::span<const double> scores, int kept, int sinks, int last);

/// The ends of a prompt, which stay whatever their scores: inside the budget, never on top of it.
struct Ends {
  int sinks = 0;  ///< first rows
  int last = 1;   ///< last rows: see tail()

  /// From the options sinks and last.
  static Ends from(const OptionValues& options);

  /// Rows of the tail where `kept` rows stay: at most half, so that the others have a share, and in
  /// no sink's place.
  int tail(int kept) const noexcept {
    return std::clamp(std::min(kept / 2, kept - sinks), 1, last);
  }
  /// No layer keeps fewer rows, if it has them: the sinks, the last row and one by its score.
  int least() const noexcept { return sinks + 2; }
  /// Rows of the sinks and the last row alone: the least of rules that were published without
  /// sinks.
  int alone() const noexcept { return sinks + 1; }
};

/// 0..n-1.
std::vector<int32_t> all_rows(int n);

/// Averages over `kernel` neighbours, an odd number; beyond the ends lie zeros, and the divisor is
/// always `kernel` (SnapKV).
std::vector<double> pooled(std::span<const double> scores, int kernel);

// ---------------------------------------------------------------------------------------- budgets

/// r * n to the nearest integer, ties to even.
int rounded_rows(double keep, int n) noexcept;
/// r * n rounded down, forgiving the error of its product: 0.29 * 100 is 29.
int floored_rows(double keep, int n) noexcept;
/// The budget of all layers: r * layers * n to the nearest integer.
int64_t total_rows(double keep, int layers, int n) noexcept;

// ------------------------------------------------------------------------------------------ units

/// The layers that a call of select() is about: entries of prompt.importance, each with the layers
/// that share its selection. One entry for prompt.layer alone, else one for every layer or pair, by
/// their first layer.
struct Unit {
  std::vector<int> layers;  ///< numbers of the decoder's layers
  std::vector<int> rows;    ///< where they are in prompt.importance and prompt.sparsity
  int size() const noexcept { return static_cast<int>(layers.size()); }
};
std::vector<Unit> units_of(const PromptView& prompt, std::span<const int> pairs);

/// How attention summed over all rows of a prompt becomes a score.
enum class Score : uint8_t {
  kSums,   ///< as it is, which favours early rows: more rows can look at them
  kMeans,  ///< divided by the rows that can look
};

/// (n,) scores of a unit: each layer's mean over kv_heads, normalised to sum 1, summed over the
/// unit's layers and normalised again (docs/formulas.md, "Scores").
std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit,
                                Score score = Score::kSums);
/// The same of one kv_head.
std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit, int kv_head);

/// (n,) of a unit, from PromptView.row_scores, for one kv_head or, with -1, the mean over all: each
/// list divided by its mean magnitude, so that heads and layers count alike, and averaged. An entry
/// that is not finite counts as the least of its list.
std::vector<double> unit_row_scores(const PromptView& prompt, const Unit& unit, int kv_head);

/// A selection for every layer that was asked for, from one for every unit.
std::vector<LayerSelection> by_layer(const PromptView& prompt, std::span<const Unit> units,
                                     std::vector<LayerSelection> selections);

/// The same, where choose(unit) selects for a unit.
template <class Choose>
std::vector<LayerSelection> for_units(const PromptView& prompt, std::span<const int> pairs,
                                      const Choose& choose) {
  const std::vector<Unit> units = units_of(prompt, pairs);
  std::vector<LayerSelection> selections;
  for (const Unit& unit : units) selections.push_back(choose(unit));
  return by_layer(prompt, units, std::move(selections));
}

/// Everything stays, in every layer that was asked for.
std::vector<LayerSelection> keep_everything(const PromptView& prompt, bool per_head = false);

// ----------------------------------------------------------------------------------------- decode

/// Most rows of a layer that drops nothing in decode.
int growing_peak(int kept, int prompt_rows, int max_rows) noexcept;

/// Eviction to a budget (docs/formulas.md, "Eviction"): after step t a layer of n rows holds n -
/// max(kept, (N + t)(1 - forget)) rows too many; if that is at least 1, exactly one goes.
/// Departure: never below the rows kept when the prompt ended (clamped budgets would shrink again),
/// and never a sink, which the fallback of a layer with few rows could hit [S].
///
/// Which one, is the rule's. Published rules go by place alone; so they drop the end of the prompt,
/// the question, among the first. Ours spare both ends of the prompt (docs/formulas.md,
/// "Eviction").
struct PlaceEviction {
  enum class Rule : uint8_t {
    kNone,
    kScore,       ///< the prompt's row of least score, then as kWindow
    kWindow,      ///< the oldest of the newest `distance` rows
    kFixedIndex,  ///< index kept - distance: the published code
    kSliding,     ///< index n - distance: the paper; distance to the newest row is constant
    kStep,        ///< the least attention in this step; a layer never holds more than `kept` rows
  };
  Rule rule = Rule::kFixedIndex;
  int distance = 25;
  Ends ends;

  /// From the options evict, distance and, where there are such, sinks and last.
  static PlaceEviction from(const OptionValues& options, const PolicyContext& context);

  /// Selections must have scores.
  bool scored() const noexcept {
    return rule == Rule::kScore || rule == Rule::kWindow || rule == Rule::kStep;
  }
  /// Retention::evict().
  int evict(const DecodeView& view) const noexcept;
  /// Retention::least_weight().
  std::optional<LeastWeight> least_weight(const DecodeView& view) const noexcept;
  int peak_rows(int kept, double forget, int prompt_rows, int max_rows) const noexcept;
  /// Upper bound over all splits of `total` kept rows over layers that forget 1 - kept / N each.
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
/// sinks= of a rule that was published without.
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

/// The registry's way of making a rule of type R.
template <class R>
std::unique_ptr<Retention> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<R>(options, context);
}

/// Rules that may do nothing at all: keep=1.
inline bool keeps_everything(double keep) noexcept { return keep >= 1; }

/// A rule whose decode is PlaceEviction, with one set of rows for all kv_heads.
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
  /// Adds the rows that a kv_head, or all of them, keep: both ends of the prompt, of which the tail
  /// has at least `tail` rows, and those of the best scores.
  void add_best(LayerSelection& selection, std::span<const double> scores, int kept,
                int tail = 1) const;
  double keep() const noexcept { return keep_; }
  const PlaceEviction& eviction() const noexcept { return eviction_; }

 private:
  double keep_;
  PlaceEviction eviction_;
};

}  // namespace kvlm::retention
