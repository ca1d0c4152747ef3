#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/engine/least_score.h"
#include "kvcache/retention.h"
#include "kvcache/spec/policies.h"
#include "kvcache/spec/registry.h"
#include "kvcache/spec/words.h"

// What the tests of retention rules share: rules from options, prompts of random importance, and a
// layer that decodes.
namespace kvlm::testing {

using Options = std::vector<std::pair<std::string, std::string>>;

inline std::unique_ptr<Retention> make_rule(const RetentionEntry& entry, Options options,
                                            PolicyContext context = {}) {
  std::sort(options.begin(), options.end());
  static const CacheShape kNoShape{
      .layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 1, .rope_frequencies = {}};
  if (context.shape == nullptr) context.shape = &kNoShape;
  return entry.make(OptionValues(entry.info, {std::string(entry.info.name), std::move(options)}),
                    context);
}

/// Every rule of the registry.
inline std::vector<const RetentionEntry*> registered_rules() {
  std::vector<const RetentionEntry*> rules;
  for (const PolicyInfo* info : policies()) {
    if (info->kind == PartKind::kRetention) rules.push_back(find_retention(info->name));
  }
  return rules;
}

/// Whether `key` is an option of a rule; of one that names choices, whether `choice` is one.
inline bool has_option(const RetentionEntry& rule, std::string_view key,
                       std::string_view choice = {}) {
  return std::any_of(
      rule.info.options.begin(), rule.info.options.end(), [&](const OptionInfo& option) {
        if (option.key != key || choice.empty()) return option.key == key;
        const std::vector<std::string_view> choices = split_words(option.choices, '|');
        return std::find(choices.begin(), choices.end(), choice) != choices.end();
      });
}

/// A prompt with importance of every layer and head.
struct Prompt {
  CacheShape shape;
  int rows = 0;
  std::vector<double> importance;  // (layers, kv_heads, rows)
  std::vector<double> row_scores;  // the same shape; may be empty
  std::vector<double> weighted;    // the shape of importance; may be empty
  std::vector<double> sparsity;    // (layers,)
  std::vector<int16_t> modality;   // (rows,); may be empty

  PromptView view() const {
    PromptView view;
    view.shape = &shape;
    view.rows = rows;
    view.importance = importance;
    view.sparsity = sparsity;
    view.row_scores = row_scores;
    view.weighted = weighted;
    view.modality = modality;
    return view;
  }
  /// The view of one layer alone, as a cache gives it to a rule that is not joint.
  PromptView view(int layer) const {
    PromptView one = view();
    const size_t stride = importance.size() / static_cast<size_t>(shape.layers);
    one.layer = layer;
    one.importance = one.importance.subspan(static_cast<size_t>(layer) * stride, stride);
    if (!weighted.empty()) {
      one.weighted = one.weighted.subspan(static_cast<size_t>(layer) * stride, stride);
    }
    if (!row_scores.empty()) {
      one.row_scores = one.row_scores.subspan(static_cast<size_t>(layer) * stride, stride);
    }
    if (!sparsity.empty()) one.sparsity = one.sparsity.subspan(static_cast<size_t>(layer), 1);
    return one;
  }
};

/// `importance` of each layer, one kv_head.
inline Prompt prompt_of(const std::vector<std::vector<double>>& layers) {
  Prompt prompt;
  prompt.shape = {.layers = static_cast<int>(layers.size()),
                  .q_heads = 1,
                  .kv_heads = 1,
                  .head_dim = 1,
                  .rope_frequencies = {}};
  prompt.rows = static_cast<int>(layers.front().size());
  for (const auto& layer : layers) {
    prompt.importance.insert(prompt.importance.end(), layer.begin(), layer.end());
  }
  prompt.sparsity.assign(layers.size(), 0.0);
  prompt.modality.assign(static_cast<size_t>(prompt.rows), kTextRow);
  return prompt;
}

/// Log-normal importance, wider in some layers than in others, and normal scores of rows.
inline Prompt random_prompt(int layers, int kv_heads, int rows, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> unit;
  Prompt prompt;
  prompt.shape = {.layers = layers,
                  .q_heads = 2 * kv_heads,
                  .kv_heads = kv_heads,
                  .head_dim = 1,
                  .rope_frequencies = {}};
  prompt.rows = rows;
  prompt.modality.assign(static_cast<size_t>(rows), kTextRow);
  for (int j = rows / 8; j < rows * 5 / 8; ++j) prompt.modality[static_cast<size_t>(j)] = 0;
  for (int l = 0; l < layers; ++l) {
    const double width = 0.2 + 2 * unit(rng);
    for (int i = 0; i < kv_heads * rows; ++i) {
      prompt.importance.push_back(std::exp(width * normal(rng)));
    }
    std::mt19937 other(seed + static_cast<unsigned>(l) + 1);  // importance stays what it was
    for (int i = 0; i < kv_heads * rows; ++i) prompt.row_scores.push_back(normal(other));
    for (int i = 0; i < kv_heads * rows; ++i) prompt.weighted.push_back(std::exp(normal(other)));
    normal.reset();
    prompt.sparsity.push_back(unit(rng));
  }
  return prompt;
}

/// What score() makes of one layer's rows.
///   keys, values  (kv_heads, rows, head_dim)
///   queries       (rows, q_heads, head_dim), or empty
inline std::vector<double> row_scores(const Retention& rule, const CacheShape& shape, int rows,
                                      const std::vector<float>& keys,
                                      const std::vector<float>& values = {},
                                      const std::vector<float>& queries = {}) {
  ThreadPool pool(2);
  Stream stream(pool);
  const auto stored = [&](const std::vector<float>& x) {
    std::vector<StoredRows> heads;
    for (int h = 0; h < shape.kv_heads && !x.empty(); ++h) {
      heads.push_back({reinterpret_cast<const std::byte*>(x.data() + h * rows * shape.head_dim),
                       DType::kF32, rows});
    }
    return heads;
  };
  const std::vector<StoredRows> k = stored(keys);
  const std::vector<StoredRows> v = stored(values);
  LayerRows layer{.shape = &shape, .keys = k, .values = v, .queries = {}};
  if (!queries.empty()) {
    layer.queries =
        ConstTensorView(queries.data(), DType::kF32, {rows, shape.q_heads, shape.head_dim});
  }
  std::vector<double> scores(static_cast<size_t>(shape.kv_heads * rows));
  rule.score(layer, scores, stream);
  return scores;
}

/// What a cache does with a selection: every layer asked for at once, or one by one.
inline std::vector<LayerSelection> select(const Retention& rule, const Prompt& prompt,
                                          const std::vector<int>& pairs = {}) {
  if (rule.joint() || !pairs.empty()) return rule.select(prompt.view(), pairs);
  std::vector<LayerSelection> selections;
  for (int l = 0; l < prompt.shape.layers; ++l) {
    selections.push_back(rule.select(prompt.view(l), {}).at(0));
  }
  return selections;
}

/// Rows kept in every layer.
inline std::vector<int> kept(const std::vector<LayerSelection>& selections) {
  std::vector<int> rows;
  for (const LayerSelection& selection : selections) rows.push_back(selection.kept());
  return rows;
}

/// One kv_head of a layer in decode. Slots are labelled: 0, 1, ... those of the prompt in their
/// order, then kept, kept + 1, ... those of generated rows.
class DecodingLayer {
 public:
  DecodingLayer(const Retention& rule, int prompt_rows, int kept, double forget)
      : rule_(&rule), kept_(kept), prompt_rows_(prompt_rows), forget_(forget), peak_(kept) {
    labels_.resize(static_cast<size_t>(kept));
    std::iota(labels_.begin(), labels_.end(), 0);
    weights_.assign(static_cast<size_t>(kept), 1.0f);
    scores_.assign(static_cast<size_t>(kept), 1.0f);
  }
  DecodingLayer(const Retention& rule, const Prompt& prompt, const LayerSelection& selection)
      : DecodingLayer(rule, prompt.rows, selection.kept(), selection.forget) {
    scores_ = selection.scores.empty() ? std::vector<float>() : selection.scores.front();
  }

  /// Feeds one row, of `weight`; returns the label of the row that goes, or -1.
  int step(float weight = 1.0f) {
    ++step_;
    labels_.push_back(kept_ + step_ - 1);
    weights_.push_back(weight);
    peak_ = std::max(peak_, rows());
    const DecodeView view{.rows = rows(),
                          .prompt_rows = prompt_rows_,
                          .step = step_,
                          .kept = kept_,
                          .forget = forget_,
                          .scored = static_cast<int>(scores_.size()),
                          .weights = weights_};
    int slot = rule_->evict(view);
    if (slot == kLeastScore) slot = least_scored(*rule_->least_weight(view), scores_);
    last_slot_ = slot;
    if (slot < 0) return -1;
    const int label = labels_.at(static_cast<size_t>(slot));
    labels_.erase(labels_.begin() + slot);
    weights_.erase(weights_.begin() + slot);
    if (static_cast<size_t>(slot) < scores_.size()) scores_.erase(scores_.begin() + slot);
    return label;
  }

  int rows() const { return static_cast<int>(labels_.size()); }
  int peak() const { return peak_; }
  int last_slot() const { return last_slot_; }
  const std::vector<int>& labels() const { return labels_; }
  std::vector<float>& weights() { return weights_; }
  /// Of the prompt's rows that are left.
  std::vector<float>& scores() { return scores_; }
  /// Steps since the row with this label was fed.
  int age(int label) const { return step_ - (label - kept_ + 1); }

 private:
  const Retention* rule_;
  int kept_;
  int prompt_rows_;
  double forget_;
  int step_ = 0;
  int peak_;
  int last_slot_ = -1;
  std::vector<int> labels_;
  std::vector<float> weights_;
  std::vector<float> scores_;
};

/// (step, label) of the first `count` rows that go.
inline std::vector<std::pair<int, int>> first_removals(DecodingLayer layer, size_t count) {
  std::vector<std::pair<int, int>> removals;
  for (int t = 1; removals.size() < count && t < 10000; ++t) {
    if (const int label = layer.step(); label >= 0) removals.emplace_back(t, label);
  }
  return removals;
}

}  // namespace kvlm::testing
