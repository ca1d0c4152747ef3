#include "kvcache/retention/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "kernels/base/error.h"

namespace kvlm::retention {

namespace {

/// Tolerance of a product of two numbers that should be an integer.
constexpr double kSlack = 1e-9;
/// Tolerance of a comparison with a budget, as in docs/formulas.md, "Eviction".
constexpr double kBudgetSlack = 1e-6;

std::vector<double> summed(const PromptView& prompt, const Unit& unit, int kv_head, Score score) {
  const auto n = static_cast<size_t>(prompt.rows);
  const auto heads = static_cast<size_t>(prompt.importance_heads());
  assert(kv_head < static_cast<int>(heads));
  std::vector<double> sum(n, 0.0);
  for (const int row : unit.rows) {
    const std::span<const double> layer =
        prompt.importance.subspan(static_cast<size_t>(row) * heads * n, heads * n);
    std::vector<double> scores =
        kv_head < 0 ? normalised(head_mean(layer, prompt.importance_heads()))
                    : normalised(layer.subspan(static_cast<size_t>(kv_head) * n, n));
    if (score == Score::kMeans) {
      for (size_t j = 0; j < n; ++j) scores[j] /= static_cast<double>(n - j);
      scores = normalised(scores);
    }
    for (size_t j = 0; j < n; ++j) sum[j] += scores[j];
  }
  return normalised(sum);
}

/// Scores scaled to a mean magnitude of 1, unless all are 0. Non-finite scores become the least.
std::vector<double> comparable(std::span<const double> scores) {
  std::vector<double> result(scores.begin(), scores.end());
  double least = std::numeric_limits<double>::infinity();
  double magnitude = 0;
  for (const double x : scores) {
    if (!std::isfinite(x)) continue;
    least = std::min(least, x);
    magnitude += std::abs(x) / static_cast<double>(scores.size());
  }
  if (!std::isfinite(least)) least = 0;
  for (double& x : result) {
    if (!std::isfinite(x)) x = least;
    if (magnitude > 0) x /= magnitude;
  }
  return result;
}

/// The budget of a layer after step t.
double budget_at(int kept, double forget, int prompt_rows, int step) noexcept {
  return std::max(static_cast<double>(kept),
                  static_cast<double>(prompt_rows + step) * (1 - forget));
}

}  // namespace

std::vector<double> normalised(std::span<const double> scores) {
  std::vector<double> result(scores.begin(), scores.end());
  double sum = 0;
  for (double& x : result) {
    if (!std::isfinite(x) || x < 0) x = 0;
    sum += x;
  }
  if (!(sum > 0)) {
    std::fill(result.begin(), result.end(), 1 / static_cast<double>(result.size()));
    return result;
  }
  for (double& x : result) x /= sum;
  return result;
}

std::vector<double> head_mean(std::span<const double> scores, int kv_heads) {
  const size_t n = scores.size() / static_cast<size_t>(kv_heads);
  std::vector<double> mean(n, 0.0);
  for (size_t h = 0; h < static_cast<size_t>(kv_heads); ++h) {
    for (size_t j = 0; j < n; ++j) mean[j] += scores[h * n + j];
  }
  for (double& x : mean) x /= kv_heads;
  return mean;
}

std::vector<int32_t> keep_best(std::span<const double> scores, int kept, int sinks, int last) {
  const auto n = static_cast<int>(scores.size());
  if (kept >= n) return all_rows(n);
  last = std::min(last, kept);
  sinks = std::min(sinks, kept - last);
  std::vector<int32_t> slots(static_cast<size_t>(sinks));
  std::iota(slots.begin(), slots.end(), 0);
  if (const int best = kept - sinks - last; best > 0) {
    const std::span<const double> others =
        scores.subspan(static_cast<size_t>(sinks), static_cast<size_t>(n - last - sinks));
    std::vector<double> parted(others.begin(), others.end());
    const auto least = parted.begin() + (best - 1);
    std::nth_element(parted.begin(), least, parted.end(), std::greater<>());
    // Keep all above the least kept score, and the first of those equal to it.
    auto equal = 1 + std::count(parted.begin(), least, *least);
    // Branch-free, since branches would be unpredictable: writes each index, advances if it is
    // kept.
    auto at = slots.size();
    slots.resize(at + others.size());
    for (size_t j = 0; j < others.size(); ++j) {
      const bool ties = others[j] == *least;
      slots[at] = sinks + static_cast<int32_t>(j);
      at += others[j] < *least || (ties && equal <= 0) ? 0 : 1;
      equal -= ties ? 1 : 0;
    }
    slots.resize(at);
  }
  for (int j = n - last; j < n; ++j) slots.push_back(j);
  return slots;
}

std::vector<int32_t> all_rows(int n) {
  std::vector<int32_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

std::vector<double> pooled(std::span<const double> scores, int kernel) {
  const auto n = static_cast<int>(scores.size());
  std::vector<double> result(scores.size());
  for (int j = 0; j < n; ++j) {
    double sum = 0;
    for (int i = std::max(0, j - kernel / 2); i <= std::min(n - 1, j + kernel / 2); ++i) {
      sum += scores[static_cast<size_t>(i)];
    }
    result[static_cast<size_t>(j)] = sum / kernel;
  }
  return result;
}

Score score_from(const OptionValues& options) {
  return options.text(kScore.key) == "means" ? Score::kMeans : Score::kSums;
}

int kernel_from(const OptionValues& options) {
  const int kernel = options.integer("kernel");
  if (kernel % 2 == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--kv {} has kernel={}, expected an odd number; use kernel={}",
                            options.info().name, kernel, kernel + 1));
  }
  return kernel;
}

int rounded_rows(double keep, int n) noexcept { return static_cast<int>(std::nearbyint(keep * n)); }

int floored_rows(double keep, int n) noexcept {
  return static_cast<int>(std::floor(keep * n + kSlack));
}

int64_t total_rows(double keep, int layers, int n) noexcept {
  return static_cast<int64_t>(std::nearbyint(keep * layers * n));
}

std::vector<Unit> units_of(const PromptView& prompt, std::span<const int> pairs) {
  if (prompt.layer >= 0) return {{{prompt.layer}, {0}}};
  std::vector<Unit> units;
  for (int l = 0; l < prompt.shape->layers; ++l) {
    const auto tied = [&](const Unit& unit) {
      return pairs[static_cast<size_t>(unit.layers[0])] == pairs[static_cast<size_t>(l)];
    };
    const auto unit = pairs.empty() ? units.end() : std::find_if(units.begin(), units.end(), tied);
    if (unit == units.end()) {
      units.push_back({{l}, {l}});
    } else {
      unit->layers.push_back(l);
      unit->rows.push_back(l);
    }
  }
  return units;
}

std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit, Score score) {
  return summed(prompt, unit, -1, score);
}

std::vector<double> unit_scores(const PromptView& prompt, const Unit& unit, int kv_head) {
  return summed(prompt, unit, kv_head, Score::kSums);
}

std::vector<double> unit_row_scores(const PromptView& prompt, const Unit& unit, int kv_head) {
  const auto n = static_cast<size_t>(prompt.rows);
  const auto kv_heads = static_cast<size_t>(prompt.shape->kv_heads);
  std::vector<double> mean(n, 0.0);
  for (const int row : unit.rows) {
    for (size_t head = 0; head < kv_heads; ++head) {
      if (kv_head >= 0 && head != static_cast<size_t>(kv_head)) continue;
      const size_t list = static_cast<size_t>(row) * kv_heads + head;
      const std::vector<double> scores = comparable(prompt.row_scores.subspan(list * n, n));
      for (size_t j = 0; j < n; ++j) mean[j] += scores[j];
    }
  }
  const double lists = unit.size() * (kv_head >= 0 ? 1.0 : static_cast<double>(kv_heads));
  for (double& x : mean) x /= lists;
  return mean;
}

std::vector<LayerSelection> by_layer(const PromptView& prompt, std::span<const Unit> units,
                                     std::vector<LayerSelection> selections) {
  assert(units.size() == selections.size());
  if (prompt.layer >= 0) return selections;
  std::vector<LayerSelection> layers(static_cast<size_t>(prompt.shape->layers));
  for (size_t u = 0; u < units.size(); ++u) {
    for (const int layer : units[u].layers) layers[static_cast<size_t>(layer)] = selections[u];
  }
  return layers;
}

std::vector<LayerSelection> keep_everything(const PromptView& prompt, bool per_head) {
  const int layers = prompt.layer >= 0 ? 1 : prompt.shape->layers;
  const int heads = per_head ? prompt.shape->kv_heads : 1;
  const LayerSelection all{
      std::vector<std::vector<int32_t>>(static_cast<size_t>(heads), all_rows(prompt.rows)), 0};
  return std::vector<LayerSelection>(static_cast<size_t>(layers), all);
}

void PlacedRule::add_best(LayerSelection& selection, std::span<const double> scores, int kept,
                          int tail) const {
  const Ends& ends = eviction_.ends;
  tail = std::min(std::max(tail, ends.tail(kept)), std::max(1, kept - ends.sinks));
  std::vector<int32_t> slots = keep_best(scores, kept, ends.sinks, tail);
  if (eviction_.scored()) {
    std::vector<float> of_slots;
    for (const int32_t slot : slots) {
      of_slots.push_back(static_cast<float>(scores[static_cast<size_t>(slot)]));
    }
    selection.scores.push_back(std::move(of_slots));
  }
  selection.slots.push_back(std::move(slots));
}

int growing_peak(int kept, int prompt_rows, int max_rows) noexcept {
  return kept + std::max(0, max_rows - prompt_rows);
}

Ends Ends::from(const OptionValues& options) {
  Ends ends;
  if (options.has(kSinks.key)) ends.sinks = options.integer(kSinks.key);
  if (options.has(kLast.key)) ends.last = options.integer(kLast.key);
  return ends;
}

PlaceEviction PlaceEviction::from(const OptionValues& options, const PolicyContext& context) {
  const std::string_view name = options.text("evict");
  PlaceEviction eviction;
  if (name == "none") eviction.rule = Rule::kNone;
  if (name == "sliding") eviction.rule = Rule::kSliding;
  if (name == "step") eviction.rule = Rule::kStep;
  // With a quantizer, so that packed tokens stay (docs/formulas.md, "Windows").
  if (name == "window" || (name == "auto" && context.with_quantizer)) {
    eviction.rule = Rule::kWindow;
  } else if (name == "score" || name == "auto") {
    eviction.rule = Rule::kScore;
  }
  refuse_idle(options, "distance", eviction.rule == Rule::kNone,
              "decode evicts nothing with evict=none");
  eviction.distance = options.integer("distance");
  eviction.ends = Ends::from(options);
  return eviction;
}

int PlaceEviction::evict(const DecodeView& view) const noexcept {
  if (rule == Rule::kNone) return -1;
  if (rule == Rule::kStep) return view.rows > view.kept ? spared(view) : -1;
  const double budget = budget_at(view.kept, view.forget, view.prompt_rows, view.step);
  if (static_cast<double>(view.rows) - budget + kBudgetSlack < 1) return -1;
  if (scored()) return spared(view);
  if (rule == Rule::kStepToBudget) {
    const LeastWeight of{.first = ends.sinks, .recent = view.tail};
    const int least = least_weighed(of, view.weights);
    return least >= 0 ? least : std::min(ends.sinks, view.rows - 2);
  }
  int index = (rule == Rule::kSliding ? view.rows : view.kept) - distance;
  if (index < 1) index = view.kept / 2;
  return std::min(std::max(index, ends.sinks), view.rows - 2);  // the newest token stays
}

/// Spares sinks, the end of the prompt and the newest slot.
LeastWeight PlaceEviction::least_of(const DecodeView& view) const noexcept {
  const int tail = view.scored - std::min(ends.tail(view.kept), view.scored);
  return {ends.sinks, tail, view.scored, /*recent=*/1};
}

std::optional<LeastWeight> PlaceEviction::least_weight(const DecodeView& view) const noexcept {
  LeastWeight least = least_of(view);
  if (rule == Rule::kScore) {
    least.spared_end = std::numeric_limits<int>::max();  // tokens without a score stay
    return least.spared > least.first ? std::optional(least) : std::nullopt;
  }
  if (rule != Rule::kStep) return std::nullopt;
  for (int slot = 0; slot < view.rows; ++slot) {
    if (least.may_drop(slot, view.rows)) return least;
  }
  return std::nullopt;  // spared() chooses by index
}

/// The slot to evict if both ends of the prompt are spared.
int PlaceEviction::spared(const DecodeView& view) const noexcept {
  const LeastWeight of = least_of(view);
  const int tail = of.spared;
  if (rule == Rule::kScore && tail > ends.sinks) return kLeastScore;
  if (rule == Rule::kStep) {
    const int least = least_weighed(of, view.weights);
    if (least >= 0) return least;
  }
  int index = std::max(view.rows - distance, ends.sinks);
  if (index >= tail && index < view.scored) index = view.scored;
  if (index <= view.rows - 2) return index;
  // No generated token is that old, so evict a prompt token; the newest token stays.
  return tail > ends.sinks ? tail - 1 : std::min(ends.sinks, view.rows - 2);
}

int PlaceEviction::peak_rows(int kept, double forget, int prompt_rows,
                             int max_rows) const noexcept {
  const int growing = growing_peak(kept, prompt_rows, max_rows);
  const int steps = max_rows - prompt_rows;
  if (rule == Rule::kNone || steps <= 0) return growing;
  if (rule == Rule::kStep) return kept + 1;
  // A step leaves fewer than budget + 1 tokens; the next one adds a token before it evicts one.
  const double budget = budget_at(kept, forget, prompt_rows, steps - 1);
  return std::min(growing, static_cast<int>(std::ceil(budget)) + 1);
}

int64_t PlaceEviction::peak_rows_total(int64_t total, int layers, int prompt_rows,
                                       int max_rows) const noexcept {
  const int steps = std::max(0, max_rows - prompt_rows);
  const int64_t growing = total + int64_t{layers} * steps;
  if (rule == Rule::kNone || steps == 0) return growing;
  if (rule == Rule::kStep) return total + layers;
  const double budgets = static_cast<double>(total) * (prompt_rows + steps - 1) / prompt_rows;
  // Rounding up adds less than a token per layer, the newest token another.
  return std::min(growing,
                  static_cast<int64_t>(std::floor(budgets + kBudgetSlack)) + 2 * int64_t{layers});
}

}  // namespace kvlm::retention
