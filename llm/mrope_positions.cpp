#include "llm/mrope_positions.h"

#include <algorithm>

namespace kvlm {

PromptPositions mrope_positions(std::span<const PositionSpan> spans, MropeRule rule) {
  PromptPositions positions;
  int32_t current = 0;
  int32_t after_largest = 0;
  for (const PositionSpan& span : spans) {
    if (span.times.empty()) {
      const std::vector<Position> text =
          following_positions(current, static_cast<size_t>(span.rows));
      positions.rows.insert(positions.rows.end(), text.begin(), text.end());
      current += static_cast<int32_t>(span.rows);
      after_largest = std::max(after_largest, current);
      continue;
    }
    for (const int32_t time : span.times) {
      for (int32_t y = 0; y < span.height; ++y) {
        for (int32_t x = 0; x < span.width; ++x) {
          positions.rows.push_back({current + time, current + y, current + x});
          after_largest = std::max(after_largest, positions.rows.back().largest() + 1);
        }
      }
    }
    current =
        rule == MropeRule::kTrained ? after_largest : current + std::max(span.height, span.width);
  }
  positions.next = current;
  return positions;
}

std::vector<int32_t> clip_times(int slices, double tokens_per_second, double seconds_per_slice) {
  // 21 positions of 2 slices are 20.999... in double.
  const float positions =
      static_cast<float>(tokens_per_second) * static_cast<float>(seconds_per_slice);
  std::vector<int32_t> times;
  for (int slice = 0; slice < slices; ++slice) {
    times.push_back(static_cast<int32_t>(static_cast<float>(slice) * positions));
  }
  return times;
}

}  // namespace kvlm
