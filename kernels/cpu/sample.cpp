#include "kernels/cpu/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvlm::cpu {

namespace {

/// Puts the ids of the `top_k` largest logits to the front of `order`, and what equals the last of
/// them; all if top_k is 0. Returns how many.
size_t sort_largest(std::span<const float> logits, int top_k, std::span<int32_t> order) {
  std::iota(order.begin(), order.end(), 0);
  const auto larger = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  size_t kept = order.size();
  if (top_k > 0) kept = std::min(kept, static_cast<size_t>(top_k));
  const auto rest = order.begin() + static_cast<std::ptrdiff_t>(kept);
  std::partial_sort(order.begin(), rest, order.end(), larger);
  if (kept == order.size()) return kept;
  const float least = logits[static_cast<size_t>(order[kept - 1])];
  const auto tied = std::partition(
      rest, order.end(), [&](int32_t id) { return logits[static_cast<size_t>(id)] == least; });
  std::sort(rest, tied);
  return static_cast<size_t>(tied - order.begin());
}

/// Unnormalised probabilities in place of the logits of `ids`, the largest first. Returns their
/// sum.
double exponentials(std::span<float> logits, std::span<const int32_t> ids, double temperature) {
  const double max = static_cast<double>(logits[static_cast<size_t>(ids[0])]);
  double total = 0;
  for (const int32_t id : ids) {
    float& value = logits[static_cast<size_t>(id)];
    value = static_cast<float>(std::exp((static_cast<double>(value) - max) / temperature));
    total += static_cast<double>(value);
  }
  return total;
}

/// Draws from penalised logits. `order` (vocab,) is workspace.
int32_t draw(std::span<float> logits, const RowSampling& row, std::span<int32_t> order) {
  size_t kept = sort_largest(logits, row.top_k, order);
  double total = exponentials(logits, order.first(kept), row.temperature);
  const auto probability = [&](size_t i) {
    return static_cast<double>(logits[static_cast<size_t>(order[i])]);
  };
  if (row.top_p < 1) {
    double reached = 0;
    size_t count = 0;
    while (count < kept && (count == 0 || reached < row.top_p * total)) {
      reached += probability(count++);
    }
    kept = count;
    total = reached;
  }
  double left = row.uniform * total;
  for (size_t i = 0; i < kept; ++i) {
    left -= probability(i);
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace

int32_t sample_row(std::span<float> logits, const RowSampling& row, std::span<int32_t> workspace) {
  if (std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); })) {
    return kNoToken;
  }
  if (row.penalises()) {
    const float penalty = row.repetition_penalty;
    for (size_t i = 0; i < logits.size(); ++i) {
      float& logit = logits[i];
      if (row.has_seen(static_cast<int>(i))) logit = logit > 0 ? logit / penalty : logit * penalty;
    }
  }
  if (row.draws()) return draw(logits, row, workspace.first(logits.size()));
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream) {
  const auto vocab = static_cast<size_t>(logits.shape()[1]);
  const auto threads = static_cast<size_t>(stream.pool().threads());
  // A part for every worker, also when the rows are few: a later call with more allocates nothing.
  std::span<int32_t> workspace;
  if (std::any_of(rows.begin(), rows.end(), [](const RowSampling& row) { return row.draws(); })) {
    const size_t size = vocab * threads;
    workspace = {reinterpret_cast<int32_t*>(stream.scratch(0, size * sizeof(int32_t))), size};
  }
  stream.pool().parallel_for(rows.size(), [&](size_t i, int worker) {
    const std::span row(logits.as<float>() + i * vocab, vocab);
    const size_t own = workspace.size() / threads * static_cast<size_t>(worker);
    ids[i] = cpu::sample_row(row, rows[i], workspace.subspan(own));
    if (rows[i].seen != nullptr && ids[i] != kNoToken) rows[i].mark(ids[i]);
  });
}

}  // namespace kvlm::cpu
