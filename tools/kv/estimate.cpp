#include "tools/kv/estimate.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "kvcache/plan/planner.h"

namespace kvlm {

namespace {

/// The slots that each layer would keep if all tokens were attended alike.
std::vector<LayerSelection> select_evenly(const Retention& retention, const CacheShape& shape,
                                          std::span<const int16_t> modality,
                                          std::span<const int> pairs) {
  const auto rows = static_cast<int>(modality.size());
  PromptView prompt;
  prompt.shape = &shape;
  prompt.rows = rows;
  prompt.modality = modality;
  const ImportanceNeeds needs = retention.needs();
  const bool joint = retention.joint() || !pairs.empty();
  const auto layers = static_cast<size_t>(joint ? shape.layers : 1);
  std::vector<double> importance;
  for (size_t head = 0; head < layers * static_cast<size_t>(shape.kv_heads); ++head) {
    if (needs.rows == ImportanceNeeds::Rows::kNone) break;
    // Summed over all rows, a token has the attention of those that can look at it.
    for (int j = 0; j < rows; ++j) {
      importance.push_back(needs.rows == ImportanceNeeds::Rows::kAll ? rows - j : 1);
    }
  }
  const std::vector<double> sparsity(needs.sparsity ? layers : 0, 0.5);
  const size_t scored = layers * static_cast<size_t>(shape.kv_heads) * modality.size();
  const std::vector<double> row_scores(needs.row_scores ? scored : 0, 1);
  const int32_t summed[2] = {
      needs.rows == ImportanceNeeds::Rows::kLast ? std::max(0, rows - needs.last_of(rows)) : 0,
      rows};
  prompt.importance = importance;
  if (needs.weighted_sums) prompt.weighted = importance;
  prompt.sparsity = sparsity;
  prompt.row_scores = row_scores;
  prompt.summed_rows = summed;
  if (joint) return retention.select(prompt, pairs);
  std::vector<LayerSelection> selections;
  for (int layer = 0; layer < shape.layers; ++layer) {
    prompt.layer = layer;
    selections.push_back(retention.select(prompt, pairs).front());
  }
  return selections;
}

LayerCounts counts_of_all(const PromptSize& prompt) {
  // Images in the middle of the prompt.
  const int text_before = (prompt.tokens - prompt.visual) / 2;
  const int text_behind = prompt.tokens - prompt.visual - text_before;
  return {prompt.tokens, prompt.visual, prompt.visual > 0 ? 1 : 0, 0, false, text_behind};
}

/// (layers,) what each layer holds after a prompt, which the rule is run on.
std::vector<LayerCounts> counts_by_rule(const CachePlan& plan, const CacheShape& shape,
                                        const PromptSize& prompt) {
  const LayerCounts all = counts_of_all(prompt);
  const int text_before = prompt.tokens - prompt.visual - all.text_behind;
  // Heads keep equally many slots: one of them says how many.
  CacheShape one_head = shape;
  one_head.q_heads = shape.q_per_kv();
  one_head.kv_heads = 1;
  std::vector<int16_t> modality(static_cast<size_t>(prompt.tokens), kTextRow);
  std::fill_n(modality.begin() + text_before, prompt.visual, int16_t{0});
  const auto selections = select_evenly(*plan.retention, one_head, modality, plan.pairs);
  std::vector<LayerCounts> result;
  for (const LayerSelection& selection : selections) {
    LayerCounts counts = all;
    counts.rows = selection.kept();
    counts.dropped = counts.rows < prompt.tokens;
    if (plan.retention->needs().sees_rows()) {
      const double share = static_cast<double>(counts.rows) / prompt.tokens;
      counts.visual = static_cast<int>(std::lround(share * prompt.visual));
      counts.text_behind = static_cast<int>(std::lround(share * all.text_behind));
    } else {
      const std::vector<int32_t>& slots = selection.slots.front();
      counts.visual = static_cast<int>(std::ranges::count_if(
          slots, [&](int32_t slot) { return modality[static_cast<size_t>(slot)] != kTextRow; }));
      counts.text_behind = static_cast<int>(std::ranges::count_if(
          slots, [&](int32_t slot) { return slot >= text_before + prompt.visual; }));
    }
    result.push_back(counts);
  }
  return result;
}

/// A prompt of so many tokens with the same share of visual ones.
PromptSize scaled(const PromptSize& prompt, int tokens) {
  const double share = static_cast<double>(prompt.visual) / prompt.tokens;
  return {tokens, static_cast<int>(std::lround(share * tokens))};
}

/// The same of a long prompt: on the line through those of two shorter ones. Rules keep a fraction
/// of the tokens and a constant number, so that only rounding is lost.
std::vector<LayerCounts> extrapolated_counts(const CachePlan& plan, const CacheShape& shape,
                                             const PromptSize& prompt) {
  constexpr int kShort = kExactTokens / 4, kLong = kExactTokens / 2;
  const std::vector<LayerCounts> low = counts_by_rule(plan, shape, scaled(prompt, kShort));
  std::vector<LayerCounts> counts = counts_by_rule(plan, shape, scaled(prompt, kLong));
  const double steps = static_cast<double>(prompt.tokens - kLong) / (kLong - kShort);
  for (size_t layer = 0; layer < counts.size(); ++layer) {
    const auto extend = [&](int LayerCounts::*count, int most) {
      const int at_long = counts[layer].*count;
      const double value = at_long + steps * (at_long - low[layer].*count);
      counts[layer].*count =
          static_cast<int>(std::lround(std::clamp(value, 0.0, static_cast<double>(most))));
    };
    extend(&LayerCounts::rows, prompt.tokens);
    extend(&LayerCounts::visual, std::min(prompt.visual, counts[layer].rows));
    extend(&LayerCounts::text_behind, counts[layer].rows - counts[layer].visual);
  }
  return counts;
}

}  // namespace

Estimate estimate(const CacheSpec& spec, const CacheShape& shape, const PromptSize& prompt,
                  const PolicyProfile* profile) {
  const std::shared_ptr<const CachePlan> plan = plan_cache(spec, shape, profile);
  const auto layers = static_cast<size_t>(shape.layers);

  Estimate made;
  if (plan->retention == nullptr) {
    made.counts.assign(layers, counts_of_all(prompt));
  } else {
    made.even_attention = plan->retention->needs().sees_rows();
    made.extrapolated = prompt.tokens > kExactTokens;
    made.counts = made.extrapolated ? extrapolated_counts(*plan, shape, prompt)
                                    : counts_by_rule(*plan, shape, prompt);
  }

  made.layers = formula(*plan, made.counts);
  for (const PartBytes& layer : made.layers) made.parts += layer;
  for (const LayerCounts& counts : made.counts) made.slots += counts.rows;
  made.slots /= static_cast<double>(layers);
  const size_t elements = shape.elements_per_token() * static_cast<size_t>(prompt.tokens);
  made.f16_bytes = 2 * elements;
  made.stored_bits = 8.0 * static_cast<double>(made.parts.total()) / static_cast<double>(elements);
  made.nominal_bits = nominal_bits(*plan, made.counts) * made.slots / prompt.tokens;
  return made;
}

}  // namespace kvlm
