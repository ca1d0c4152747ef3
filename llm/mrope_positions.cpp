#include "llm/mrope_positions.h"

#include <algorithm>

namespace kvlm {

PromptPositions mrope_positions(std::span<const PositionSpan> spans, MropeAdvance advance) {
  PromptPositions positions;
  int32_t current = 0;
  for (const PositionSpan& span : spans) {
    if (span.times.empty()) {
      const std::vector<Position> text =
          following_positions(current, static_cast<size_t>(span.rows));
      positions.rows.insert(positions.rows.end(), text.begin(), text.end());
      current += static_cast<int32_t>(span.rows);
      positions.next = std::max(positions.next, current);
      continue;
    }
    for (const int32_t time : span.times) {
      for (int32_t y = 0; y < span.height; ++y) {
        for (int32_t x = 0; x < span.width; ++x) {
          positions.rows.push_back({current + time, current + y, current + x});
          positions.next = std::max(positions.next, positions.rows.back().largest() + 1);
        }
      }
    }
    current = advance == MropeAdvance::kLongestSide ? current + std::max(span.height, span.width)
                                                    : positions.next;
  }
  return positions;
}

std::vector<int32_t> clip_times(int slices, double tokens_per_second, double seconds_per_slice) {
  std::vector<int32_t> times;
  for (int slice = 0; slice < slices; ++slice) {
    times.push_back(static_cast<int32_t>(slice * tokens_per_second * seconds_per_slice));
  }
  return times;
}

}  // namespace kvlm
