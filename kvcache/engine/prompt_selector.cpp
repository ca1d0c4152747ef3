// Inputs of a retention rule for a first prompt (attention sums, scores of stored tokens), and its
// selection. On a GPU the host waits for the sums.
#include "kvcache/engine/prompt_selector.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"
#include "kernels/column_sums.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

// Queries to sum if a prompt has no text after its images (docs/formulas.md, "Importance").
constexpr int kRowsWithoutVision = 32;

std::vector<int32_t> all_rows(int n) {
  std::vector<int32_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

/// Ascending prompt rows that include the last one.
bool keeps_rows(std::span<const int32_t> slots, int prompt_rows) {
  return !slots.empty() && slots.front() >= 0 && slots.back() == prompt_rows - 1 &&
         std::ranges::is_sorted(slots, std::less_equal());
}

[[noreturn]] void refuse_selection(const CachePlan& plan, const std::string& what) {
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("the rule of --kv {} selected {}; see Retention::select()", plan.spec, what));
}

/// Throws if a selection would cause accesses out of bounds.
void check_selection(const CachePlan& plan, const LayerSelection& selection, int layer,
                     const SequenceSize& size) {
  const Retention& rule = *plan.retention;
  const size_t lists = rule.per_head() ? static_cast<size_t>(plan.shape.kv_heads) : 1;
  if (selection.slots.size() != lists) {
    refuse_selection(plan, fmt::format("{} lists of slots for layer {}, expected {}",
                                       selection.slots.size(), layer, lists));
  }
  for (const std::vector<int32_t>& slots : selection.slots) {
    if (!keeps_rows(slots, size.prompt_rows)) {
      refuse_selection(plan, fmt::format("slots of layer {} that are not ascending from 0 to {} "
                                         "with the last among them",
                                         layer, size.prompt_rows - 1));
    }
    if (slots.size() != selection.slots[0].size()) {
      refuse_selection(plan,
                       fmt::format("another number of slots for each head of layer {}", layer));
    }
  }
  const bool scored = selection.scores.size() == lists &&
                      std::ranges::all_of(selection.scores, [&](const std::vector<float>& scores) {
                        return scores.size() == selection.slots[0].size();
                      });
  if (!scored && (rule.evicts_by_score() || !selection.scores.empty())) {
    refuse_selection(plan, fmt::format("slots of layer {} without as many scores", layer));
  }
  const int most = rule.peak_rows_of_layer(plan.shape.layers, size.prompt_rows, size.max_rows);
  if (selection.kept() > most) {
    refuse_selection(plan,
                     fmt::format("{} slots of layer {}, more than its peak_rows_of_layer(), {}",
                                 selection.kept(), layer, most));
  }
}

/// Checks the selections of all layers.
void check_selections(const CachePlan& plan, std::span<const LayerSelection> selections,
                      const SequenceSize& size) {
  if (selections.size() != static_cast<size_t>(plan.shape.layers)) {
    refuse_selection(plan,
                     fmt::format("for {} layers of {}", selections.size(), plan.shape.layers));
  }
  for (size_t layer = 0; layer < selections.size(); ++layer) {
    check_selection(plan, selections[layer], static_cast<int>(layer), size);
    const size_t pair = plan.pairs.empty() ? layer : static_cast<size_t>(plan.pairs[layer]);
    if (selections[layer].slots != selections[pair].slots) {
      refuse_selection(plan, fmt::format("other slots for layer {} than for layer {}, whose codes "
                                         "it shares",
                                         layer, pair));
    }
  }
}

}  // namespace

bool PromptSelector::measures() const noexcept {
  const Retention* rule = traits_.retention();
  return rule != nullptr && rule->needs().rows != ImportanceNeeds::Rows::kNone;
}

bool PromptSelector::scores() const noexcept {
  const Retention* rule = traits_.retention();
  return rule != nullptr && rule->needs().row_scores;
}

void PromptSelector::attend(Sequence& sequence, int layer, const QkvRows& x,
                            std::span<const KeyValueRows> past, TensorView out, float scale,
                            Stream& stream) {
  const ImportanceNeeds needs = traits_.retention()->needs();
  PromptState& prompt = sequence.prompt;
  const auto n = static_cast<int>(x.k.shape()[0]);
  const int seen = prompt.staged + n;
  const int first = first_measured_row(sequence, seen);
  if (needs.rows != ImportanceNeeds::Rows::kAll &&
      (first < prompt.staged || seen < sequence.size.prompt_rows)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} observes the last tokens of the prompt, which must be passed "
                            "in one call; {} of {} tokens were passed",
                            traits_.plan().spec, n, sequence.size.prompt_rows));
  }
  std::vector<double> small(needs.sparsity ? static_cast<size_t>(traits_.shape().q_heads) : 0);
  const SummedRows summed(std::max(0, first - prompt.staged), needs.newest_weight);
  if (needs.weighted_sums) {
    add_weighted(sequence, layer, x, past, summed, scale, stream);
    attention(out, x.q, x.k, x.v, past, /*causal=*/true, scale, traits_.shape().multiply, stream);
  } else {
    attend_and_sum({sums_of(sequence, layer), sequence.size.prompt_rows, prompt.staged, small}, out,
                   x.q, x.k, x.v, past, summed, scale, traits_.shape().multiply, stream);
  }
  if (needs.sparsity) {
    double entries = 0;
    for (int row = first; row < seen; ++row) entries += row + 1;
    prompt.sparsity.resize(staged_layers());
    prompt.sparsity[index_of(layer)] = std::accumulate(small.begin(), small.end(), 0.0) /
                                       (entries * static_cast<double>(traits_.shape().q_heads));
  }
  if (prompt.staged == 0) prompt.summed_rows[0] = first;
  prompt.summed_rows[1] = seen;
}

/// The first of `seen` queries whose attention is summed.
int PromptSelector::first_measured_row(const Sequence& sequence, int seen) const noexcept {
  const ImportanceNeeds needs = traits_.retention()->needs();
  if (needs.rows == ImportanceNeeds::Rows::kLast) return std::max(0, seen - needs.last_of(seen));
  if (needs.rows != ImportanceNeeds::Rows::kPostVision) return 0;
  const auto& modality = sequence.modality;
  const auto last =
      std::find_if(modality.rbegin(), modality.rend(), [](int16_t tag) { return tag != kTextRow; });
  const auto first = static_cast<int>(modality.rend() - last);
  const bool nothing_behind = last == modality.rend() || first == seen;
  return nothing_behind ? std::max(0, seen - kRowsWithoutVision) : first;
}

/// Sums of a layer, (kv_heads, prompt rows) on the cache's device.
double* PromptSelector::sums_of(Sequence& sequence, int layer) {
  PromptState& prompt = sequence.prompt;
  const auto rows = static_cast<size_t>(sequence.size.prompt_rows);
  const size_t of_layer = traits_.kv_heads() * rows;
  size_t all = lists() * staged_layers() * of_layer;
  if (!traits_.on_gpu()) {
    prompt.importance.resize(all);
    return prompt.importance.data() + index_of(layer) * of_layer;
  }
  if (selects_by_means()) all += lists() * staged_layers() * rows;
  if (prompt.sums.bytes() == 0) {
    prompt.sums = std::move(spare_sums_);
    prompt.read = std::move(spare_read_);
    if (prompt.sums.bytes() < all * sizeof(double)) {
      prompt.sums = Buffer();  // first, so that both are never held at once
      prompt.sums = Buffer(traits_.device(), all * sizeof(double));
    }
  }
  return reinterpret_cast<double*>(prompt.sums.data()) + index_of(layer) * of_layer;
}

/// Lists of sums: importance, and what add_weighted() sums.
size_t PromptSelector::lists() const noexcept {
  return traits_.retention()->needs().weighted_sums ? 2 : 1;
}

/// Both lists of sums of a layer: in the second, each query weighs the mean attention that it gets
/// of the queries that see it, over all heads. Call it before attention, which may overwrite the
/// queries.
void PromptSelector::add_weighted(Sequence& sequence, int layer, const QkvRows& x,
                                  std::span<const KeyValueRows> past, SummedRows summed,
                                  float scale, Stream& stream) {
  const auto rows = static_cast<int64_t>(sequence.size.prompt_rows);
  const size_t of_layer = traits_.kv_heads() * static_cast<size_t>(rows);
  double* plain = sums_of(sequence, layer);
  double* weighted = plain + staged_layers() * of_layer;
  if (received_.bytes() < static_cast<size_t>(rows) * sizeof(double)) {
    received_ = Buffer(traits_.device(), static_cast<size_t>(rows) * sizeof(double));
  }
  auto* received = reinterpret_cast<double*>(received_.data());
  const auto add = [&](double* sums) {
    column_sums({sums, rows}, x.q, x.k, past, summed, scale, traits_.shape().multiply, stream);
  };
  add(plain);
  mean_over_heads(plain, 1, traits_.shape().kv_heads, rows, received, stream);
  summed.received = received + sequence.prompt.staged;
  add(weighted);
}

/// The rule uses only the mean importance over KV heads.
bool PromptSelector::selects_by_means() const noexcept {
  return !traits_.retention()->per_head() && !traits_.layouts().keeps_weights();
}

void PromptSelector::read_back(Sequence& sequence, int begin, int end, Stream& stream) {
  if (!measures()) return;
  PromptState& prompt = sequence.prompt;
  const auto rows = static_cast<size_t>(sequence.size.prompt_rows);
  const size_t of_heads = traits_.kv_heads() * rows;
  const size_t layers = lists() * static_cast<size_t>(end - begin);  // several only if joint
  const bool on_gpu = traits_.on_gpu();
  double* sums = on_gpu ? reinterpret_cast<double*>(prompt.sums.data()) : prompt.importance.data();
  const double* from = sums + index_of(begin) * of_heads;
  size_t count = layers * of_heads;
  if (selects_by_means()) {
    if (!on_gpu) prompt.means.resize(lists() * staged_layers() * rows);
    double* means = on_gpu ? sums + lists() * staged_layers() * of_heads : prompt.means.data();
    means += index_of(begin) * rows;
    mean_over_heads(from, static_cast<int64_t>(layers), traits_.shape().kv_heads,
                    static_cast<int64_t>(rows), means, stream);
    from = means;
    count = layers * rows;
  }
  if (on_gpu) prompt.read[prompt.asked++ % 2].start(from, count * sizeof(double), stream);
}

/// Waits for the oldest pending read_back(), which is of these layers.
void PromptSelector::await(Sequence& sequence, int begin, int end, Stream& stream) {
  if (!measures() || !traits_.on_gpu()) return;
  PromptState& prompt = sequence.prompt;
  const bool by_means = selects_by_means();
  const size_t of_layer =
      (by_means ? 1 : traits_.kv_heads()) * static_cast<size_t>(sequence.size.prompt_rows);
  std::vector<double>& to = by_means ? prompt.means : prompt.importance;
  to.resize(lists() * staged_layers() * of_layer);
  if (end == traits_.shape().layers) stream.queue().do_meanwhile();
  std::memcpy(to.data() + index_of(begin) * of_layer, prompt.read[prompt.had++ % 2].wait(),
              lists() * static_cast<size_t>(end - begin) * of_layer * sizeof(double));
}

void PromptSelector::score(Sequence& sequence, const StepRows& rows, int layer,
                           const StoredSides& stored, ConstTensorView q, float scale,
                           Stream& stream) {
  const ImportanceNeeds needs = traits_.retention()->needs();
  if (needs.queries && rows.rows < sequence.size.prompt_rows) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("--kv {} needs the queries of the whole prompt, which must be passed "
                            "in one call; {} of {} tokens were passed",
                            traits_.plan().spec, rows.rows, sequence.size.prompt_rows));
  }
  if (!rows.ends_prompt) return;
  PromptState& prompt = sequence.prompt;
  const size_t of_layer = traits_.kv_heads() * static_cast<size_t>(sequence.size.prompt_rows);
  prompt.row_scores.resize(staged_layers() * of_layer);
  traits_.retention()->score(
      {&traits_.shape(), stored[0], stored[1], needs.queries ? q : ConstTensorView(), scale, layer,
       sequence.modality},
      std::span(prompt.row_scores).subspan(index_of(layer) * of_layer, of_layer), stream);
}

std::vector<LayerSelection> PromptSelector::select(Sequence& sequence, int begin, int end,
                                                   Stream& stream) {
  await(sequence, begin, end, stream);
  if (traits_.retention() != nullptr && traits_.layouts().joint()) {
    std::vector<LayerSelection> all =
        traits_.retention()->select(view_of(sequence, -1), traits_.plan().pairs);
    if (traits_.plan().checks_selections) check_selections(traits_.plan(), all, sequence.size);
    return all;
  }
  std::vector<LayerSelection> selections(static_cast<size_t>(end - begin));
  stream.pool().parallel_for(selections.size(), [&](size_t i, int) {
    if (traits_.retention() == nullptr) {
      selections[i].slots.push_back(all_rows(static_cast<int>(sequence.modality.size())));
    } else {
      const int layer = begin + static_cast<int>(i);
      std::vector<LayerSelection> one =
          traits_.retention()->select(view_of(sequence, layer), traits_.plan().pairs);
      if (traits_.plan().checks_selections) {
        if (one.size() != 1)
          refuse_selection(traits_.plan(), fmt::format("for {} layers of 1", one.size()));
        check_selection(traits_.plan(), one[0], layer, sequence.size);
      }
      selections[i] = std::move(one.front());
    }
  });
  return selections;
}

/// The view of a layer, or of all layers (-1).
PromptView PromptSelector::view_of(const Sequence& sequence, int layer) const {
  const auto of = [&](const std::vector<double>& all) {
    const std::span<const double> x(all);
    if (layer < 0 || x.empty()) return x;
    const size_t of_layer = x.size() / staged_layers();
    return x.subspan(index_of(layer) * of_layer, of_layer);
  };
  PromptView view;
  view.shape = &traits_.shape();
  view.rows = static_cast<int>(sequence.modality.size());
  view.layer = layer;
  view.modality = sequence.modality;
  view.head_means = !sequence.prompt.means.empty();
  view.importance = of(view.head_means ? sequence.prompt.means : sequence.prompt.importance);
  if (traits_.retention()->needs().weighted_sums) {
    const size_t half = view.importance.size() / 2;
    view.weighted = view.importance.subspan(half);
    view.importance = view.importance.first(half);
  }
  view.sparsity = of(sequence.prompt.sparsity);
  view.row_scores = of(sequence.prompt.row_scores);
  view.summed_rows = sequence.prompt.summed_rows;
  return view;
}

void PromptSelector::keep_memory(PromptState& prompt) {
  if (prompt.sums.bytes() > spare_sums_.bytes()) spare_sums_ = std::move(prompt.sums);
  if (prompt.read[0].bytes() > spare_read_[0].bytes()) spare_read_ = std::move(prompt.read);
}

const double* PromptSelector::sums_of_heads(const Sequence& sequence, int layer) const noexcept {
  return sequence.prompt.importance.data() +
         index_of(layer) * traits_.kv_heads() * static_cast<size_t>(sequence.size.prompt_rows);
}

}  // namespace kvlm
