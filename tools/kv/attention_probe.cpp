#include "tools/kv/attention_probe.h"

#include <algorithm>
#include <cmath>

namespace kvlm {

namespace {

/// The output of attention, split by what contributes to it.
struct Parts {
  std::vector<double> visual, text;
  std::vector<double> scores, remapped;  ///< (slots,) before the softmax
};

/// scores are remapped as CalibQuant does, over its packed visual slots.
Parts attend_parts(const float* q, size_t dim, const std::vector<float>& keys,
                   const std::vector<float>& values, std::span<const int16_t> tags, float scale,
                   const RemapRule* remap, size_t remapped) {
  const size_t slots = keys.size() / dim;
  std::vector<double> weight(slots);
  for (size_t j = 0; j < slots; ++j) {
    for (size_t d = 0; d < dim; ++d) {
      weight[j] += static_cast<double>(q[d]) * static_cast<double>(keys[j * dim + d]);
    }
    weight[j] *= static_cast<double>(scale);
  }
  Parts parts{std::vector<double>(dim), std::vector<double>(dim), weight, {}};
  if (remap != nullptr && remapped > 0) {
    const auto [low, high] =
        std::minmax_element(weight.begin(), weight.begin() + static_cast<std::ptrdiff_t>(remapped));
    const double lo = *low;
    const double hi = *high;
    double slope = hi > lo ? (hi - lo + static_cast<double>(remap->tau_low) -
                              static_cast<double>(remap->tau_high)) /
                                 (hi - lo)
                           : 0;
    if (remap->guarded) slope = std::max(slope, 0.0);
    for (size_t j = 0; j < remapped; ++j) {
      weight[j] = slope * (weight[j] - lo) + lo - static_cast<double>(remap->tau_low);
    }
  }
  parts.remapped = weight;
  const double top = *std::max_element(weight.begin(), weight.end());
  double sum = 0;
  for (double& w : weight) sum += w = std::exp(w - top);
  for (size_t j = 0; j < slots; ++j) {
    std::vector<double>& part = tags[j] == kTextRow ? parts.text : parts.visual;
    for (size_t d = 0; d < dim; ++d) {
      part[d] += weight[j] / sum * static_cast<double>(values[j * dim + d]);
    }
  }
  return parts;
}

double squared_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

}  // namespace

AttentionProbe::AttentionProbe(std::unique_ptr<KvCache> reference,
                               std::vector<std::unique_ptr<PolicyCache>> policies)
    : reference_(std::move(reference)),
      policies_(std::move(policies)),
      ids_(policies_.size()),
      steps_(policies_.size()),
      rows_(static_cast<size_t>(shape().layers)),
      errors_(policies_.size(), std::vector<AttentionError>(static_cast<size_t>(shape().layers))),
      scores_(policies_.size()) {}

CacheNeeds AttentionProbe::needs() const noexcept {
  CacheNeeds needs;
  for (const auto& policy : policies_) {
    needs.prompt_embeddings |= policy->needs().prompt_embeddings;
  }
  return needs;
}

SequenceId AttentionProbe::open(const SequenceSize& size, const std::string& who) {
  for (size_t i = 0; i < policies_.size(); ++i) ids_[i] = policies_[i]->open(size, who);
  for (Rows& rows : rows_) {
    rows.keys.assign(static_cast<size_t>(shape().kv_heads), {});
    rows.values.assign(static_cast<size_t>(shape().kv_heads), {});
  }
  tags_.clear();
  return reference_->open(size, who);
}

void AttentionProbe::close(SequenceId sequence) noexcept {
  for (size_t i = 0; i < policies_.size(); ++i) policies_[i]->close(ids_[i]);
  reference_->close(sequence);
}

void AttentionProbe::begin(std::span<const StepRows> step) {
  step_ = step;
  for (size_t i = 0; i < policies_.size(); ++i) {
    steps_[i].assign(step.begin(), step.end());
    for (StepRows& rows : steps_[i]) rows.sequence = ids_[i];
    policies_[i]->begin(steps_[i]);
  }
  for (int row = 0; row < step[0].rows; ++row) {
    tags_.push_back(step[0].modality.empty() ? kTextRow
                                             : step[0].modality[static_cast<size_t>(row)]);
  }
  reference_->begin(step);
}

void AttentionProbe::give_embeddings(ConstTensorView embeddings, Stream& stream) {
  for (const auto& policy : policies_) {
    if (policy->needs().prompt_embeddings) policy->give_embeddings(embeddings, stream);
  }
}

void AttentionProbe::attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                            TensorView out, float scale, Stream& stream) {
  const auto elements = static_cast<size_t>(q.elements());
  query_.assign(q.as<float>(), q.as<float>() + elements);
  output_.resize(policies_.size() * elements);
  const auto dim = static_cast<size_t>(shape().head_dim);
  const auto heads = static_cast<size_t>(shape().kv_heads);
  Rows& rows = rows_[static_cast<size_t>(layer)];
  for (size_t row = 0; row < static_cast<size_t>(k.shape()[0]); ++row) {
    for (size_t head = 0; head < heads; ++head) {
      for (size_t d = 0; d < dim; ++d) {
        const size_t at = (row * heads + head) * dim + d;
        rows.keys[head].push_back(to_float(to_f16(k.as<float>()[at])));
        rows.values[head].push_back(to_float(to_f16(v.as<float>()[at])));
      }
    }
  }
  for (size_t i = 0; i < policies_.size(); ++i) {
    TensorView mine(output_.data() + i * elements, DType::kF32,
                    {q.shape()[0], q.shape()[1], q.shape()[2]});
    policies_[i]->attend(layer, q, k, v, mine, scale, stream);
  }
  reference_->attend(layer, q, k, v, out, scale, stream);
  if (step_[0].prompt) return;  // exact for every policy
  for (size_t i = 0; i < policies_.size(); ++i) {
    note(i, layer, query_.data(), output_.data() + i * elements, out.as<float>(), scale, stream);
  }
}

void AttentionProbe::note(size_t policy, int layer, const float* q, const float* got,
                          const float* expected, float scale, Stream& stream) {
  AttentionError& error = errors_[policy][static_cast<size_t>(layer)];
  const auto dim = static_cast<size_t>(shape().head_dim);
  const auto queries = static_cast<size_t>(shape().q_per_kv());
  const LayerState& state = policies_[policy]->layer(ids_[policy], layer);
  const Rows& rows = rows_[static_cast<size_t>(layer)];
  std::vector<float> keys;
  std::vector<float> values;
  for (size_t head = 0; head < static_cast<size_t>(shape().kv_heads); ++head) {
    policies_[policy]->inspect(ids_[policy], layer, head, keys, values, stream);
    // In the order of the lane: visual slots first where they are stored apart.
    std::vector<int16_t> tags = state.lanes[head].tags;
    const auto apart = static_cast<size_t>(state.lanes[head].stores[kVisual].keys.slots());
    if (apart > 0) {
      std::stable_partition(tags.begin(), tags.end(), [](int16_t tag) { return tag != kTextRow; });
    }
    const RemapRule* remap = policies_[policy]->remap(layer);
    for (size_t query = 0; query < queries; ++query) {
      const size_t at = (head * queries + query) * dim;
      const Parts exact =
          attend_parts(q + at, dim, rows.keys[head], rows.values[head], tags_, scale, nullptr, 0);
      const Parts mine = attend_parts(q + at, dim, keys, values, tags, scale, remap, apart);
      ScoreHistogram& scores = scores_[policy];
      for (size_t j = 0; j < exact.scores.size(); ++j) {
        if (tags_[j] != kTextRow) ++scores.exact[ScoreHistogram::bin(exact.scores[j])];
      }
      for (size_t j = 0; j < mine.scores.size(); ++j) {
        if (tags[j] == kTextRow) continue;
        ++scores.quantized[ScoreHistogram::bin(mine.scores[j])];
        ++scores.calibrated[ScoreHistogram::bin(mine.remapped[j])];
      }
      error.visual_difference += squared_distance(mine.visual, exact.visual);
      error.text_difference += squared_distance(mine.text, exact.text);
      for (size_t d = 0; d < dim; ++d) {
        const double x = static_cast<double>(expected[at + d]);
        error.difference += std::pow(static_cast<double>(got[at + d]) - x, 2);
        error.reference += x * x;
      }
    }
  }
  error.slots += state.lanes[0].slots();
  ++error.steps;
}

void AttentionProbe::end(Stream& stream) {
  for (const auto& policy : policies_) policy->end(stream);
  reference_->end(stream);
}

}  // namespace kvlm
