#include "llm/sampler.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/base/error.h"

namespace kvlm {

Sampler::Sampler(const SamplerOptions& options, int vocab_size)
    : options_(options),
      random_(options.seed),
      seen_(static_cast<size_t>(vocab_size), false),
      order_(static_cast<size_t>(vocab_size)) {}

void Sampler::see(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (id >= 0 && static_cast<size_t>(id) < seen_.size()) seen_[static_cast<size_t>(id)] = true;
  }
}

int32_t Sampler::sample(std::span<float> logits) {
  assert(logits.size() == seen_.size());
  if (std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); })) {
    throw Error(
        ErrorCode::kCorruptFile,
        "the model's logits are not numbers: its weights are damaged or overflow; check the "
        "checkpoint's files, or try --dtype f32");
  }
  if (options_.repetition_penalty != 1) {
    const auto penalty = static_cast<float>(options_.repetition_penalty);
    for (size_t id = 0; id < logits.size(); ++id) {
      if (seen_[id]) logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    }
  }
  if (options_.temperature <= 0 || options_.top_k == 1) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  return draw(logits);
}

int32_t Sampler::draw(std::span<float> logits) {
  std::iota(order_.begin(), order_.end(), 0);
  const auto larger = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  size_t kept = order_.size();
  if (options_.top_k > 0) kept = std::min(kept, static_cast<size_t>(options_.top_k));
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept),
                    order_.end(), larger);

  // Unnormalised probabilities, in place of the logits of the kept ids.
  const double max = static_cast<double>(logits[static_cast<size_t>(order_[0])]);
  double total = 0;
  for (size_t i = 0; i < kept; ++i) {
    float& value = logits[static_cast<size_t>(order_[i])];
    value = static_cast<float>(std::exp((static_cast<double>(value) - max) / options_.temperature));
    total += static_cast<double>(value);
  }
  if (options_.top_p < 1) {
    double reached = 0;
    size_t count = 0;
    while (count < kept && (count == 0 || reached < options_.top_p * total)) {
      reached += static_cast<double>(logits[static_cast<size_t>(order_[count])]);
      ++count;
    }
    kept = count;
    total = reached;
  }
  // 53 random bits, not std::uniform_real_distribution, whose values differ between libraries.
  const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;
  double left = uniform * total;
  for (size_t i = 0; i < kept; ++i) {
    left -= static_cast<double>(logits[static_cast<size_t>(order_[i])]);
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace kvlm
