#include "kvcache/engine/least_score.h"

#include <algorithm>
#include <array>
#include <cassert>

namespace kvlm {

namespace {

/// Index of the last minimum. Vectorised: a batch calls it thousands of times per step.
int last_least(std::span<const float> scores) noexcept {
  constexpr size_t kTogether = 16;
  std::array<float, kTogether> least;
  least.fill(scores[0]);
  size_t i = 0;
  for (; i + kTogether <= scores.size(); i += kTogether) {
    for (size_t j = 0; j < kTogether; ++j) {
      least[j] = scores[i + j] < least[j] ? scores[i + j] : least[j];
    }
  }
  for (; i < scores.size(); ++i) least[0] = std::min(least[0], scores[i]);
  const float smallest = *std::min_element(least.begin(), least.end());
  const auto found = std::find(scores.rbegin(), scores.rend(), smallest);
  return std::max(0, static_cast<int>(scores.rend() - found) - 1);
}

}  // namespace

int least_scored(const LeastWeight& of, std::span<const float> scores) noexcept {
  const int end = std::min(of.spared, static_cast<int>(scores.size()));
  assert(of.first < end);
  const auto first = static_cast<size_t>(of.first);
  return of.first + last_least(scores.subspan(first, static_cast<size_t>(end) - first));
}

}  // namespace kvlm
