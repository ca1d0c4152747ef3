#include "tools/kv/attention_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"

// A cache that answers as plain rows do, and shows the same queries, keys and values to the caches
// of other policies. At every decode step it computes attention from what each of them stores, and
// adds up how far scores and outputs are from those of the rows as they came.
namespace kvlm {

namespace {

using Parts = AttentionProbe::Parts;

/// Maps the scores of some slots as CalibQuant does (eqs. 7, 8).
void apply_remap(const ScoreRemap& remap, std::vector<double>& scores) {
  const auto begin = scores.begin() + remap.first;
  const auto end = begin + remap.slots;
  if (begin == end) return;
  const auto [lowest, highest] = std::minmax_element(begin, end);
  const double low = *lowest;
  const double range = *highest - low;
  const auto tau_low = static_cast<double>(remap.tau_low);
  const auto tau_high = static_cast<double>(remap.tau_high);
  double slope = range > 0 ? (range + tau_low - tau_high) / range : 0;
  if (remap.guarded) slope = std::max(slope, 0.0);
  std::transform(begin, end, begin,
                 [&](double score) { return slope * (score - low) + low - tau_low; });
}

Parts attend_parts(const float* q, size_t dim, const HeadRows& rows, float scale) {
  const size_t slots = rows.tags.size();
  std::vector<double> weight(slots);
  for (size_t j = 0; j < slots; ++j) {
    for (size_t d = 0; d < dim; ++d) {
      weight[j] += static_cast<double>(q[d]) * static_cast<double>(rows.keys[j * dim + d]);
    }
    weight[j] *= static_cast<double>(scale);
  }
  Parts parts{std::vector<double>(dim), std::vector<double>(dim), weight, {}, {}};
  for (const ScoreRemap& remap : rows.remaps) apply_remap(remap, weight);
  parts.remapped = weight;
  const double top = *std::max_element(weight.begin(), weight.end());
  double sum = 0;
  for (double& w : weight) sum += w = std::exp(w - top);
  for (size_t j = 0; j < slots; ++j) {
    std::vector<double>& part = rows.tags[j] == kTextRow ? parts.text : parts.visual;
    weight[j] /= sum;
    for (size_t d = 0; d < dim; ++d) {
      part[d] += weight[j] * static_cast<double>(rows.values[j * dim + d]);
    }
  }
  parts.weights = std::move(weight);
  return parts;
}

/// Of every query head, (q_heads, head_dim) in `q`, over the rows of its kv_head.
std::vector<Parts> all_parts(std::span<const float> q, const CacheShape& shape,
                             const std::vector<HeadRows>& rows, float scale, Stream& stream) {
  const auto dim = static_cast<size_t>(shape.head_dim);
  const auto queries = static_cast<size_t>(shape.q_per_kv());
  std::vector<Parts> all(static_cast<size_t>(shape.q_heads));
  stream.pool().parallel_for(all.size(), [&](size_t i, int) {
    all[i] = attend_parts(q.data() + i * dim, dim, rows[i / queries], scale);
  });
  return all;
}

/// f32 of any device.
std::vector<float> floats(ConstTensorView from, Stream& stream) {
  std::vector<float> to(static_cast<size_t>(from.elements()));
  copy(TensorView(to.data(), DType::kF32, from.shape()), from, stream);
  return to;
}

double squared_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

}  // namespace

AttentionProbe::AttentionProbe(std::unique_ptr<KvCache> reference,
                               std::vector<std::unique_ptr<PolicyCache>> policies)
    : reference_(std::move(reference)), policies_(std::move(policies)), steps_(policies_.size()) {}

CacheNeeds AttentionProbe::needs() const noexcept {
  CacheNeeds needs;
  for (const auto& policy : policies_) {
    needs.prompt_embeddings |= policy->needs().prompt_embeddings;
  }
  return needs;
}

bool AttentionProbe::fits(const SequenceSize& size) const {
  return reference_->fits(size) &&
         std::ranges::all_of(policies_, [&](const auto& policy) { return policy->fits(size); });
}

SequenceId AttentionProbe::open(const SequenceSize& size, const std::string& who) {
  Sequence sequence;
  sequence.rows.resize(static_cast<size_t>(shape().layers));
  for (auto& heads : sequence.rows) heads.resize(static_cast<size_t>(shape().kv_heads));
  sequence.errors.assign(policies_.size(),
                         std::vector<AttentionError>(static_cast<size_t>(shape().layers)));
  sequence.scores.resize(policies_.size());
  sequence.ids.reserve(policies_.size());
  try {
    for (const auto& policy : policies_) sequence.ids.push_back(policy->open(size, who));
    const SequenceId id = reference_->open(size, who);
    const auto slot = static_cast<size_t>(id);
    if (slot >= sequences_.size()) sequences_.resize(slot + 1);
    sequences_[slot] = std::move(sequence);
    return id;
  } catch (...) {
    for (size_t i = 0; i < sequence.ids.size(); ++i) policies_[i]->close(sequence.ids[i]);
    throw;
  }
}

void AttentionProbe::pause() {
  throw Error(ErrorCode::kUnsupported,
              "attention errors are measured in one pass at a time; end it before the next");
}

SequenceId AttentionProbe::fork(SequenceId, int, const std::string& who, Stream&) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} continues another sequence, but attention errors are measured from a "
                          "sequence's first token on; feed it from the start",
                          who));
}

void AttentionProbe::close(SequenceId sequence) noexcept {
  for (size_t i = 0; i < policies_.size(); ++i) policies_[i]->close(at(sequence).ids[i]);
  at(sequence).rows.clear();
  reference_->close(sequence);
}

void AttentionProbe::begin(std::span<const StepRows> step, Stream& stream) {
  step_ = step;
  for (size_t i = 0; i < policies_.size(); ++i) {
    steps_[i].assign(step.begin(), step.end());
    for (StepRows& rows : steps_[i]) rows.sequence = at(rows.sequence).ids[i];
    policies_[i]->begin(steps_[i], stream);
  }
  reference_->begin(step, stream);
}

void AttentionProbe::give_embeddings(ConstTensorView embeddings, Stream& stream) {
  for (const auto& policy : policies_) {
    if (policy->needs().prompt_embeddings) policy->give_embeddings(embeddings, stream);
  }
}

void AttentionProbe::attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                            TensorView out, float scale, Stream& stream) {
  const std::vector<float> keys = floats(k, stream);
  const std::vector<float> values = floats(v, stream);
  size_t first = 0;
  for (const StepRows& rows : step_) {
    const size_t width =
        static_cast<size_t>(shape().kv_heads) * static_cast<size_t>(shape().head_dim);
    const size_t count = static_cast<size_t>(rows.rows) * width;
    keep_rows(rows, layer, std::span(keys).subspan(first, count),
              std::span(values).subspan(first, count));
    first += count;
  }
  const std::vector<float> queries = floats(q, stream);  // `out` may be where they lie
  outputs_.resize(policies_.size());
  for (size_t i = 0; i < policies_.size(); ++i) {
    if (outputs_[i].shape() != q.shape()) outputs_[i] = Tensor(DType::kF32, q.shape(), q.device());
    policies_[i]->attend(layer, q, k, v, outputs_[i], scale, stream);
  }
  reference_->attend(layer, q, k, v, out, scale, stream);
  // Prompts are exact for every policy.
  if (std::all_of(step_.begin(), step_.end(), [](const StepRows& rows) { return rows.prompt; })) {
    return;
  }
  const std::vector<float> exact = floats(out, stream);
  const size_t width = static_cast<size_t>(shape().q_heads) * static_cast<size_t>(shape().head_dim);
  std::vector<std::vector<float>> got;
  for (const Tensor& output : outputs_) got.push_back(floats(output, stream));
  size_t row = 0;
  for (const StepRows& rows : step_) {
    const auto of_row = [&](const std::vector<float>& all) {
      return std::span(all).subspan(row * width, width);
    };
    if (!rows.prompt) {
      const std::vector<HeadRows>& plain = at(rows.sequence).rows[static_cast<size_t>(layer)];
      const std::vector<Parts> parts = all_parts(of_row(queries), shape(), plain, scale, stream);
      for (size_t i = 0; i < policies_.size(); ++i) {
        note(at(rows.sequence), i, layer, {of_row(queries), of_row(exact), of_row(got[i]), parts},
             scale, stream);
      }
    }
    row += static_cast<size_t>(rows.rows);
  }
}

/// Notes rows as plain f16 rows give them back.
void AttentionProbe::keep_rows(const StepRows& step, int layer, std::span<const float> k,
                               std::span<const float> v) {
  const auto dim = static_cast<size_t>(shape().head_dim);
  std::vector<HeadRows>& heads = at(step.sequence).rows[static_cast<size_t>(layer)];
  const auto& tags = step.modality;
  for (size_t row = 0; row < static_cast<size_t>(step.rows); ++row) {
    for (size_t head = 0; head < heads.size(); ++head) {
      heads[head].tags.push_back(tags.empty() ? kTextRow : tags[row]);
      for (size_t d = 0; d < dim; ++d) {
        const size_t at = (row * heads.size() + head) * dim + d;
        heads[head].keys.push_back(to_float(to_f16(k[at])));
        heads[head].values.push_back(to_float(to_f16(v[at])));
      }
    }
  }
}

std::optional<double> AttentionProbe::weight_difference(const std::vector<double>& exact,
                                                        const std::vector<int16_t>& came,
                                                        const std::vector<double>& held,
                                                        const std::vector<int16_t>& tags) {
  if (came.size() != tags.size()) return std::nullopt;
  std::vector<size_t> order(came.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (came != tags) {
    std::stable_partition(order.begin(), order.end(),
                          [&](size_t row) { return came[row] != kTextRow; });
  }
  double sum = 0;
  for (size_t j = 0; j < order.size(); ++j) {
    if (came[order[j]] != tags[j]) return std::nullopt;
    sum += std::pow(held[j] - exact[order[j]], 2);
  }
  return sum;
}

void AttentionProbe::note(Sequence& sequence, size_t policy, int layer, const Row& row, float scale,
                          Stream& stream) {
  AttentionError& error = sequence.errors[policy][static_cast<size_t>(layer)];
  ScoreHistogram& scores = sequence.scores[policy];
  const std::vector<HeadRows>& rows = sequence.rows[static_cast<size_t>(layer)];
  const std::vector<HeadRows> held =
      policies_[policy]->inspect(sequence.ids[policy], layer, stream);
  error.slots += static_cast<double>(held[0].tags.size());
  const std::vector<Parts> all = all_parts(row.q, shape(), held, scale, stream);
  for (size_t query = 0; query < all.size(); ++query) {
    const size_t head = query / static_cast<size_t>(shape().q_per_kv());
    const Parts& exact = row.parts[query];
    const Parts& mine = all[query];
    for (size_t j = 0; j < exact.scores.size(); ++j) {
      if (rows[head].tags[j] != kTextRow) ++scores.exact[ScoreHistogram::bin(exact.scores[j])];
    }
    for (size_t j = 0; j < mine.scores.size(); ++j) {
      if (held[head].tags[j] == kTextRow) continue;
      ++scores.quantized[ScoreHistogram::bin(mine.scores[j])];
      ++scores.calibrated[ScoreHistogram::bin(mine.remapped[j])];
    }
    if (const auto apart =
            weight_difference(exact.weights, rows[head].tags, mine.weights, held[head].tags)) {
      error.weight_difference += *apart;
      error.weights += static_cast<double>(mine.weights.size());
    }
    error.visual_difference += squared_distance(mine.visual, exact.visual);
    error.text_difference += squared_distance(mine.text, exact.text);
  }
  for (size_t i = 0; i < row.exact.size(); ++i) {
    const auto x = static_cast<double>(row.exact[i]);
    error.difference += std::pow(static_cast<double>(row.got[i]) - x, 2);
    error.reference += x * x;
  }
  error.tokens += static_cast<double>(rows[0].tags.size());
  ++error.steps;
}

void AttentionProbe::end(Stream& stream) {
  for (const auto& policy : policies_) policy->end(stream);
  reference_->end(stream);
}

}  // namespace kvlm
